"""Weight gradients of linear layers, added straight into the buffer: what direct_wgrad() does, against torch."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks import harness, results
from benchmarks.harness import DTYPES, Limit, Variant, rate, ratio, scaled
from fused_accum import backends

TOKENS = (16, 64, 256, 1024)
# (out, in) in benchmarks.modes: the head, both of the MLP, queries with keys and values, attention's output.
WEIGHTS = ((32000, 512), (2048, 512), (512, 2048), (1536, 512), (512, 512))
MOST_SETS = 64  # of buffers; calls take them in turn

READING = """\
How to read the output, one row per number of tokens, weight (out x in) and dtype of the activations:
  ms, GFLOP/s   of buffer += dy.T @ x, into an fp32 buffer that is not in the cache; a product and a sum count as two.
  x faster      than buffer.addmm_(dy.T, x), for bf16 of copies in fp32; and than the gradient as a tensor of its own,
                buffer.add_(dy.T @ x), which is what autograd does (for bf16 that rounds it, so it is not compared).
  first         the same for a window's first micro-batch, which overwrites the buffer; against addmm_ with beta=0.
Brackets are 95 % intervals of the median of ratios taken round by round. Results are compared with torch's first.
What to expect on two CPU cores (AVX2), against addmm_: 1.8 to 2 times as fast at 16 tokens, 1.2 to 1.5 at 64, and at
256 and 1024 between even and 1.2 for fp32, 1.1 and 1.5 for bf16. On a GPU ours is torch's addmm_: 1.0."""


class Layer:
    """The operands of one layer, and its buffers."""

    def __init__(self, tokens: int, out: int, features: int, dtype: torch.dtype, device: torch.device):
        self.x = torch.randn(tokens, features, device=device).to(dtype)
        self.dy = torch.randn(tokens, out, device=device).to(dtype)
        sets = min(MOST_SETS, max(2, -(-2 * harness.cache_bytes(device) // (4 * out * features))))
        self.buffers = [torch.randn(out, features, device=device) for _ in range(sets)]

    def calls(self, backend: str) -> dict[str, Callable[[Tensor], Any]]:
        chosen, _ = backends.choose(backend, self.x.device)
        dy, x = self.dy, self.x
        calls = {
            "ours": lambda buffer: chosen.add_product(buffer, dy, x, False),
            "ours first": lambda buffer: chosen.add_product(buffer, dy, x, True),
            "addmm_": lambda buffer: buffer.addmm_(dy.float().t(), x.float()),
            "addmm_ first": lambda buffer: buffer.addmm_(dy.float().t(), x.float(), beta=0),
        }
        if x.dtype == torch.float32:
            calls["mm, add_"] = lambda buffer: buffer.add_(dy.t() @ x)
        return calls


def measure(
    tokens: int, weight: tuple[int, int], kind: str, limit: Limit, backend: str, device: torch.device
) -> dict[str, Any]:
    """One row; raises harness.NotEqual when ours does not compute what torch does."""
    layer = Layer(tokens, *weight, DTYPES[kind], device)
    calls, start = layer.calls(backend), layer.buffers[0]
    found = {name: start.clone() for name in calls}
    for name, call in calls.items():
        call(found[name])
    name = f"{tokens} tokens, {weight[0]} x {weight[1]}, {kind}"
    ours, theirs = ({first: found[name + first] for first in ("", " first")} for name in ("ours", "addmm_"))
    equal = harness.require_equal(name, ours, theirs, roundings=harness.PRODUCT_ROUNDINGS)

    turn = itertools.cycle(layer.buffers)  # the next one for every call: last used long ago, as in a backward

    def stages(call: Callable[[Tensor], Any]) -> list[harness.Stage]:
        buffer = next(turn)
        return [(harness.nothing, lambda: call(buffer))]

    variants = [Variant(name, lambda _, call=call: stages(call)) for name, call in calls.items()]
    times = harness.interleave(variants, limit, device)
    autograd = times.get("mm, add_")
    return {
        "tokens": tokens,
        "weight": f"{weight[0]} x {weight[1]}",
        "dtype": kind,
        "rounds": len(times["ours"]),
        "ms": scaled(times["ours"], 1e3),
        "gflop_per_s": rate(2e-9 * tokens * weight[0] * weight[1], times["ours"]),
        "speedup": ratio(times["addmm_"], times["ours"]),
        "autograd_speedup": autograd and ratio(autograd, times["ours"]),
        "first_speedup": ratio(times["addmm_ first"], times["ours first"]),
        "equal": equal,
    }


def as_table(rows: list[dict[str, Any]]) -> str:
    headers = ["tokens", "weight", "dtype", "ms", "GFLOP/s", "x addmm_", "x mm, add_", "first: x addmm_", "equal"]
    cells = [
        [row["tokens"], row["weight"], row["dtype"], f"{row['ms'].median:.2f}", f"{row['gflop_per_s'].median:.0f}",
         results.show(row["speedup"]), results.show(row["autograd_speedup"]) if row["autograd_speedup"] else "",
         results.show(row["first_speedup"]), row["equal"]]
        for row in rows
    ]  # fmt: skip
    return results.table(headers, cells)


def draw(result: dict[str, Any]) -> Any:
    """How much faster than addmm_, against the tokens; a line per weight, a panel per dtype."""
    plt = results.pyplot()
    dtypes = list(dict.fromkeys(row["dtype"] for row in result["rows"]))
    figure, panels = plt.subplots(1, len(dtypes), figsize=(5.5 * len(dtypes), 4.2), sharey=True, squeeze=False)
    for axes, dtype in zip(panels[0], dtypes):
        lines: dict[str, list[tuple[int, harness.Estimate]]] = {}
        for row in result["rows"]:
            if row["dtype"] == dtype:
                lines.setdefault(row["weight"], []).append((row["tokens"], row["speedup"]))
        for weight, points in lines.items():
            axes.plot([tokens for tokens, _ in points], [e.median for _, e in points], "o-", ms=4, label=weight)
        axes.axhline(1, color="#999999", lw=1)
        axes.set(xscale="log", xlabel=f"tokens, {dtype}", ylabel="times as fast as buffer.addmm_")
        axes.grid(alpha=0.25)
    return results.finished(figure, result)


def main(argv: list[str] | None = None) -> int:
    parser = results.arguments("wgrad", __doc__, READING)
    parser.add_argument("--tokens", type=int, nargs="+", help=f"(default {' '.join(map(str, TOKENS))})")
    parser.add_argument("--weight", type=int, nargs=2, action="append", metavar=("OUT", "IN"), help="only this one")
    parser.add_argument("--dtype", choices=[*DTYPES, "all"], default="all")
    options = parser.parse_args(argv)
    device, facts = results.start(options)
    limit = results.limit(options, rounds=31, quick_seconds=0.3)
    weights = options.weight or (WEIGHTS[1:] if options.quick else WEIGHTS)
    rows = []
    for kind in DTYPES if options.dtype == "all" else [options.dtype]:
        for weight in weights:
            for tokens in options.tokens or TOKENS:
                print(f"{tokens} tokens, {weight[0]} x {weight[1]}, {kind} ...", file=sys.stderr, flush=True)
                rows.append(measure(tokens, tuple(weight), kind, limit, options.backend, device))
    print(f"at most {limit.rounds} rounds\n\n{as_table(rows)}")
    result = {"benchmark": "wgrad", "environment": facts, "rows": rows}
    return results.finish(result, options, ("tokens", "weight", "dtype"), ("speedup",), draw)


if __name__ == "__main__":
    results.run(main)
