"""`python -m fused_accum`: the report, selftest and estimate."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fused_accum import FusedAccumAdamW, __version__, estimate, report, selftest
from fused_accum.__main__ import main
from fused_accum.backends import registry
from fused_accum.backends.reference import Reference

NATIVE = report.collect()["native"] is not None


def command(*words, **env):
    """Exit code and output of `python -m fused_accum words`."""
    done = subprocess.run(
        [sys.executable, "-m", "fused_accum", *words], env={**os.environ, **env}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


# -- report -------------------------------------------------------------------------------------------------


def test_text_has_a_line_per_backend_and_json_the_same_facts(capsys):
    assert main([]) == (0 if NATIVE else 1)
    text = capsys.readouterr().out
    assert main(["--json"]) == (0 if NATIVE else 1)
    facts = json.loads(capsys.readouterr().out)
    assert facts["version"] == __version__
    assert facts["torch"] == torch.__version__
    assert [row["backend"] for row in facts["backends"]] == list(registry())
    for row in facts["backends"]:
        (line,) = (line for line in text.splitlines() if line.startswith(f"backend {row['backend']} "))
        assert line.endswith("works" if row["works"] else row["reason"])


# What stands for torch, and what the report must say of it.
TORCHES = {
    "absent": ("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')", "is not installed"),
    "broken": ("raise OSError('libtorch_cpu.so: cannot open')", "libtorch_cpu.so"),
    "old": ("__version__ = '2.9.1+cu128'", "older than 2.10"),
}


@pytest.mark.parametrize("kind", TORCHES)
def test_torch_missing_broken_or_old_is_reported(tmp_path, kind):
    text, words = TORCHES[kind]
    (tmp_path / "torch.py").write_text(text + "\n")
    code, output = command(PYTHONPATH=str(tmp_path))
    assert code == 2, output
    assert words in output
    assert "pip install 'torch>=2.10'" in output
    assert "Traceback" not in output
    code, output = command("selftest", PYTHONPATH=str(tmp_path))
    assert (code, words in output) == (2, True), output


def test_a_module_built_for_another_python_is_told_of(tmp_path):
    """As in a clone that two Pythons share."""
    ignored = shutil.ignore_patterns("*.so", "*.json", "__pycache__")
    shutil.copytree(Path(report.__file__).parent, tmp_path / "fused_accum", ignore=ignored)
    (tmp_path / "fused_accum" / "_C.cpython-39-x86_64-linux-gnu.so").touch()
    program = "from fused_accum import _native; print(_native.load()[1])"
    done = subprocess.run(  # -S: an editable installation would give its module
        [sys.executable, "-S", "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True
    )
    assert "was built for another Python alone (_C.cpython-39-x86_64-linux-gnu.so)" in done.stdout
    assert "C++17 compiler" in done.stdout
    assert "install fused_accum again" in done.stdout


def test_a_backend_that_fails_when_asked_is_a_line_of_the_report(monkeypatch):
    class Broken(Reference):
        def why_not(self, device):
            raise ZeroDivisionError("of no importance")

    monkeypatch.setitem(registry(), "broken", Broken())
    (row,) = (row for row in report.collect()["backends"] if row["backend"] == "broken")
    assert not row["works"]
    assert "of no importance" in row["reason"]


@pytest.mark.skipif(not NATIVE, reason="fused_accum._C is not built")
def test_the_instruction_set_asked_for_is_the_one_in_use():
    for isa, why in report.collect()["cpu_isas"].items():
        code, output = command("--json", FUSED_ACCUM_CPU_ISA=isa)
        facts = json.loads(output)
        if why:
            assert why in facts["native_problem"]
        else:
            assert facts["cpu_isa"] == isa
            assert code == 0


# -- selftest -----------------------------------------------------------------------------------------------


@pytest.mark.skipif(not NATIVE, reason="fused_accum._C is not built")
def test_selftest_runs_every_instruction_set(capsys):
    in_use = report.collect()["cpu_isa"]
    assert selftest.main() == 0
    output = capsys.readouterr().out
    for isa, why in report.collect()["cpu_isas"].items():
        assert f"cpu {isa:<16} {'not run' if why else 'ok'}" in output
    assert report.collect()["cpu_isa"] == in_use


class Shrinking(Reference):
    """Wrong by little: decays by a part in 100 000 too much."""

    def adamw(self, rows):
        super().adamw(rows)
        for p in rows.params:
            p.mul_(1 - 1e-5)


class Forgetful(Reference):
    """Adds nothing to the buffer after the first micro-batch."""

    def accumulate(self, accums, grads, first, scale):
        pairs = [(a, g) for a, g, is_first in zip(accums, grads, first, strict=True) if is_first]
        super().accumulate([a for a, _ in pairs], [g for _, g in pairs], [True] * len(pairs), scale)


class Jumbled(Reference):
    """Adds the rows of an embedding's gradient to their neighbours."""

    def scatter_rows(self, accum, index, grad, skip):
        super().scatter_rows(accum, (index + 1) % len(accum), grad, skip)


@pytest.mark.parametrize("wrong", [Shrinking, Forgetful, Jumbled])
def test_selftest_finds_a_wrong_backend(monkeypatch, capsys, wrong):
    monkeypatch.setitem(registry(), "wrong", wrong())
    monkeypatch.setattr(selftest, "candidates", lambda: [("wrong", torch.device("cpu"), "")])
    assert selftest.main() == 1
    assert "FAILED" in next(x for x in capsys.readouterr().out.splitlines() if x.startswith("wrong"))


# -- estimate -----------------------------------------------------------------------------------------------

# Design section 6, bytes per parameter: first accumulate, accumulate, step from the gradient, step with the
# last add.
FLOORS = {"fp32": (8, 12, 28, 36), "bf16": (6, 10, 22, 30)}


@pytest.mark.parametrize("dtype", FLOORS)
@pytest.mark.parametrize("n", [2, 3, 8])
def test_traffic_is_the_sum_of_the_passes(dtype, n):
    first, add, from_gradient, last = FLOORS[dtype]
    _, one, torch_many, many = estimate.modes(dtype, "fp32", "fp32", n)
    assert one.traffic == from_gradient
    assert many.traffic == first + (n - 2) * add + last
    if dtype == "fp32":
        assert torch_many.traffic == (n - 1) * 12 + 28


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("state", ["fp32", None])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_held_bytes_are_those_of_a_real_optimizer(dtype, state, amsgrad):
    torch_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}[dtype]
    p = torch.nn.Parameter(torch.ones(1000, dtype=torch_dtype))
    options = {"amsgrad": amsgrad, "state_dtype": None if state is None else torch.float32}
    optimizer = FusedAccumAdamW([p], **options)
    for end_window in (optimizer.step, optimizer.accumulate):
        p.grad = torch.ones_like(p)
        end_window()
    with pytest.warns(UserWarning, match="mid-window"):
        held = optimizer.state_dict()["state"][0]
    *_, ours = estimate.modes(dtype, "fp32", state, 2, amsgrad)
    size = {name: tensor.nbytes / 1000 for name, tensor in held.items() if tensor.dim()}
    assert size.pop("accum") == ours.buffer
    assert sum(size.values()) == ours.moments
    assert p.nbytes / 1000 == ours.params == ours.gradients


@pytest.mark.parametrize(("master", "held", "one", "last"), [("fp32", 4, 28, 36), ("split", 2, 26, 34)])
def test_estimate_with_masters(master, held, one, last):
    """Design section 6: the step from the gradient, and a window of 2 whose first accumulate moves 6."""
    stock, ours, _, window = estimate.modes("bf16", "fp32", "fp32", 2, master=master)
    assert (stock.masters, ours.masters, ours.total) == (0, held, 12 + held)
    assert (ours.traffic, window.traffic) == (one, 6 + last)


@pytest.mark.parametrize(("dtype", "master"), [("fp32", "fp32"), ("fp16", "split"), ("fp64", "fp32"), ("bf16", "x")])
def test_estimate_refuses_masters_nobody_has(dtype, master):
    with pytest.raises(ValueError, match=f"master_weights is '{master}' for {dtype} parameters"):
        estimate.modes(dtype, "fp32", "fp32", 2, master=master)


def test_estimate_command(capsys):
    words = ["estimate", "--params", "7e9", "--param-dtype", "bf16", "--n-microbatches", "4"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    printed = capsys.readouterr().out
    assert main(["--json", *words]) == 0
    assert capsys.readouterr().out == printed
    found = json.loads(printed)
    rows = {row["name"]: row for row in found["modes"]}
    assert list(rows) == [f"{who}, N={n}" for n in (1, 4) for who in ("torch.optim.AdamW", "fused_accum")]
    for name, row in rows.items():
        assert name in text
        assert row["bytes"]["total"] == 7e9 * row["bytes_per_param"]["total"]
    assert rows["fused_accum, N=4"]["bytes_per_param"]["total"] == 2 + 2 + 4 + 8
    assert "104.31 GiB" in text


@pytest.mark.parametrize(("text", "number"), [("7e9", 7e9), ("124M", 124e6), ("7B", 7e9), ("1.5k", 1500)])
def test_numbers_of_parameters(text, number, capsys):
    assert main(["estimate", "--params", text, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["params"] == number


@pytest.mark.parametrize(
    "words",
    [["--params", "0"], ["--params", "-1"], ["--params", "inf"], ["--params", "many"], ["--params", ""], [],
     ["--params", "7B", "--n-microbatches", "0"], ["--params", "7B", "--accum-dtype", "fp16"]],
)  # fmt: skip
def test_estimate_refuses(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["estimate", *words])
    assert stopped.value.code == 2
    assert "error:" in capsys.readouterr().err
