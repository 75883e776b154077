"""The tables in README.md and docs/ that show measured numbers, made from benchmarks/results/.

A page says where: everything between ``<!-- measured: NAME -->`` and ``<!-- end -->`` is written by
``python -m benchmarks.tables``; a test compares it with the results.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.results import table

ROOT = Path(__file__).resolve().parent.parent
PLACE = re.compile(r"(<!-- measured: ([\w ,]+) -->\n).*?(<!-- end -->)", re.DOTALL)

Row = dict[str, Any]


def results(name: str) -> list[dict[str, Any]]:
    """The committed results of one benchmark on a CPU, oldest first."""
    found = [json.loads(path.read_text()) for path in (ROOT / "benchmarks" / "results").glob("*.json")]
    found = [r for r in found if r["benchmark"] == name and r["environment"]["device"] == "cpu"]
    return sorted(found, key=lambda r: r["environment"]["time"])


def rows(name: str, *key: str) -> dict[tuple, Row]:
    """The newest row for every value of ``key``."""
    return {tuple(row[k] for k in key): row for result in results(name) for row in result["rows"]}


def times(estimate: list[float]) -> str:
    """A ratio, [low, median, high]."""
    return f"{estimate[1]:.2f}x"


def kernels(*dtypes: str) -> str:
    found = rows("kernels", "dtype", "kernel")
    return table(
        ["kernel", "dtypes", "bytes per parameter", "of `add_`'s bandwidth", "faster than torch's", "which is"],
        [
            (row["kernel"], dtype, row["bytes_per_parameter"], f"{row['fraction_of_add'][1]:.2f}",
             times(row["speedup"]), row["torch"])
            for (dtype, _), row in found.items() if dtype in dtypes
        ],
    )  # fmt: skip


def counted() -> str:
    """Bytes per parameter of every pass; a column per choice of dtypes."""
    found = rows("kernels", "kernel", "dtype")
    every, dtypes = (list(dict.fromkeys(key[i] for key in found)) for i in (0, 1))

    def cell(kernel: str, dtype: str) -> Any:  # a master takes no part in an accumulation
        row = found.get((kernel, dtype)) or found[kernel, dtype.partition("+")[0]]
        return row["bytes_per_parameter"]

    return table(["pass", *dtypes], [(kernel, *(cell(kernel, dtype) for dtype in dtypes)) for kernel in every])


def windows() -> str:
    """Ours against each torch loop; a column per N."""
    found = rows("window", "list", "dtype", "peer", "microbatches")
    every = sorted({n for *_, n in found})
    lines: dict[tuple, dict[int, str]] = {}
    for (tensors, dtype, peer, n), row in found.items():
        if "foreach" not in peer:  # never the faster of torch's two
            exact = "same update" if row["exact"] else "bf16 sums and moments: another, coarser update"
            lines.setdefault((dtype, tensors, peer, exact), {})[n] = times(row["speedup"])
    return table(
        ["dtype", "tensors", "against", "which is", *(f"N={n}" for n in every)],
        [(*line, *(cells.get(n, "") for n in every)) for line, cells in sorted(lines.items(), reverse=True)],
    )


def overhead() -> str:
    found = rows("overhead", "call", "torch", "tensors")
    peers = {"accumulate": "torch._foreach_add_", "step": "AdamW(fused)"}
    every = sorted({n for *_, n in found})

    def line(call: str, peer: str) -> Iterator[str]:
        yield f"`{call}()`, part of `{peer}`"
        for n in every:
            yield f"{found[call, peer, n]['part'][1]:.2f}"

    return table(["tensors", *map(str, every)], [tuple(line(*pair)) for pair in peers.items()])


def fidelity() -> str:
    """After the last step: the distance from the fp32 run of every run in bf16."""
    found = rows("fidelity", "run", "step")
    last = max(step for _, step in found)
    return table(
        ["bf16 run", "distance from the fp32 run", "times nearer than torch's", "nearer in"],
        [
            (run, f"{row['distance'][1]:.3f}", times(row["nearer"]), f"{row['nearer_in']} of {row['seeds']} seeds")
            for (run, step), row in found.items() if step == last
        ],
    )  # fmt: skip


def modes() -> str:
    """Whole training windows in every mode."""
    found = rows("modes", "parameters", "tokens", "mode")
    return table(
        ["parameters", "tokens in a micro-batch", "mode", "faster than torch's", "95 % interval", "gradient memory"],
        [
            (f"{parameters / 1e6:.1f} M", tokens, mode, times(row["speedup"]),
             "{0:.2f} to {2:.2f}".format(*row["speedup"]),
             f"{row['gradient_bytes'] / row['torch_gradient_bytes']:.1f} of torch's")
            for (parameters, tokens, mode), row in sorted(found.items(), key=lambda item: (-item[0][0], item[0][1]))
        ],
    )  # fmt: skip


def wgrad() -> str:
    """Weight gradients against buffer.addmm_; a column per number of tokens."""
    found = rows("wgrad", "dtype", "weight", "tokens")
    every = list(dict.fromkeys(tokens for *_, tokens in found))
    return table(
        ["activations", "weight", *(f"{tokens} tokens" for tokens in every)],
        [
            (dtype, weight, *(times(found[dtype, weight, tokens]["speedup"]) for tokens in every))
            for dtype, weight in dict.fromkeys(key[:2] for key in found)
        ],
    )


def pretrain() -> str:
    """Held-out loss of the main job as it goes."""
    found = rows("pretrain", "optimizer", "step")
    facts = results("pretrain")[-1]["environment"]
    sides = list(dict.fromkeys(side for side, _ in found))
    steps = sorted({step for _, step in found})
    names = {"fused": "FusedAccumAdamW", "torch": "torch.optim.AdamW"}
    lines = [(step, *(f"{found[side, step]['loss']:.4f}" for side in sides), f"{found[sides[0], step]['bigram']:.4f}")
             for step in steps]  # fmt: skip
    made = f"Python {facts['python']}'s sources, torch {facts['torch']}, {facts['time'][:10]}, at {facts['commit']}."
    return table(["step", *(names[side] for side in sides), "bigram model"], lines) + f"\n\n{made}"


def installs() -> str:
    """Rows of the install matrix that ran."""
    found = rows("install", "row", "python", "torch")
    return table(
        ["how", "Python", "torch", "works", "tried beside import and first use", "on"],
        [
            (row["row"], row["python"], row["torch"] or "none", ", ".join(row["works"]) or "import and report",
             ", ".join(row["tried"]), row["date"])
            for row in found.values()
        ],
    )  # fmt: skip


def torch_suite() -> str:
    """Results of PyTorch's own optimizer tests, by its version and torch's."""
    found = rows("torch_suite", "checkout", "torch")
    return table(
        ["PyTorch's tests", "torch", "Python", "passed", "failed", "skipped", "on"],
        [
            (row["checkout"], row["torch"], row["python"], row["passed"], row["failed"], row["skipped"], row["date"])
            for row in found.values()
        ],
    )


def machine() -> str:
    """What the results were measured on, and each benchmark's commit."""
    newest = {name: results(name)[-1]["environment"] for name in ("kernels", "window", "overhead")}
    facts = max(newest.values(), key=lambda facts: facts["time"])
    commits = ", ".join(f"{name} at {its['commit']}" for name, its in newest.items())
    return (
        f"Measured on {facts['threads']} cores of an {facts['processor']} ({facts['cpu_isa'].upper()}), "
        f"torch {facts['torch']}, {facts['time'][:10]}: {commits}."
    )


TABLES = {
    "machine": machine,
    "bytes": counted,
    "kernels": lambda: kernels("fp32", "bf16"),
    "kernels with masters": lambda: kernels("bf16+fp32", "bf16+split"),
    "windows": windows,
    "overhead": overhead,
    "fidelity": fidelity,
    "modes": modes,
    "wgrad": wgrad,
    "pretrain": pretrain,
    "installs": installs,
    "torch suite": torch_suite,
}


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def filled(text: str) -> str:
    """A page's text with its tables made anew."""
    return PLACE.sub(lambda m: f"{m[1]}{TABLES[m[2]]()}\n{m[3]}", text)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where a page would change")
    check = parser.parse_args(argv).check
    stale = []
    for page in pages():
        text = page.read_text()
        if (new := filled(text)) != text:
            stale.append(page.name)
            if not check:
                page.write_text(new)
    if stale:
        print(f"{'not up to date' if check else 'written'}: {', '.join(stale)}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
