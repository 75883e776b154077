"""benchmarks.fidelity in a quick form: what it compares, what it writes, and that masters keep a run near to fp32."""

import contextlib
import io
import json

import pytest
import torch

from benchmarks import fidelity
from benchmarks.harness import Estimate
from fused_accum.backends import rounding

STEPS = 24
ARGUMENTS = ["--quick", "--threads", "1", "--seeds", "1", "--steps", str(STEPS)]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """(exit code, the rows and all of its --json, its --plot, what it printed)."""
    folder, threads = tmp_path_factory.mktemp("fidelity"), torch.get_num_threads()
    files = folder / "fidelity.json", folder / "fidelity.png"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        status = fidelity.main([*ARGUMENTS, "--json", str(files[0]), "--plot", str(files[1])])
    torch.set_num_threads(threads)
    return status, json.loads(files[0].read_text()), files[1], printed.getvalue()


def last(result, run):
    return next(row for row in result["rows"] if (row["run"], row["step"]) == (run, STEPS))


def test_masters_keep_a_bf16_run_nearer_to_fp32_than_torchs_adamw(written):
    status, result, _, printed = written
    assert status == 0
    torchs = Estimate(*last(result, fidelity.TORCH)["distance"]).median
    for run in fidelity.MUST_BE_NEARER:
        row = last(result, run)
        assert 0 < Estimate(*row["distance"]).median < torchs
        assert Estimate(*row["nearer"]).median == pytest.approx(torchs / Estimate(*row["distance"]).median)
        assert row["nearer_in"] == 1
    for run in (fidelity.TORCH, *fidelity.OPTIONS):
        assert f"| {run} " in printed


def test_what_is_written(written):
    _, result, plot, _ = written
    assert result["benchmark"] == "fidelity"
    assert {"processor", "torch", "fused_accum", "commit", "time"} <= result["environment"].keys()
    runs = {row["run"] for row in result["rows"]}
    assert runs == {fidelity.TORCH, *fidelity.OPTIONS}
    steps = [row["step"] for row in result["rows"] if row["run"] == fidelity.TORCH]
    assert steps == sorted(set(steps))
    assert steps[-1] == STEPS
    assert len(steps) == 4
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_run_that_is_not_nearer_is_exit_code_1(written, monkeypatch, capsys):
    _, result, _, _ = written
    worse = "fp32 sums, split masters"
    rows = [{**row, "nearer_in": row["nearer_in"] - (row["run"] == worse)} for row in result["rows"]]
    monkeypatch.setattr(fidelity, "measure", lambda *_: rows)
    assert fidelity.main(ARGUMENTS) == 1
    assert capsys.readouterr().out.strip().endswith("in every seed: fp32 sums, split masters")


def test_weights_are_the_masters():
    master = torch.randn(1000)
    high, low = rounding.split(master)
    for p, state in (high, {"master": low}), (master.bfloat16(), {"master": master}), (master, {}):
        assert torch.equal(fidelity._master(p, state), master.double())
