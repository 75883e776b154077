"""What the timing benchmarks say: options, environment, tables, JSON, comparison with older results, figures."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import fused_accum
from benchmarks.harness import FEWEST_ROUNDS, Estimate, Limit, NotEqual, cache_bytes
from fused_accum import _native, backends


def environment(device: torch.device, backend: str) -> dict[str, Any]:
    """Machine, versions and commit: what a number means nothing without."""
    native, _ = _native.load()
    machine = {"processor": processor(), "cores": len(usable_cores()), "cache_bytes": cache_bytes(device)}
    if device.type == "cuda":
        machine["accelerator"] = torch.cuda.get_device_name(device)
    return {
        **machine,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "fused_accum": fused_accum.__version__,
        "commit": commit(),
        "device": str(device),
        "backend": backends.choose(backend, device)[0].name,
        "cpu_isa": native.cpu_isa() if native else None,
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def processor() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def usable_cores() -> Iterable[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def commit() -> str | None:
    """The checkout's commit, "+changes" where tracked files differ from it; None outside a checkout."""

    def git(*arguments: str) -> str:
        root = Path(__file__).resolve().parent.parent
        run = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
        return run.stdout.strip()

    try:
        head = git("rev-parse", "--short=12", "HEAD")
        return head + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def heading(facts: dict[str, Any]) -> str:
    isa = f" {facts['cpu_isa']}" if facts["backend"] == "cpu" else ""
    where = facts.get("accelerator") or f"{facts['processor']}, {facts['threads']} of {facts['cores']} cores"
    return (
        f"fused_accum {facts['fused_accum']} ({facts['commit'] or 'no commit'}), backend {facts['backend']}{isa}; "
        f"torch {facts['torch']}; {where}; load {facts['load']}"
    )


def table(headers: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """An aligned Markdown table; the first column to the left, numbers to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(headers), *cells]) for i in range(len(headers))]
    right = [i > 0 and all(re.match(r"[-\d<>]|$", row[i]) for row in cells) for i in range(len(headers))]

    def line(row: Sequence[str]) -> str:
        return "| " + " | ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right)) + " |"

    rule = "|" + "|".join("-" * (w + 1) + (":" if r else "-") for w, r in zip(widths, right)) + "|"
    return "\n".join([line(headers), rule, *map(line, cells)])


def show(e: Estimate, digits: int = 2) -> str:
    return f"{e.median:.{digits}f} [{e.low:.{digits}f}, {e.high:.{digits}f}]"


# -- results: written, and compared with older ones ---------------------------------------------------------


def regressions(old: dict[str, Any], new: dict[str, Any], key: Sequence[str], figures: Sequence[str]) -> list[str]:
    """Rows that have become worse: the whole 95 % interval of a figure (larger is better) below the old one."""
    if old.get("benchmark") != new["benchmark"]:
        raise SystemExit(f"--against: that is a result of {old.get('benchmark')!r}, this is {new['benchmark']!r}")
    before = {tuple(row[k] for k in key): row for row in old["rows"]}
    found, compared = [], 0
    for row in new["rows"]:
        name = tuple(row[k] for k in key)
        for figure in figures if name in before else ():
            was, now = Estimate(*before[name][figure]), Estimate(*row[figure])
            compared += 1
            if now.high < was.low:
                found.append(f"{', '.join(map(str, name))}: {figure} {show(now)}, was {show(was)}")
    if not compared:
        raise SystemExit(f"--against: no row of that file has the same {', '.join(key)} as one of this run")
    return found


def arguments(program: str, text: str, reading: str, timed: bool = True) -> argparse.ArgumentParser:
    """The options all benchmarks have. ``reading``: how to read the output, shown by --help."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{program}", description=text, epilog=reading,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--backend", default="auto", help="of FusedAccumAdamW: auto, or a name from python -m fused_accum")
    add("--device", default="cpu", help="cpu, cuda, cuda:1, ... (default cpu)")
    add("--threads", type=int, help="CPU threads (default: torch's)")
    if timed:
        add("--rounds", type=int, help="how often every variant is timed, at most")
        add("--seconds", type=float, help=f"for each comparison; {FEWEST_ROUNDS} rounds are made in any case")
    add("--quick", action="store_true", help="smaller and fewer: under a minute on an idle machine")
    add("--json", metavar="FILE", type=Path, help="write environment and rows")
    add("--plot", metavar="PNG", type=Path, help="draw them (needs matplotlib)")
    add("--against", metavar="OLD.json", type=Path, help="compare with an older --json; exit code 1 if worse")
    return parser


def limit(options: argparse.Namespace, rounds: int, quick_seconds: float) -> Limit:
    """What --rounds, --seconds and --quick ask for; by default ``rounds``, but ten times as long as a quick run."""
    seconds = options.seconds or (quick_seconds if options.quick else 10 * quick_seconds)
    return Limit(options.rounds or rounds, seconds)


def start(options: argparse.Namespace) -> tuple[torch.device, dict[str, Any]]:
    """Applies the common options and prints the heading; ends the program when the backend does not work here."""
    if options.plot:
        pyplot()  # before minutes of measuring
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    try:
        backends.choose(options.backend, device)
    except (RuntimeError, ValueError) as error:
        raise SystemExit(str(error)) from None
    facts = environment(device, options.backend)
    print(heading(facts), flush=True)
    if "rounds" in options and (facts["load"] or 0) > facts["cores"] / 2:
        print(
            f"The machine is busy (load {facts['load']}, {facts['cores']} cores). Threads that wait for each other, "
            "as torch's do after every operation, suffer most from that: ratios to them are too good here."
        )
    return device, facts


def finish(
    result: dict[str, Any], options: argparse.Namespace, key: Sequence[str], figures: Sequence[str],
    draw: Callable[[dict[str, Any]], Any],
) -> int:  # fmt: skip
    """Writes what was asked for; returns the exit code: 1 when ``--against`` finds a row that became worse."""
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.plot:
        draw(result).savefig(options.plot, dpi=160, bbox_inches="tight")
    if not options.against:
        return 0
    worse = regressions(json.loads(options.against.read_text()), result, key, figures)
    print("\n".join(["", "worse than before:", *worse] if worse else ["", "nothing is worse than before"]))
    return 1 if worse else 0


@contextmanager
def quiet() -> Iterator[None]:
    """Without warnings: for calls that warn rightly, of what a benchmark means to do."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("--plot needs matplotlib: pip install 'fused-accum[bench]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def finished(figure: Any, result: dict[str, Any]) -> Any:
    """``figure`` with one legend for all of it, no boxes, and where the numbers come from."""
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        handles |= dict(zip(*reversed(axes.get_legend_handles_labels())))
    figure.tight_layout()
    figure.legend(handles.values(), handles.keys(), fontsize=8, ncols=5, loc="lower center", frameon=False,
                  bbox_to_anchor=(0.5, 1.0))  # fmt: skip
    figure.text(0.01, -0.03, heading(result["environment"]), fontsize=7, color="#555555")
    return figure


def run(main: Callable[[], int]) -> None:
    """Entry point of a benchmark: a failed gate is a message and exit code 2, with no number printed."""
    try:
        sys.exit(main())
    except NotEqual as error:
        print(f"not equal: {error}", file=sys.stderr)
        sys.exit(2)
