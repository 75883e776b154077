"""Training, end to end: a window's forwards, backwards and update in every mode, against torch.optim.AdamW's loop."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks import harness, results
from benchmarks.gpt import GPT
from benchmarks.harness import Limit, Variant, ratio, scaled
from benchmarks.loops import MODES, begin, gradient_bytes
from benchmarks.results import show
from fused_accum import FusedAccumAdamW

TORCH = "torch.optim.AdamW"
TOKENS = (64, 256, 1024)
LR = 1e-4
WINDOWS = 2  # of other tokens, taken in turn

READING = """\
How to read the output, one row per number of tokens in a micro-batch and mode:
  ms            of a window: N forwards and backwards of a GPT with float32 weights, and their update.
  torch ms      the same with torch.optim.AdamW(fused=True), N backwards into p.grad, step() and zero_grad().
  x faster      torch's over ours, taken within each round: the median of the rounds and its 95 % interval.
  gradient MiB  bytes of p.grad and buffers that are alive after the window's first backward: of both.
Before anything is timed, both moments after a first window are compared with torch's ("equal": the largest difference
as a part of what is tolerated).
What to expect of the default model (45 M parameters) on 2 CPU cores: direct at least 1.5 times as fast at 64 tokens,
1.15 at 256, 1.0 at 1024; in-backward nowhere below 0.97. A window at 1024 tokens takes half a minute."""


class Model(GPT):
    """A GPT over a vocabulary of any size, with a head of its own."""

    def __init__(self, width: int, layers: int, vocabulary: int, context: int):
        super().__init__(width, layers, heads=max(1, width // 64), context=context)
        self.embedding = nn.Embedding(vocabulary, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.head.weight, std=width**-0.5)


class Batch(NamedTuple):
    """One micro-batch of a single passage; ``last``: it ends the window."""

    inputs: Tensor
    targets: Tensor
    last: bool


class Training:
    """One model with one optimizer, in ``mode`` (TORCH: torch's loop)."""

    def __init__(self, mode: str, base: Model, backend: str):
        self.mode, self.model = mode, copy.deepcopy(base)
        self.gradient_bytes = 0
        if mode == TORCH:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, fused=True)
        else:
            self.optimizer = FusedAccumAdamW(self.model.parameters(), lr=LR, backend=backend)
            self.handle = begin(mode, self.optimizer, self.model)

    def window(self, batches: list[Batch]) -> None:
        for batch in batches:
            loss = self.model.loss(batch.inputs, batch.targets) / len(batches)
            if batch.last and self.mode == "step-in-backward":
                with self.optimizer.step_in_backward():
                    loss.backward()
                return
            loss.backward()
            if batch.last:
                self.optimizer.step()
            elif self.mode == "explicit":
                self.optimizer.accumulate()
        if self.mode == TORCH:
            self.optimizer.zero_grad()

    def first_backward(self, batch: Batch) -> None:
        """Notes the gradient memory that one backward leaves; nothing of it is kept."""
        self.model.loss(batch.inputs, batch.targets).backward()
        self.gradient_bytes = gradient_bytes(self.optimizer)
        self.optimizer.zero_grad()

    def moments(self) -> dict[str, Tensor]:
        state = self.optimizer.state
        return {
            f"{key} of {name}": state[p][key]
            for name, p in self.model.named_parameters()
            for key in ("exp_avg", "exp_avg_sq")
        }


def batches(tokens: int, microbatches: int, vocabulary: int, device: torch.device) -> Callable[[int], list[Batch]]:
    """The micro-batches of window k, of random tokens."""
    generator = torch.Generator().manual_seed(1)
    shape = (WINDOWS, microbatches, 1, tokens + 1)
    text = torch.randint(vocabulary, shape, generator=generator).to(device)
    windows = [
        [Batch(row[:, :-1], row[:, 1:], k == microbatches - 1) for k, row in enumerate(window)] for window in text
    ]
    return lambda k: windows[k % WINDOWS]


def measure(
    base: Model, tokens: int, microbatches: int, modes: list[str], limit: Limit, backend: str, device: torch.device
) -> list[dict[str, Any]]:
    """One row per mode; raises harness.NotEqual when one does not compute what torch's loop does."""
    window = batches(tokens, microbatches, base.embedding.num_embeddings, device)
    trainings = {mode: Training(mode, base, backend) for mode in [TORCH, *modes]}
    trainings[TORCH].window(window(0))
    wanted, equal = trainings[TORCH].moments(), {}
    for mode in modes:
        trainings[mode].window(window(0))
        equal[mode] = harness.require_equal(
            f"{tokens} tokens, {mode}", trainings[mode].moments(), wanted, roundings=harness.PRODUCT_ROUNDINGS
        )
    for training in trainings.values():
        training.first_backward(window(0)[0])
    variants = [
        Variant(mode, lambda k, run=training.window: [(harness.nothing, lambda: run(window(k)))])
        for mode, training in trainings.items()
    ]
    times = harness.interleave(variants, limit, device)
    return [
        {
            "tokens": tokens,
            "mode": mode,
            "microbatches": microbatches,
            "parameters": sum(p.numel() for p in base.parameters()),
            "rounds": len(times[mode]),
            "ms": scaled(times[mode], 1e3),
            "torch_ms": scaled(times[TORCH], 1e3),
            "speedup": ratio(times[TORCH], times[mode]),
            "gradient_bytes": trainings[mode].gradient_bytes,
            "torch_gradient_bytes": trainings[TORCH].gradient_bytes,
            "equal": equal[mode],
        }
        for mode in modes
    ]


def as_table(rows: list[dict[str, Any]]) -> str:
    return results.table(
        ["tokens", "mode", "N", "ms", "torch ms", "x faster", "gradient MiB", "torch's", "equal"],
        [
            [row["tokens"], row["mode"], row["microbatches"], f"{row['ms'].median:.0f}",
             f"{row['torch_ms'].median:.0f}", show(row["speedup"]),
             *(f"{row[key] / 2**20:.1f}" for key in ("gradient_bytes", "torch_gradient_bytes")), row["equal"]]
            for row in rows
        ],
    )  # fmt: skip


def draw(result: dict[str, Any]) -> Any:
    """How many times faster than torch's loop: a group of bars per number of tokens."""
    plt = results.pyplot()
    rows = result["rows"]
    counts, modes = (list(dict.fromkeys(row[key] for row in rows)) for key in ("tokens", "mode"))
    figure, axes = plt.subplots(figsize=(7, 3.6))
    width = 0.8 / len(modes)
    for i, mode in enumerate(modes):
        found = [next(row["speedup"] for row in rows if (row["tokens"], row["mode"]) == (n, mode)) for n in counts]
        places = [place + (i - (len(modes) - 1) / 2) * width for place in range(len(counts))]
        spread = [[e.median - e.low for e in found], [e.high - e.median for e in found]]
        axes.bar(places, [e.median for e in found], width, yerr=spread, capsize=2, label=mode)
    axes.axhline(1, color="#444444", lw=0.8)
    axes.set_xticks(range(len(counts)), [f"{n} tokens" for n in counts])
    axes.set(title=f"a window of {rows[0]['microbatches']} micro-batches", ylabel=f"x faster than {TORCH}")
    return results.finished(figure, result)


def main(argv: list[str] | None = None) -> int:
    parser = results.arguments("modes", __doc__, READING)
    add = parser.add_argument
    add("--tokens", type=int, nargs="+", help="of a micro-batch (default 64 256 1024; 64 256 with --quick)")
    add("--modes", nargs="+", choices=list(MODES), default=list(MODES), help="(default: all)")
    add("--microbatches", type=int, default=8, help="N (default 8)")
    add("--width", type=int, help="of the GPT (default 512; 128 with --quick)")
    add("--layers", type=int, help="of the GPT (default 4; 2 with --quick)")
    add("--vocabulary", type=int, help="of the GPT (default 32000; 4000 with --quick)")
    options = parser.parse_args(argv)
    device, facts = results.start(options)
    limit = results.limit(options, rounds=31, quick_seconds=9)
    tokens = options.tokens or (TOKENS[:2] if options.quick else TOKENS)
    torch.manual_seed(0)
    base = Model(
        options.width or (128 if options.quick else 512),
        options.layers or (2 if options.quick else 4),
        options.vocabulary or (4000 if options.quick else 32000),
        max(tokens),
    ).to(device)
    rows = []
    for count in tokens:
        print(f"{count} tokens ...", file=sys.stderr, flush=True)
        rows += measure(base, count, options.microbatches, options.modes, limit, options.backend, device)
    print(f"{rows[0]['parameters']:,} parameters, at most {limit.rounds} rounds\n\n{as_table(rows)}")
    result = {"benchmark": "modes", "environment": facts, "rows": rows}
    key = ("tokens", "mode", "microbatches", "parameters")
    return results.finish(result, options, key, ("speedup",), draw)


if __name__ == "__main__":
    results.run(main)
