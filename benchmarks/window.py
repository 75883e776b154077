"""Whole windows: N micro-batches and their update, against torch.optim.AdamW and other optimizers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks import harness, results
from benchmarks.harness import DTYPES, Limit, Variant, ratio, scaled
from benchmarks.kernels import KERNELS, WEIGHTS
from benchmarks.peers import Ours, peers
from benchmarks.results import show

MICROBATCHES = (1, 4, 8)
DISTINCT_GRADS = 4  # sets of gradients, taken in turn: beyond any cache

READING = """\
How to read the output, one row per list of tensors, dtype, N and other optimizer:
  list          gpt-50: the 50 tensors of a GPT of 4 layers of width 512 (27 M parameters);
                gpt-300: those of 25 layers of width 256 (300 tensors, 20 M parameters). "clipped": ours with
                max_grad_norm, the others with clip_grad_norm_ before their step().
  ms            of a window with FusedAccumAdamW: N - 1 accumulate() and a step(). bytes: what it must move per
                parameter, counted. bf16+fp32, bf16+split: bf16 parameters and gradients, with masters.
  peer, its ms  torch's accumulate as autograd does: the first gradient becomes p.grad (free of charge), each further
                one is added into it, tensor by tensor; then step() and zero_grad(). Only these calls are timed.
  kind          exact: the same update (compared first; * marks the fastest of them). approximate: cheaper arithmetic,
                another result: for bf16, sums and moments in bf16. "fp32 masters": gradients are added in fp32,
                AdamW(fused) updates fp32 masters, and these are copied back.
  x faster      ms of the peer over ours, median of the rounds and its 95 % interval.
What to expect in fp32: at N=1 not slower than the fastest exact peer, at N=8 at least 0.95 of its speed (116 bytes
against 112: zeroing the buffer in place is the difference)."""

OURS = "fused_accum"
UPDATES = 2  # before results are compared: the second meets the state that the first has left


def gpt(width: int, layers: int, vocabulary: int = 0, context: int = 0) -> list[tuple[int, ...]]:
    """Shapes of a GPT: 12 tensors a layer, and the two embeddings where a vocabulary is given."""
    square, wide = (width, width), (4 * width, width)
    layer = [(width,), (width,), (3 * width, width), (3 * width,), square, (width,),
             (width,), (width,), wide, (4 * width,), wide[::-1], (width,)]  # fmt: skip
    return ([(vocabulary, width), (context, width)] if vocabulary else []) + layer * layers


def tensor_lists(shrink: int) -> dict[str, list[tuple[int, ...]]]:
    """The lists of tensors, their widths divided by ``shrink``."""
    return {
        "gpt-50": gpt(512 // shrink, 4, 27_000 // shrink, 1024 // shrink),
        "gpt-300": gpt(256 // shrink, 25),
    }


def window_bytes(kind: str, microbatches: int, clipped: bool = False) -> int:
    """What our window must move per parameter, counted."""
    dtype = WEIGHTS[kind].dtype
    first, add, alone, from_buffer, last = (
        kernel.bytes[kind if kernel.steps else dtype] for kernel in KERNELS.values()
    )
    if clipped:  # the norm of the last sum comes with the pass that writes it; of a single gradient it takes a read
        norm = DTYPES[dtype].itemsize
        return norm + alone if microbatches == 1 else first + add * (microbatches - 1) + from_buffer
    return alone if microbatches == 1 else first + add * (microbatches - 2) + last


def measure(
    name: str, shapes: Sequence[tuple[int, ...]], kind: str, microbatches: int, limit: Limit, backend: str,
    device: torch.device, clipped: bool = False, compiled: bool = False,
) -> list[dict[str, Any]]:  # fmt: skip
    """One row per peer; raises harness.NotEqual when an exact one does not compute what ours does."""

    def tensors() -> list[Tensor]:
        return [torch.randn(shape, device=device).to(DTYPES[weights.dtype]) for shape in shapes]

    weights = WEIGHTS[kind]
    values, sets = tensors(), [tensors() for _ in range(min(DISTINCT_GRADS, microbatches + 1))]

    def grads(k: int) -> list[list[Tensor]]:
        return [sets[(k * microbatches + i) % len(sets)] for i in range(microbatches)]

    taking_part = {key: make(values) for key, make in peers(weights, device, compiled).items()}
    taking_part = {OURS: Ours(values, backend, clipped, weights.master), **taking_part}
    for peer in taking_part.values():
        peer.clipped = clipped
        peer.norm_in_double = True  # to compare: torch's own of 14 M elements is off by 6e-4 on a CPU
        for k in range(UPDATES):
            for before, timed in peer.stages(grads(k)):
                before()
                timed()
    ours, equal = taking_part[OURS].results(), {}
    for key, peer in taking_part.items():
        if peer.exact:
            theirs = peer.results()
            what = f"{name}, {kind}, N={microbatches}, {key}"
            equal[key] = harness.require_equal(what, {entry: ours[entry] for entry in theirs}, theirs, UPDATES)
    for peer in taking_part.values():
        peer.norm_in_double = False
    variants = [Variant(key, lambda k, peer=peer: peer.stages(grads(k))) for key, peer in taking_part.items()]
    times = harness.interleave(variants, limit, device)
    del taking_part[OURS]
    exact = {key: harness.estimate(times[key]).median for key, peer in taking_part.items() if peer.exact}
    return [
        {
            "list": f"{name}, clipped" if clipped else name,
            "dtype": kind,
            "microbatches": microbatches,
            "peer": key,
            "tensors": len(shapes),
            "parameters": sum(value.numel() for value in values),
            "bytes_per_parameter": window_bytes(kind, microbatches, clipped),
            "rounds": len(times[key]),
            "ms": scaled(times[OURS], 1e3),
            "peer_ms": scaled(times[key], 1e3),
            "speedup": ratio(times[key], times[OURS]),
            "exact": peer.exact,
            "fastest_exact": key == min(exact, key=exact.__getitem__),
            "equal": equal.get(key, "not compared"),
        }
        for key, peer in taking_part.items()
    ]


def as_table(rows: list[dict[str, Any]]) -> str:
    headers = ["list", "dtype", "N", "bytes", "ms", "peer", "kind", "its ms", "x faster", "equal"]
    cells = []
    for row in rows:
        kind = "exact *" if row["fastest_exact"] else "exact" if row["exact"] else "approximate"
        ours = [row["list"], row["dtype"], row["microbatches"], row["bytes_per_parameter"], f"{row['ms'].median:.1f}"]
        cells.append([*ours, row["peer"], kind, f"{row['peer_ms'].median:.1f}", show(row["speedup"]), row["equal"]])
    return results.table(headers, cells)


def draw(result: dict[str, Any]) -> Any:
    """Milliseconds per window: a panel per list and dtype, a group of bars per N; approximate ones are hatched."""
    plt = results.pyplot()
    rows = result["rows"]
    lists, dtypes = (list(dict.fromkeys(row[key] for row in rows)) for key in ("list", "dtype"))
    palette = ("#1f4e9c", "#c0392b", "#999999", "#d9a441", "#2a9d8f", "#8d5a97", "#7f8c3a", "#444444")
    colours = dict(zip([OURS, *dict.fromkeys(row["peer"] for row in rows)], palette))
    figure, grid = plt.subplots(len(lists), len(dtypes), figsize=(5.5 * len(dtypes), 3.4 * len(lists)), squeeze=False)
    for axes, (name, dtype) in zip(grid.flat, product(lists, dtypes)):
        here = [row for row in rows if (row["list"], row["dtype"]) == (name, dtype)]
        counts = list(dict.fromkeys(row["microbatches"] for row in here))
        bars = [(OURS, True, [next(row["ms"] for row in here if row["microbatches"] == n) for n in counts])]
        for peer in dict.fromkeys(row["peer"] for row in here):
            its = [row for row in here if row["peer"] == peer]
            bars.append((peer, its[0]["exact"], [row["peer_ms"] for row in its]))
        width = 0.85 / len(bars)
        for i, (peer, exact, times) in enumerate(bars):
            places = [place + (i - (len(bars) - 1) / 2) * width for place in range(len(counts))]
            spread = [[t.median - t.low for t in times], [t.high - t.median for t in times]]
            axes.bar(places, [t.median for t in times], width, color=colours[peer], hatch=None if exact else "//",
                     edgecolor="white", lw=0, label=peer if exact else f"{peer}, approximate", yerr=spread, capsize=2,
                     ecolor="#444444")  # fmt: skip
        axes.set_xticks(range(len(counts)), [f"N={n}" for n in counts])
        axes.set(title=f"{name}, {dtype}", ylabel="ms per window")
    return results.finished(figure, result)


def main(argv: list[str] | None = None) -> int:
    parser = results.arguments("window", __doc__, READING)
    parser.add_argument(
        "--dtype", choices=[*WEIGHTS, "all"], default="all", help="and masters (--quick: fp32 and bf16)"
    )
    parser.add_argument("--microbatches", type=int, nargs="+", help="N (default 1 4 8; 1 8 with --quick)")
    parser.add_argument("--clip", choices=["no", "only", "both"], help="clipped (default both; --quick: no)")
    parser.add_argument("--shrink", type=int, help="divide the widths by this (default 1; 2 with --quick)")
    parser.add_argument("--compiled", action="store_true", help="also AdamW with its step compiled: takes minutes")
    options = parser.parse_args(argv)
    device, facts = results.start(options)
    limit = results.limit(options, rounds=31, quick_seconds=2)
    clip = options.clip or ("no" if options.quick else "both")
    kinds = [options.dtype] if options.dtype != "all" else list(DTYPES if options.quick else WEIGHTS)
    rows = []
    for name, shapes in tensor_lists(options.shrink or (2 if options.quick else 1)).items():
        for kind in kinds:
            for n in options.microbatches or ((1, 8) if options.quick else MICROBATCHES):
                for clipped in {"no": [False], "only": [True], "both": [False, True]}[clip]:
                    print(f"{name}, {kind}, N={n}{', clipped' * clipped} ...", file=sys.stderr, flush=True)
                    rows += measure(name, shapes, kind, n, limit, options.backend, device, clipped, options.compiled)
    print(f"at most {limit.rounds} rounds\n\n{as_table(rows)}")
    result = {"benchmark": "window", "environment": facts, "rows": rows}
    key = ("list", "dtype", "microbatches", "peer", "parameters")
    return results.finish(result, options, key, ("speedup",), draw)


if __name__ == "__main__":
    results.run(main)
