"""Host time per call of accumulate() and step(), against the number of tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks import harness, results
from benchmarks.harness import Limit, Stage, Variant, ratio, scaled
from fused_accum import FusedAccumAdamW

COUNTS = (1, 10, 30, 100, 300, 1000, 3000)
ELEMENTS = 64  # of every tensor: next to no work, so what is timed is the way there
WARM_CALLS = 4  # timed in a row, after one that is not

READING = """\
How to read the output, one row per number of tensors of 64 fp32 elements each:
  us            a call keeps the host busy, gradients set before it, outside the timed part (autograd does that). Of a
                few calls in a row; with --cold of single calls, each after a sweep through more than the cache, as
                after a large backward.
  columns after it, for each torch variant: its microseconds, and ours as a part of them: 0.20 means a fifth.
  accumulate    in an open window, against torch._foreach_add_(buffers, gradients) and a loop of
                buffer.add_(gradient), which is what autograd does.
  step          from p.grad, against torch.optim.AdamW with fused=True and with foreach=True.
Brackets are 95 % intervals of the median of ratios taken round by round. Results are compared with torch's first.
What to expect for 300 tensors on a CPU: step at most 0.2 of fused AdamW, accumulate at most 1.0 of _foreach_add_."""

OURS = "fused_accum"
COLOURS = {OURS: "#1f4e9c", "torch._foreach_add_": "#c0392b", "add_ each": "#999999",
           "AdamW(fused)": "#d9822b", "AdamW(foreach)": "#8e6bb0"}  # fmt: skip


class Call:
    """One of the things that are timed: ``before`` sets gradients, ``call`` is timed."""

    def __init__(self, before: Callable[[], Any], call: Callable[[], Any], read: Callable[[], list[Tensor]]):
        self.before, self.call, self.read = before, call, read

    def warm(self) -> Iterator[Stage]:
        self.before()
        self.call()
        for _ in range(WARM_CALLS):
            yield self.before, self.call

    def cold(self, filler: Tensor) -> Iterator[Stage]:
        self.before()
        filler.add_(1)
        yield harness.nothing, self.call

    def results(self) -> dict[str, Tensor]:
        return {str(i): t for i, t in enumerate(self.read())}


class Inputs:
    """``count`` parameters' values and gradients, the same for all variants."""

    def __init__(self, count: int, device: torch.device):
        self.values = [torch.randn(ELEMENTS, device=device) for _ in range(count)]
        self.grads = [torch.randn(ELEMENTS, device=device) for _ in range(count)]

    def parameters(self) -> tuple[list[Tensor], Callable[[], None]]:
        """Fresh parameters, and what sets their gradients."""
        params = [torch.nn.Parameter(value.clone()) for value in self.values]

        def give() -> None:
            for p, g in zip(params, self.grads):
                p.grad = g

        return params, give


def accumulating(inputs: Inputs, backend: str) -> dict[str, Call]:
    params, give = inputs.parameters()
    optimizer = FusedAccumAdamW(params, backend=backend)

    def buffers() -> list[Tensor]:
        with results.quiet():  # state_dict warns that only this optimizer can load an open window
            return [state["accum"] for state in optimizer.state_dict()["state"].values()]

    def lists() -> list[Tensor]:
        return [torch.zeros_like(g) for g in inputs.grads]

    together, single = lists(), lists()

    def loop() -> None:
        for buffer, grad in zip(single, inputs.grads):
            buffer.add_(grad)

    def foreach() -> None:
        torch._foreach_add_(together, inputs.grads)

    return {
        OURS: Call(give, optimizer.accumulate, buffers),
        "torch._foreach_add_": Call(harness.nothing, foreach, lambda: together),
        "add_ each": Call(harness.nothing, loop, lambda: single),
    }


def stepping(inputs: Inputs, backend: str) -> dict[str, Call]:
    def of(make: Callable[..., torch.optim.Optimizer], **options: Any) -> Call:
        params, give = inputs.parameters()
        optimizer = make(params, **options)

        def state() -> list[Tensor]:
            moments = [optimizer.state[p][name] for p in params for name in ("exp_avg", "exp_avg_sq")]
            return [p.detach() for p in params] + moments

        return Call(give, optimizer.step, state)

    return {
        OURS: of(FusedAccumAdamW, backend=backend),
        "AdamW(fused)": of(torch.optim.AdamW, fused=True),
        "AdamW(foreach)": of(torch.optim.AdamW, foreach=True),
    }


CALLS = {"accumulate": accumulating, "step": stepping}


def measure(
    call: str, count: int, limit: Limit, backend: str, device: torch.device, filler: Tensor | None = None
) -> list[dict[str, Any]]:
    """One row per torch variant; raises harness.NotEqual when one does not compute what ours does.

    ``filler``: larger than the cache, for cold calls; None for warm ones.
    """
    subjects = CALLS[call](Inputs(count, device), backend)
    for subject in subjects.values():
        for _ in range(3):
            subject.before()
            subject.call()
    ours = subjects[OURS].results()
    equal = {
        name: harness.require_equal(f"{call}, {count} tensors, {name}", ours, subject.results())
        for name, subject in subjects.items()
    }
    calls = WARM_CALLS if filler is None else 1
    variants = [
        Variant(name, lambda _, one=subject: one.warm() if filler is None else one.cold(filler))
        for name, subject in subjects.items()
    ]
    times = harness.interleave(variants, limit, device, clock=harness.host_seconds)
    return [
        {
            "call": call,
            "tensors": count,
            "cold": filler is not None,
            "torch": name,
            "rounds": len(times[name]),
            "us": scaled(times[OURS], 1e6 / calls),
            "torch_us": scaled(times[name], 1e6 / calls),
            "part": ratio(times[OURS], times[name]),
            "speedup": ratio(times[name], times[OURS]),
            "equal": equal[name],
        }
        for name in subjects
        if name != OURS
    ]


def as_table(rows: list[dict[str, Any]]) -> str:
    """One line per number of tensors."""
    names = list(dict.fromkeys(row["torch"] for row in rows))
    headers = ["tensors", "us", *[text for name in names for text in (f"{name} us", "ours of it")]]
    lines = []
    for count in dict.fromkeys(row["tensors"] for row in rows):
        here = [row for row in rows if row["tensors"] == count]
        cells = [text for row in here for text in (f"{row['torch_us'].median:.1f}", results.show(row["part"]))]
        lines.append([count, f"{here[0]['us'].median:.1f}", *cells])
    return results.table(headers, lines)


def draw(result: dict[str, Any]) -> Any:
    """Microseconds against tensors, both logarithmic; one panel per call."""
    plt = results.pyplot()
    figure, panels = plt.subplots(1, len(CALLS), figsize=(11, 4.5))
    for axes, call in zip(panels, CALLS):
        rows = [row for row in result["rows"] if row["call"] == call]
        names = list(dict.fromkeys(row["torch"] for row in rows))
        curves = {OURS: [(row["tensors"], row["us"]) for row in rows if row["torch"] == names[0]]}
        for name in names:
            curves[name] = [(row["tensors"], row["torch_us"]) for row in rows if row["torch"] == name]
        for name, points in curves.items():
            counts = [count for count, _ in points]
            axes.plot(counts, [time.median for _, time in points], "o-", color=COLOURS[name], ms=4, label=name)
            axes.fill_between(counts, [time.low for _, time in points], [time.high for _, time in points],
                              color=COLOURS[name], alpha=0.15, lw=0)  # fmt: skip
        axes.set(xscale="log", yscale="log", xlabel="tensors of 64 elements", ylabel=f"{call}(): us per call")
        axes.grid(alpha=0.25)
    return results.finished(figure, result)


def main(argv: list[str] | None = None) -> int:
    parser = results.arguments("overhead", __doc__, READING)
    parser.add_argument("--tensors", type=int, nargs="+", help=f"(default {' '.join(map(str, COUNTS))})")
    parser.add_argument("--cold", action="store_true", help="sweep through the cache before every call")
    options = parser.parse_args(argv)
    device, facts = results.start(options)
    filler = torch.zeros(harness.cache_bytes(device) // 2, device=device) if options.cold else None
    limit = results.limit(options, rounds=101, quick_seconds=2)
    rows = []
    for call in CALLS:
        for count in options.tensors or COUNTS:
            print(f"{call}, {count} tensors ...", file=sys.stderr, flush=True)
            rows += measure(call, count, limit, options.backend, device, filler)
    for call in CALLS:
        print(f"\n{call}()\n\n{as_table([row for row in rows if row['call'] == call])}")
    result = {"benchmark": "overhead", "environment": facts, "rows": rows}
    return results.finish(result, options, ("call", "tensors", "torch", "cold"), ("speedup",), draw)


if __name__ == "__main__":
    results.run(main)
