"""benchmarks.device_check on the emulator: that it runs, writes its rows, and leaves them when it is cut short."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import device_check
from benchmarks.device_check import Check
from benchmarks.kernels import KERNELS, WEIGHTS

ROOT = Path(__file__).resolve().parent.parent


def rows_of(folder):
    return [json.loads(line) for line in (folder / "device_check.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
def test_whole_run_on_the_emulator(tmp_path):
    command = [sys.executable, "-m", "benchmarks.device_check", "--emulated", "--out", tmp_path, "--seconds", "900"]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, check=False)
    rows = rows_of(tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + str([row for row in rows if row["part"] == "failure"])
    assert all(row["emulated"] for row in rows)
    kernels = [row for row in rows if row["part"] == "kernels"]
    assert [(row["dtype"], row["kernel"]) for row in kernels] == [
        (kind, name) for kind in WEIGHTS for name, kernel in KERNELS.items() if kind in kernel.bytes
    ]
    assert all(row["backend"] == "cuda" and row["fraction_of_copy"][1] > 0 for row in kernels)
    assert {(row["dtype"], row["microbatches"]) for row in rows if row["part"] == "windows"} == {
        (kind, n) for kind in ("fp32", "bf16", "bf16+fp32") for n in (1, 4)
    }
    assert {row["call"] for row in rows if row["part"] == "host"} == {"accumulate", "step"}
    assert {row["optimizer"] for row in rows if row["part"] == "training"} == {"fused_accum", "torch AdamW(fused)"}
    assert [row["outcome"] for row in rows if row["part"] == "sanitizer"] == ["unavailable"] * 2
    (tests,) = [row for row in rows if row["part"] == "tests"]
    assert tests["passed"] >= 8
    assert "nothing was measured" in done.stdout


def test_without_a_gpu_it_says_so(tmp_path):
    if shutil.which("nvidia-smi"):
        pytest.skip("there may be a GPU")
    with pytest.raises(SystemExit, match="--emulated needs none"):
        device_check.main(["--out", str(tmp_path)])


def test_what_runs_out_of_time_is_ended_with_its_children_and_keeps_its_rows(tmp_path):
    check = Check(tmp_path, seconds=60, emulated=True)
    check.write("kernels", backend="cuda")
    script = "import subprocess, sys; print('begun', flush=True); subprocess.run(['sleep', '1000'])"
    code, output = check.call("build", [sys.executable, "-c", script], 2)
    assert code is None
    assert output == "begun\n"
    check.fail("build", device_check.last_words(code, output))
    assert [row["part"] for row in rows_of(tmp_path)] == ["kernels", "failure"]
    assert check.rows("failure")[0]["why"] == "out of time: begun"


def test_goals_are_judged_by_the_worst_row(tmp_path):
    check = Check(tmp_path, seconds=60, emulated=False)
    large = {"backend": "cuda", "bytes": 1 << 30}
    assert [line.split(":")[0] for line in device_check.goals(check)] == ["not measured"] * 5
    check.write("kernels", **large, fraction_of_copy=[0.9, 0.95, 1.0])
    check.write("kernels", **large, fraction_of_copy=[0.8, 0.89, 0.9])
    check.write("kernels", backend="cuda", bytes=1 << 20, fraction_of_copy=[0.1, 0.1, 0.1])
    check.write("host", call="step", torch="AdamW(fused)", part_of_torch=[0.1, 0.15, 0.3])
    for n, speedup in ((1, 1.6), (4, 1.3), (8, 1.05)):
        check.write("windows", dtype="bf16+fp32", microbatches=n, speedup=[1.0, speedup, 2.0])
    copies, host, *windows = device_check.goals(check)
    assert copies.startswith("MISSED: every kernel at least 0.90")
    assert copies.endswith("(worst 0.89 of 2)")
    assert host.startswith("reached: ")
    assert [line.split(":")[0] for line in windows] == ["reached", "reached", "MISSED"]


def test_a_failing_part_fails_the_check(tmp_path, monkeypatch, capsys):
    def broken(check, seconds):
        check.fail("broken", f"{seconds}")

    monkeypatch.setattr(device_check, "PARTS", (device_check.Part("broken", 5, broken),))
    assert device_check.main(["--out", str(tmp_path)]) == 1
    assert "broken" in capsys.readouterr().out
