"""Each kernel alone, against the memory's bandwidth and against the torch operations it replaces."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from textwrap import fill
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import harness, results
from benchmarks.harness import DTYPES, Limit, Stage, Variant, rate, ratio, scaled
from benchmarks.results import show
from fused_accum import FusedAccumAdamW

ADD_BYTES = 12  # per element of a.add_(b) in fp32: read both, write one
MOST_SETS = 8  # of tensors; the variants take them in turn

READING = """\
How to read the output, one row per kernel and dtype:
  bytes         that the pass must move per parameter, counted (design, section 6): fp32 throughout; bf16: parameters
                and gradients in bf16, buffer and moments in fp32; bf16+fp32, bf16+split: with masters. Zeroing the
                buffer is part of a step.
  ms, GB/s      of a call of accumulate() or step(); GB/s are counted bytes over time.
  of add_       GB/s over that of a.add_(b) (fp32, 12 bytes an element), which took turns with it: 1.00 means that the
                kernel is as fast as memory allows. Above 1 because that operation writes a third of its bytes.
  x faster      than the torch operations in the last column, which give the same result (checked first).
Brackets are 95 % intervals of the median. The defaults want about 3 GB. What to expect at 32 M elements on two CPU
cores: of add_ at least 0.95 for accumulate (add), step from the buffer and step with the last add, and for the first
write 0.85 (fp32) and 0.75 (bf16); step with the last add at least 1.3x faster."""


@dataclass(frozen=True)
class Kernel:
    """One pass. ``sums``: earlier micro-batches are in the buffer; ``adds``: one is in p.grad; ``steps``: updates."""

    bytes: dict[str, int]  # per parameter, by kind of weights: the design's table
    sums: bool
    adds: bool
    steps: bool


class Weights(NamedTuple):
    """How a parameter is kept: what the rows call it, its dtype, and master_weights."""

    dtype: str
    master: str | None = None


WEIGHTS = {
    "fp32": Weights("fp32"),
    "bf16": Weights("bf16"),
    "bf16+fp32": Weights("bf16", "fp32"),
    "bf16+split": Weights("bf16", "split"),
}
KERNELS = {
    "accumulate, first write": Kernel({"fp32": 8, "bf16": 6}, sums=False, adds=True, steps=False),
    "accumulate, add": Kernel({"fp32": 12, "bf16": 10}, sums=True, adds=True, steps=False),
    "step from the gradient": Kernel(
        {"fp32": 28, "bf16": 22, "bf16+fp32": 28, "bf16+split": 26}, sums=False, adds=True, steps=True
    ),
    "step from the buffer": Kernel(
        {"fp32": 32, "bf16": 28, "bf16+fp32": 34, "bf16+split": 32}, sums=True, adds=False, steps=True
    ),
    "step with the last add": Kernel(
        {"fp32": 36, "bf16": 30, "bf16+fp32": 36, "bf16+split": 34}, sums=True, adds=True, steps=True
    ),
}


class Subject:
    """What takes part in a comparison: ``call`` is timed, ``before`` and ``after`` are not."""

    def before(self) -> None:
        """Nothing to prepare."""

    def call(self) -> Any:
        raise NotImplementedError

    def after(self) -> None:
        """Nothing to take back."""

    def stages(self) -> Iterator[Stage]:
        yield self.before, self.call
        self.after()


class Ours(Subject):
    """One parameter in FusedAccumAdamW, brought before each call to where that call runs the kernel."""

    def __init__(self, kernel: Kernel, param: Tensor, grad: Tensor, backend: str, master: str | None = None):
        self.kernel, self.grad = kernel, grad
        self.param = torch.nn.Parameter(param)
        self.optimizer = FusedAccumAdamW([self.param], backend=backend, master_weights=master)
        if not kernel.steps:  # a first window also makes the moments, which is not what is to be timed
            self.param.grad = grad
            self.optimizer.step()

    def call(self) -> None:
        self.optimizer.step() if self.kernel.steps else self.optimizer.accumulate()

    def before(self) -> None:
        if self.kernel.sums and not self.optimizer.pending.microbatches:
            self.param.grad = self.grad
            self.optimizer.accumulate()
        self.param.grad = self.grad if self.kernel.adds else None

    def after(self) -> None:
        if self.kernel.sums or self.kernel.steps:
            return
        with results.quiet():  # it warns that this drops a window: the next write is to be a first one
            self.optimizer.zero_grad()

    def results(self) -> dict[str, Tensor]:
        with results.quiet():  # it warns that only this optimizer can load an open window
            state = self.optimizer.state_dict()["state"][0]
        if not self.kernel.steps:
            return {"accum": state["accum"]}
        return {"param": self.param.detach(), "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}


class Torch(Subject):
    """The same with torch: an fp32 buffer and torch.optim.AdamW(fused=True), by way of fp32 copies for bf16.

    With masters the fp32 copy is the master and stays. torch's AdamW takes no bf16 parameter with fp32 moments; a
    bf16 gradient is widened into a kept tensor before it is added, which torch does faster than
    ``buffer.add_(gradient)`` and ``buffer.add_(gradient.float())``.
    """

    def __init__(self, kernel: Kernel, param: Tensor, grad: Tensor, master: str | None = None):
        self.kernel, self.param, self.grad, self.master = kernel, param, grad, master
        self.buffer = torch.zeros_like(param, dtype=torch.float32)
        self.full = False  # whether the buffer holds something
        self.wide = param.dtype == torch.float32
        self.wide_grad = grad if self.wide or not kernel.adds else torch.empty_like(self.buffer)
        if kernel.steps:
            self.fp32_param = torch.nn.Parameter(param if self.wide else param.float())
            self.optimizer = torch.optim.AdamW([self.fp32_param], fused=True)
            self.fp32_param.grad = self.buffer if kernel.sums else self.wide_grad

    @staticmethod
    def names(kernel: Kernel, weights: Weights) -> str:
        """The operations, in short."""
        narrow = weights.dtype != "fp32"
        add = [] if not kernel.adds else ["copy_", "add_"] if narrow and kernel.sums else ["add_"] * kernel.sums
        if not kernel.steps:
            return " + ".join(add or ["copy_"])
        widen = ["copy_"] * (narrow and kernel.adds and not kernel.sums)
        update = ["AdamW(fused)", "copy_"] if narrow else ["AdamW(fused)"]
        update = ["copy_", *update] if narrow and not weights.master else update
        return " + ".join([*widen, *add, *update, *["zero_"] * kernel.sums])

    def before(self) -> None:
        if self.kernel.sums and not self.full:
            self.buffer.copy_(self.grad)
            self.full = True

    @torch.no_grad()
    def call(self) -> None:
        kernel = self.kernel
        if not kernel.steps and not kernel.sums:
            self.buffer.copy_(self.grad)
            return
        if kernel.adds:
            if not self.wide:
                self.wide_grad.copy_(self.grad)
            if kernel.sums:
                self.buffer.add_(self.wide_grad)
        if kernel.steps:
            if not self.wide and not self.master:  # else fp32_param is the master
                self.fp32_param.copy_(self.param)
            self.optimizer.step()
            if not self.wide:
                self.param.copy_(self.fp32_param)
            if kernel.sums:
                self.buffer.zero_()

    def after(self) -> None:
        self.full = self.full and not self.kernel.steps

    def results(self) -> dict[str, Tensor]:
        if not self.kernel.steps:
            return {"accum": self.buffer}
        state = self.optimizer.state[self.fp32_param]
        param = self.fp32_param.detach() if self.wide else self.param
        return {"param": param, "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}


class Probe(Subject):
    """a.add_(b) in fp32: what memory can do here and now."""

    def __init__(self, numel: int, device: torch.device):
        self.a, self.b = torch.randn(numel, device=device), torch.randn(numel, device=device)

    def call(self) -> None:
        self.a.add_(self.b)


def measure(name: str, kind: str, numel: int, limit: Limit, backend: str, device: torch.device) -> dict[str, Any]:
    """The row of one kernel and dtype; raises harness.NotEqual when it does not compute what torch does."""
    kernel, weights = KERNELS[name], WEIGHTS[kind]
    sets = min(MOST_SETS, max(2, -(-4 * harness.cache_bytes(device) // (4 * numel))))
    ours, theirs = [], []
    for _ in range(sets):
        param, grad = (torch.randn(numel, device=device).to(DTYPES[weights.dtype]) for _ in range(2))
        ours.append(Ours(kernel, param.clone(), grad, backend, weights.master))
        theirs.append(Torch(kernel, param, grad, weights.master))
    for a, b in zip(ours, theirs):
        for one in (a, b):  # the second call meets the state that the first has left
            one.before()
            one.call()
            one.after()
            one.before()
            one.call()
        equal = harness.require_equal(f"{name}, {kind}", a.results(), b.results())
        a.after()
        b.after()
    probes = [Probe(numel, device) for _ in range(sets)]
    groups = {"ours": ours, "torch": theirs, "add_": probes}
    variants = [
        Variant(key, lambda k, members=members: members[k % sets].stages())
        for key, members in groups.items()
    ]
    times = harness.interleave(variants, limit, device)
    moved = kernel.bytes[kind] * numel
    return {
        "kernel": name,
        "dtype": kind,
        "numel": numel,
        "bytes_per_parameter": kernel.bytes[kind],
        "rounds": len(times["ours"]),
        "ms": scaled(times["ours"], 1e3),
        "gb_per_s": rate(moved / 1e9, times["ours"]),
        "add_gb_per_s": rate(ADD_BYTES * numel / 1e9, times["add_"]),
        "fraction_of_add": ratio(times["add_"], times["ours"], moved / (ADD_BYTES * numel)),
        "torch": Torch.names(kernel, weights),
        "torch_ms": scaled(times["torch"], 1e3),
        "speedup": ratio(times["torch"], times["ours"]),
        "equal": equal,
    }


def as_table(rows: list[dict[str, Any]]) -> str:
    headers = ["kernel", "dtype", "bytes", "ms", "GB/s", "of add_", "x faster", "than torch's", "equal"]
    cells = []
    for row in rows:
        speed = [f"{row['ms'].median:.2f}", f"{row['gb_per_s'].median:.1f}", show(row["fraction_of_add"])]
        other = [show(row["speedup"]), row["torch"], row["equal"]]
        cells.append([row["kernel"], row["dtype"], row["bytes_per_parameter"], *speed, *other])
    return results.table(headers, cells)


def draw(result: dict[str, Any]) -> Any:
    """Bars of counted bytes over time, ours (with how much faster it is) and torch's, and the line of a.add_(b)."""
    plt = results.pyplot()
    figure, axes = plt.subplots(figsize=(max(6, 1 + len(result["rows"])), 4.8))  # an inch a label
    colours = {("ours", "fp32"): "#1f4e9c", ("torch", "fp32"): "#b9c3d3",
               ("ours", "bf16"): "#2a9d8f", ("torch", "bf16"): "#d3d9c9",
               ("ours", "bf16+fp32"): "#e9a23b", ("torch", "bf16+fp32"): "#ead9bb",
               ("ours", "bf16+split"): "#8d5a97", ("torch", "bf16+split"): "#d9cbdc"}  # fmt: skip
    labels = []
    for i, row in enumerate(result["rows"]):
        dtype, ours = row["dtype"], row["gb_per_s"]
        torchs = row["bytes_per_parameter"] * row["numel"] / 1e6 / row["torch_ms"].median
        spread = [[ours.median - ours.low], [ours.high - ours.median]]
        axes.bar(i - 0.2, ours.median, 0.4, color=colours["ours", dtype], label=f"fused_accum, {dtype}", yerr=spread,
                 capsize=2, ecolor="#444444")  # fmt: skip
        axes.bar(i + 0.2, torchs, 0.4, color=colours["torch", dtype], label=f"torch, {dtype}")
        limit = row["add_gb_per_s"].median
        axes.plot([i - 0.45, i + 0.45], [limit, limit], color="#c0392b", lw=1.6, label="a.add_(b), fp32")
        axes.annotate(f"{row['speedup'].median:.2f}x", (i - 0.2, 0), (0, 4), textcoords="offset points", ha="center",
                      fontsize=8, color="white")  # fmt: skip
        labels.append(f"{fill(row['kernel'], 14)}\n{dtype}")
    axes.set_xticks(range(len(labels)), labels, fontsize=8)
    axes.set_ylabel("GB/s of the bytes the pass must move")
    return results.finished(figure, result)


def main(argv: list[str] | None = None) -> int:
    parser = results.arguments("kernels", __doc__, READING)
    parser.add_argument("--numel", type=int, help="elements of the parameter (default 32 M, 4 M with --quick)")
    parser.add_argument("--dtype", choices=[*WEIGHTS, "all"], default="all", help="and masters")
    parser.add_argument("--kernel", choices=list(KERNELS), action="append", help="only this one (may be repeated)")
    options = parser.parse_args(argv)
    device, facts = results.start(options)
    numel = options.numel or (4 << 20 if options.quick else 32 << 20)
    limit = results.limit(options, rounds=31, quick_seconds=1)
    kinds = list(WEIGHTS) if options.dtype == "all" else [options.dtype]
    rows = []
    for kind in kinds:
        for name in options.kernel or KERNELS:
            if kind not in KERNELS[name].bytes:
                continue  # masters do not matter to an accumulation
            print(f"{name}, {kind} ...", file=sys.stderr, flush=True)
            rows.append(measure(name, kind, numel, limit, options.backend, device))
    print(f"{numel} elements, at most {limit.rounds} rounds\n\n{as_table(rows)}")
    if 4 * numel * MOST_SETS < 2 * harness.cache_bytes(device):
        print("\nThese tensors stay in the cache: the fractions of memory bandwidth mean little.")
    result = {"benchmark": "kernels", "environment": facts, "rows": rows}
    return results.finish(result, options, ("kernel", "dtype", "numel"), ("fraction_of_add", "speedup"), draw)


if __name__ == "__main__":
    results.run(main)
