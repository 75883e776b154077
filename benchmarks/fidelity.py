"""How near a bf16 run stays to the fp32 run: FusedAccumAdamW with fp32 sums and master weights, and torch's AdamW."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks import JobError, results
from benchmarks.batches import MicroBatches, Windows
from benchmarks.gpt import GPT
from benchmarks.harness import Estimate, estimate, ratio
from benchmarks.loops import explicit, torch_adamw
from benchmarks.text import Text, load_text
from fused_accum import FusedAccumAdamW

READING = """\
How to read the output. Every run trains the same byte-level GPT on the same micro-batches of Python's standard
library, in windows of N, from the same weights, which bf16 can hold. One row per run in bf16 and number of steps:
  distance      of its weights from those of torch.optim.AdamW's run in fp32, as a part of how far those have moved
                since the start (root mean square over all weights). What is compared of a run with masters is
                the masters, which it goes on from.
  x nearer      torch.optim.AdamW's distance in bf16 over this run's, within each seed.
  loss          nats per byte over held-out text, minus the fp32 run's; the model computes in bf16.
Median over the seeds with its 95 % interval (of fewer than 6 seeds: the whole range). Exit code 1 where a run with
fp32 sums and masters is not nearer than torch's in every seed."""

FP32, TORCH = "torch AdamW, fp32", "torch AdamW, bf16"
OPTIONS: dict[str, dict[str, Any]] = {
    "fp32 sums, fp32 masters": {"master_weights": "fp32"},
    "fp32 sums, split masters": {"master_weights": "split"},
    "fp32 sums, stochastic rounding": {"stochastic_rounding": True},
    "fp32 sums": {},
}
MUST_BE_NEARER = [name for name, options in OPTIONS.items() if "master_weights" in options]
BETAS = (0.9, 0.95)
FIGURES = {"distance": 4, "nearer": 2, "loss": 4}  # digits


class Size(NamedTuple):
    """What is trained: model, windows, length of the run, and after which parts of it runs are compared."""

    width: int
    layers: int
    context: int
    passages: int
    microbatches: int
    steps: int
    seeds: int
    max_bytes: int = 1 << 20
    held_out: int = 8192
    compared: tuple[float, ...] = (0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 1.0)


FULL = Size(width=48, layers=2, context=64, passages=2, microbatches=4, steps=200, seeds=6)
QUICK = Size(width=32, layers=1, context=32, passages=2, microbatches=4, steps=60, seeds=3, held_out=1024,
             compared=(0.1, 0.25, 0.5, 1.0))  # fmt: skip


class Trained:
    """One run: a copy of ``model`` in ``dtype`` and its optimizer."""

    def __init__(self, model: GPT, dtype: torch.dtype, lr: float, make: Callable[..., torch.optim.Optimizer]):
        self.model = copy.deepcopy(model).to(dtype)
        self.optimizer = make(self.model.parameter_groups(weight_decay=0.1), lr=lr, betas=BETAS)
        self.learn = explicit if isinstance(self.optimizer, FusedAccumAdamW) else torch_adamw

    def window(self, batches: list[Any], lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        for batch in batches:
            self.learn(self.optimizer, self.model.loss(batch.inputs, batch.targets), batch)

    def weights(self) -> torch.Tensor:
        """All weights, or the masters they are rounded from, float64."""
        return torch.cat([_master(p, self.optimizer.state.get(p, {})) for p in self.model.parameters()])

    @torch.no_grad()
    def loss(self, batches: list[Any]) -> float:
        losses = [self.model.loss(b.inputs, b.targets).item() * b.tokens for b in batches]
        return sum(losses) / sum(b.tokens for b in batches)


def _master(p: nn.Parameter, state: dict[str, Any]) -> torch.Tensor:
    kept, whole = state.get("master"), p.detach()
    if kept is not None and kept.dtype == torch.int16:  # the pattern of the master is high * 2^16 + low
        whole = (whole.view(torch.int16).int() * 65536 + kept.int()).view(torch.float32)
    elif kept is not None:
        whole = kept
    return whole.flatten().double()


def runs(model: GPT, lr: float, backend: str) -> dict[str, Trained]:
    def ours(options: dict[str, Any]) -> Callable[..., torch.optim.Optimizer]:
        return lambda *arguments, **more: FusedAccumAdamW(*arguments, backend=backend, **options, **more)

    return {
        FP32: Trained(model, torch.float32, lr, torch.optim.AdamW),
        TORCH: Trained(model, torch.bfloat16, lr, torch.optim.AdamW),
        **{name: Trained(model, torch.bfloat16, lr, ours(options)) for name, options in OPTIONS.items()},
    }


def compared(size: Size, seed: int, text: Text, lr: float, backend: str, device: torch.device) -> Iterator[tuple]:
    """(step, run, distance, loss minus fp32's) of one seed."""
    torch.manual_seed(seed)
    model = GPT(size.width, size.layers, heads=4, context=size.context)
    model = model.to(torch.bfloat16).float().to(device)
    micro_batches = MicroBatches(text.train, size.passages, seed)
    windows = Windows(size.microbatches, micro_batches.per_pass)
    held_out = MicroBatches(text.held_out.spread(size.held_out), 64, seed)
    whole = Windows(1, held_out.per_pass)
    to_score = [held_out.get(k, whole, device) for k in range(held_out.per_pass)]
    taking_part = runs(model, lr, backend)
    start = taking_part[FP32].weights()
    at = {max(1, round(part * size.steps)) for part in size.compared}
    for step in range(1, size.steps + 1):
        batches = [micro_batches.get(k, windows, device) for k in windows.members(step - 1)]
        warm = min(1.0, step / (0.1 * size.steps))
        now = lr * warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / size.steps)))
        for run in taking_part.values():
            run.window(batches, now)
        if step in at:
            exact = taking_part[FP32].weights()
            moved, exact_loss = (exact - start).norm(), taking_part[FP32].loss(to_score)
            for name, run in taking_part.items():
                if name != FP32:
                    yield step, name, float((run.weights() - exact).norm() / moved), run.loss(to_score) - exact_loss


def measure(size: Size, lr: float, backend: str, device: torch.device) -> list[dict[str, Any]]:
    """One row per run in bf16 and step."""
    text = load_text(None, size.context, size.max_bytes)
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for seed in range(size.seeds):
        print(f"seed {seed + 1} of {size.seeds} ...", file=sys.stderr, flush=True)
        for step, name, distance, loss in compared(size, seed, text, lr, backend, device):
            found.setdefault((name, step), []).append((distance, loss))
    rows = []
    for (name, step), pairs in found.items():
        distances, torchs = ([d for d, _ in found[key, step]] for key in (name, TORCH))
        rows.append({
            "run": name,
            "step": step,
            "steps": size.steps,
            "width": size.width,
            "layers": size.layers,
            "microbatches": size.microbatches,
            "lr": lr,
            "seeds": size.seeds,
            "distance": estimate(distances),
            "nearer": ratio(torchs, distances),
            "loss": estimate([loss for _, loss in pairs]),
            "nearer_in": sum(own < other for own, other in zip(distances, torchs)),
        })  # fmt: skip
    return rows


def as_table(rows: list[dict[str, Any]]) -> str:
    """The last step's rows."""
    headers = ["bf16 run", "distance from fp32", "x nearer than torch", "loss minus fp32's"]
    last = [row for row in rows if row["step"] == row["steps"]]
    return results.table(headers, [
        [row["run"], *(results.show(Estimate(*row[key]), digits) for key, digits in FIGURES.items())] for row in last
    ])  # fmt: skip


def draw(result: dict[str, Any]) -> Any:
    """Distance and loss over the steps; bands are the intervals."""
    plt = results.pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8))
    colours = dict(zip([TORCH, *OPTIONS], ("#c0392b", "#1f4e9c", "#2a9d8f", "#d9a441", "#999999")))
    for name, colour in colours.items():
        rows = [row for row in result["rows"] if row["run"] == name]
        steps = [row["step"] for row in rows]
        for axes, figure_of in (left, "distance"), (right, "loss"):
            low, median, high = zip(*(row[figure_of] for row in rows))
            axes.plot(steps, median, color=colour, marker="o", ms=3, label=name,
                      ls="--" if name == "fp32 sums, split masters" else "-")  # fmt: skip
            axes.fill_between(steps, low, high, color=colour, alpha=0.15, lw=0)
    left.set(title="weights", ylabel="distance from fp32, of its way so far", xlabel="step", ylim=(0, None))
    right.set(title="held-out loss", ylabel="nats per byte minus fp32's", xlabel="step")
    right.axhline(0, color="black", lw=0.8, ls=":")
    return results.finished(figure, result)


def main(argv: list[str] | None = None) -> int:
    parser = results.arguments("fidelity", __doc__, READING, timed=False)
    parser.add_argument("--lr", type=float, default=2e-3, help="highest learning rate (default 2e-3)")
    parser.add_argument("--steps", type=int, help=f"per run (default {FULL.steps}; {QUICK.steps} with --quick)")
    parser.add_argument("--seeds", type=int, help=f"runs of each kind (default {FULL.seeds}; {QUICK.seeds})")
    options = parser.parse_args(argv)
    device, facts = results.start(options)
    size = QUICK if options.quick else FULL
    size = size._replace(steps=options.steps or size.steps, seeds=options.seeds or size.seeds)
    try:
        rows = measure(size, options.lr, options.backend, device)
    except JobError as error:
        raise SystemExit(str(error)) from None
    print(f"{size.seeds} seeds, {size.steps} steps of N={size.microbatches}, lr {options.lr:g}\n\n{as_table(rows)}")
    result = {"benchmark": "fidelity", "environment": facts, "rows": rows}
    status = results.finish(result, options, ("run", "step", "steps", "width", "layers", "lr"), ("nearer",), draw)
    last = [row for row in rows if row["step"] == size.steps and row["run"] in MUST_BE_NEARER]
    further = [row["run"] for row in last if row["nearer_in"] < size.seeds]
    if further:
        print(f"not nearer to fp32 than torch's bf16 AdamW in every seed: {', '.join(further)}")
    return 1 if further else status


if __name__ == "__main__":
    results.run(main)
