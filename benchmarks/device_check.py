"""Everything to know of a GPU, in one command of at most four minutes: build, tests, sanitizers, measurements.

Needs python3, torch >= 2.11, triton, nvcc, ninja and pytest; downloads nothing. Each part is a process of
its own with a time limit; rows are written as they come, so that a run cut short leaves what it has. With --emulated
all of it runs on the CPU, the CUDA kernels on the emulator of tests/native: that tests this program, and measures
nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"

READING = """\
How to read the output:
  device_check.jsonl has one JSON object a line: "part" says of what, "seconds" since the start. Ratios are [low,
  median, high] of the 95 % interval over rounds in which the variants took turns.
  kernels   of copy: GB/s of counted bytes (design, section 6) over those of b.copy_(a), which took turns with it.
            Goal: at least 0.90.
  windows   x faster: a window of N micro-batches in FusedAccumAdamW against the peer's. Goal with fp32 masters: 1.5,
            1.2 and 1.1 at N = 1, 4 and 8.
  host      ours of it: how long a call keeps the host, as a part of torch's. Goal: step at most 0.20 of
            torch.optim.AdamW(fused=True) for 300 tensors.
  training  tokens per second and peak memory of a GPT's windows.
Exit code: 0 if every part ran and no test failed, else 1. Missed goals do not change it."""


class Part(NamedTuple):
    """A part of the check: seconds it may take, and what runs it (given the Check)."""

    name: str
    seconds: float
    run: Any


class Check:
    """One run: its rows and its deadline."""

    def __init__(self, out: Path, seconds: float, emulated: bool) -> None:
        self.out, self.emulated = out, emulated
        self.begun = time.perf_counter()
        self.deadline = self.begun + seconds
        self.failed: list[str] = []
        self.rows_file = out / "device_check.jsonl"
        out.mkdir(parents=True, exist_ok=True)
        self.rows_file.write_text("")
        self.environment = dict(os.environ)

    def left(self) -> float:
        return self.deadline - time.perf_counter()

    def write(self, part: str, **row: Any) -> None:
        passed = round(time.perf_counter() - self.begun, 1)
        with open(self.rows_file, "a") as file:
            file.write(json.dumps({"part": part, "emulated": self.emulated, "seconds": passed, **row}) + "\n")

    def rows(self, part: str) -> list[dict[str, Any]]:
        found = map(json.loads, self.rows_file.read_text().splitlines())
        return [row for row in found if row["part"] == part]

    def fail(self, part: str, why: str) -> None:
        self.failed.append(f"{part}: {why}")
        self.write("failure", of=part, why=why)

    def call(self, part: str, command: Sequence[str | Path], seconds: float) -> tuple[int | None, str]:
        """Exit code (None: out of time) and output of ``command``, which is also kept as PART.log."""
        log = self.out / f"{part.replace(' ', '-')}.log"
        with open(log, "w") as file:
            process = subprocess.Popen(
                list(map(str, command)), cwd=ROOT, env=self.environment, stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                code = process.wait(min(seconds, max(self.left(), 1)))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)  # its own children too: a compiler, a sanitizer
                process.wait()
                code = None
        return code, log.read_text(errors="replace")

    def python(self, module: str, *arguments: str) -> list[str]:
        """The command that runs ``module`` in a Python that sees fused_accum as this check does."""
        return [sys.executable, "-m", *(["cuda_emulated"] if self.emulated else []), module, *arguments]


# -- the parts -----------------------------------------------------------------------------------------------------


def build(check: Check, seconds: float) -> None:
    """The extension, for this GPU's architecture alone unless FUSED_ACCUM_CUDA_ARCHS says otherwise."""
    start = time.perf_counter()
    if check.emulated:
        command = [sys.executable, "-c", "import cuda_emulated; print(cuda_emulated.build_module())"]
        check.environment["PYTHONPATH"] = os.pathsep.join([str(TESTS), str(ROOT)])
    else:
        check.environment.setdefault("FUSED_ACCUM_CUDA_ARCHS", architecture())
        check.environment["FUSED_ACCUM_FORCE_CUDA"] = "1"
        command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    code, output = check.call("build", command, seconds)
    check.write("build", took=round(time.perf_counter() - start, 1), code=code)
    if code != 0:
        check.fail("build", last_words(code, output))
    elif check.emulated:
        check.environment["FUSED_ACCUM_EMULATED"] = output.split()[-1]


def architecture() -> str:
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split()
    except (OSError, subprocess.SubprocessError) as error:
        raise SystemExit(f"no NVIDIA GPU answers here ({error}); --emulated needs none") from None
    return found[0].replace(".", "")


def tests(backend: str) -> Any:
    def run(check: Check, seconds: float) -> None:
        """The tests that need a GPU, on one backend; emulated, a few of the same files."""
        part = f"tests of {backend}"
        chosen = ["-k", f"{backend}-cuda", "-m", "gpu"]
        if check.emulated:
            chosen = ["-k", f"{backend} and (sizes or earlier or lr)"]
        report = check.out / f"tests-{backend}.xml"
        command = [
            *("pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", f"--rootdir={ROOT}"), *chosen,
            str(TESTS / "test_gpu.py"), str(TESTS / "test_bits.py"),
        ]  # fmt: skip
        code, output = check.call(part, check.python(*command), seconds)
        outcomes: dict[str, int] = {}
        if report.exists():
            for case in ElementTree.parse(report).iter("testcase"):
                found = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
                outcome = (found or ["passed"])[0]
                outcomes[outcome] = outcomes.get(outcome, 0) + 1
                name = f"{case.get('classname')}.{case.get('name')}"
                check.write("test", name=name, outcome=outcome, took=float(case.get("time", 0)))
        check.write("tests", backend=backend, code=code, **outcomes)
        if code != 0:
            check.fail(part, last_words(code, output))

    return run


def sanitizer(tool: str) -> Any:
    def run(check: Check, seconds: float) -> None:
        """One small window per kernel under compute-sanitizer."""
        program = shutil.which("compute-sanitizer")
        if check.emulated or program is None:
            reason = "emulated" if check.emulated else "compute-sanitizer is not installed"
            check.write("sanitizer", tool=tool, outcome="unavailable", reason=reason)
            return
        command = [program, "--tool", tool, "--error-exitcode", "3"]
        command += check.python("benchmarks.device_parts", "small", "--rows", str(check.rows_file))
        code, output = check.call(f"sanitizer {tool}", command, seconds)
        summary = next((line for line in output.splitlines() if "ERROR SUMMARY" in line or "hazard" in line), "")
        outcome = {0: "clean", 3: "errors"}.get(code, "unavailable")
        check.write("sanitizer", tool=tool, outcome=outcome, reason=summary or last_words(code, output))
        if outcome == "errors":
            check.fail(f"sanitizer {tool}", summary)

    return run


def measure(name: str) -> Any:
    def run(check: Check, seconds: float) -> None:
        """One function of benchmarks.device_parts, which prints a row a line."""
        seconds = min(seconds, check.left())
        words = [name, "--rows", str(check.rows_file), "--seconds", str(seconds)]
        words += ["--emulated"] if check.emulated else []
        code, output = check.call(name, check.python("benchmarks.device_parts", *words), seconds)
        if code != 0:
            check.fail(name, last_words(code, output))

    return run


def last_words(code: int | None, output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    telling = [line for line in lines if re.search(r"error|Error|failed|FAILED", line)] or lines or [""]
    return f"{'out of time' if code is None else f'exit code {code}'}: {telling[-1].strip()[:500]}"


PARTS = (
    Part("build", 100, build),
    Part("environment", 20, measure("environment")),
    Part("tests", 60, tests("cuda")),
    Part("kernels", 40, measure("kernels")),
    Part("windows", 40, measure("windows")),
    Part("host", 12, measure("host")),
    Part("training", 20, measure("training")),
    Part("memcheck", 25, sanitizer("memcheck")),
    Part("racecheck", 25, sanitizer("racecheck")),
    Part("tests-triton", 60, tests("triton")),  # compiles a hundred kernels
)


# -- what it says --------------------------------------------------------------------------------------------------


def summary(check: Check) -> str:
    """Tables of all rows there are; benchmarks.results' tables, without importing torch here."""
    def median(value: Any) -> str:
        return f"{value[1]:.2f}" if isinstance(value, list) else str(value)

    columns = {
        "kernels": ("backend", "kernel", "dtype", "numel", "gb_per_s", "copy_gb_per_s", "fraction_of_copy"),
        "windows": ("list", "dtype", "microbatches", "peer", "parameters", "ms", "peer_ms", "speedup"),
        "host": ("call", "tensors", "torch", "us", "torch_us", "part_of_torch"),
        "training": ("optimizer", "parameters", "microbatches", "tokens_per_s", "ratio", "peak_gib"),
        "sanitizer": ("tool", "outcome", "reason"),
        "tests": ("backend", "code", "passed", "failure", "error", "skipped"),
        "failure": ("of", "why"),
    }
    text = []
    for part, names in columns.items():
        rows = [[median(row.get(name, "")) for name in names] for row in check.rows(part)]
        if rows:
            text += ["", part, "", table(names, rows)]
    return "\n".join([*text, "", "goals", "", *goals(check)])


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in [headers, *rows]) for i in range(len(headers))]
    padded = [[cell.ljust(width) for cell, width in zip(row, widths)] for row in [headers, *rows]]
    lines = ["| " + " | ".join(row) + " |" for row in padded]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def goals(check: Check) -> list[str]:
    """Issue 4's goals that can be judged from the rows."""
    if check.emulated:
        return ["emulated: nothing was measured"]
    kernels = [row for row in check.rows("kernels") if row["backend"] == "cuda" and row["bytes"] >= 256 << 20]
    host = [row for row in check.rows("host") if (row["call"], row["torch"]) == ("step", "AdamW(fused)")]
    fractions, parts = [row["fraction_of_copy"][1] for row in kernels], [row["part_of_torch"][1] for row in host]
    found = [
        ("every kernel at least 0.90 of copy bandwidth at 256 MB and more", fractions, min, lambda it: it >= 0.9),
        ("step() host time at most 0.20 of torch.optim.AdamW(fused=True)", parts, max, lambda it: it <= 0.2),
    ]
    for n, goal in ((1, 1.5), (4, 1.2), (8, 1.1)):
        rows = [row for row in check.rows("windows") if (row["dtype"], row["microbatches"]) == ("bf16+fp32", n)]
        words = f"bf16 windows of N={n} with fp32 masters at least {goal}x faster than torch's"
        found.append((words, [row["speedup"][1] for row in rows], min, lambda it, goal=goal: it >= goal))
    lines = []
    for goal, figures, worst_of, reached in found:
        worst = worst_of(figures) if figures else None
        word = "not measured" if worst is None else "reached" if reached(worst) else "MISSED"
        lines.append(f"{word}: {goal}" + ("" if worst is None else f" (worst {worst:.2f} of {len(figures)})"))
        check.write("goal", goal=goal, outcome=word, worst=worst)
    return lines


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.device_check", description=__doc__, epilog=READING,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    out = ROOT / "runs" / "device_check"
    add("--out", type=Path, default=out, help="folder for rows and logs (default %(default)s)")
    add("--seconds", type=float, default=235, help="for everything (default %(default)s)")
    add("--part", choices=[part.name for part in PARTS], action="append", help="only this one (may be repeated)")
    add("--emulated", action="store_true", help="on the CPU, with tiny sizes: tests this program, measures nothing")
    options = parser.parse_args(argv)
    check = Check(options.out.resolve(), options.seconds, options.emulated)
    for part in PARTS:
        if options.part and part.name not in options.part and not (options.emulated and part.name == "build"):
            continue
        if check.emulated and part.name == "tests-triton":
            continue
        if check.left() < 5:
            check.fail(part.name, "no time was left")
            continue
        print(f"{part.name} ... ({check.left():.0f} s left)", file=sys.stderr, flush=True)
        part.run(check, part.seconds * (20 if check.emulated else 1))  # a busy CPU is no failure
    print(f"{summary(check)}\n\nrows: {check.rows_file}")
    return 1 if check.failed else 0


if __name__ == "__main__":
    sys.exit(main())
