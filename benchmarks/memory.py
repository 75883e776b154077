"""Bytes of gradient memory alive over one window, by way of accumulating: ``python -m benchmarks.memory``.

Measured, not computed: torch's allocator records every block. Counted are the sums that are alive when the window
begins and what is allocated while it runs, large activations too. Each way runs in a process of its own, so that its
peak resident memory is its own too. Leaves a table, memory.json and memory.png.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks import JobError
from benchmarks.batches import MicroBatch
from benchmarks.gpt import GPT
from benchmarks.loops import MODES, begin, gradient_bytes, torch_adamw
from benchmarks.results import environment, heading, table
from benchmarks.run_log import peak_memory
from fused_accum import FusedAccumAdamW

WAYS = ["torch.optim.AdamW", *MODES]
POINTS = 2000  # of a timeline, at most
SIZES = {  # of the model and its micro-batches: by default, with --quick
    "model_width": (512, 128), "layers": (4, 2), "heads": (8, 4), "tokens": (16, 16), "microbatches": (4, 4),
}  # fmt: skip

READING = """\
How to read the output, one row per way of accumulating:
  peak         most bytes alive at a time: the sums, and blocks of at least a quarter of the smallest weight matrix
               that were allocated in the window: gradients, and large activations (the same for all).
  held         bytes of p.grad and buffers between two micro-batches: the sum itself.
  weight-sized blocks of at least half the smallest matrix allocated in the window, in number; activations that are as
               large are listed for all ways alike.
  peak RSS     most resident memory of the whole process (on a GPU: allocated by torch)."""


def model_of(options: argparse.Namespace) -> GPT:
    torch.manual_seed(0)
    return GPT(options.model_width, options.layers, options.heads, options.tokens)


def window(options: argparse.Namespace, device: torch.device) -> list[MicroBatch]:
    """``options.microbatches`` micro-batches of one random passage each."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for k in range(options.microbatches):
        text = torch.randint(256, (1, options.tokens + 1), generator=generator).to(device)
        last = k == options.microbatches - 1
        batches.append(
            MicroBatch(text[:, :-1], text[:, 1:], options.tokens, options.tokens * options.microbatches, last)
        )
    return batches


def records(call: Any) -> list[tuple[int, int, int]]:
    """(time in ns, address, bytes, negative when freed) of every block that torch allocates or frees in ``call``."""
    from torch._C._profiler import _EventType

    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        call()
    found, stack = [], list(profile.profiler.kineto_results.experimental_event_tree())
    while stack:
        event = stack.pop()
        stack += event.children
        if event.tag == _EventType.Allocation:
            found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    return sorted(found)


def measure(way: str, options: argparse.Namespace) -> dict[str, Any]:
    """One way, in this process."""
    device = torch.device(options.device)
    torch.set_num_threads(options.threads)
    model = model_of(options).to(device)
    if way == WAYS[0]:
        optimizer, learn, mode = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), torch_adamw, None
    else:
        optimizer, learn = FusedAccumAdamW(model.parameters(), lr=1e-3), MODES[way]
        mode = begin(way, optimizer, model)
    batches = window(options, device)
    held = 0

    def train() -> None:
        nonlocal held
        for batch in batches:
            learn(optimizer, model.loss(batch.inputs, batch.targets), batch)
            if not batch.ends_window:
                held = max(held, gradient_bytes(optimizer))

    train()  # moments and buffers
    buffers = gradient_bytes(optimizer)
    smallest = min(p.nbytes for p in model.parameters() if p.dim() == 2)
    history, alive, large = [(0, buffers)], {}, 0
    events = records(train)
    for when, address, size in events:
        if size > 0:
            alive[address] = size if size >= smallest // 4 else 0
            large += size >= smallest // 2
        else:
            alive.pop(address, None)
        history.append((when - events[0][0], buffers + sum(alive.values())))
    del mode
    return {
        "way": way,
        "peak_bytes": max(size for _, size in history),
        "held_bytes": held,
        "weight_sized_blocks": large,
        "peak_process_bytes": peak_memory(device),
        "timeline": history[:: max(1, len(history) // POINTS)],
    }


def draw(path: Path, rows: list[dict[str, Any]], title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(rows), 1, figsize=(9, 1.7 * len(rows)), sharey=True, layout="constrained")
    for axis, row in zip(axes, rows):
        span = row["timeline"][-1][0] or 1
        axis.fill_between(
            [when / span for when, _ in row["timeline"]], [size / 2**20 for _, size in row["timeline"]], step="post"
        )
        axis.set_title(row["way"], loc="left", fontsize=9)
        axis.set_ylabel("MiB")
        axis.set_xlim(0, 1)
    axes[-1].set_xlabel("one window")
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120)


def in_process(way: str, options: argparse.Namespace) -> dict[str, Any]:
    given = [f"{_flag(name)}={value}" for name, value in vars(options).items() if name not in ("way", "out")]
    command = [sys.executable, "-m", "benchmarks.memory", "--way", way, *given]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise JobError(f"{way}: {done.stderr.strip().splitlines()[-1] if done.stderr else done.returncode}")
    return json.loads(done.stdout)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory", description="Gradient memory alive over one window.", epilog=READING,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    for name, (value, quick) in SIZES.items():
        more = f", {quick} with --quick" if quick != value else ""
        parser.add_argument(_flag(name), type=int, help=f"default {value}{more}")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default %(default)s")
    parser.add_argument("--quick", action="store_true", help="a smaller model")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", default="runs/memory", help="folder for memory.json and memory.png")
    parser.add_argument("--way", choices=WAYS, help="measure this one in this process and print it as JSON")
    options = parser.parse_args(arguments)
    quick = vars(options).pop("quick")
    for name, sizes in SIZES.items():
        if getattr(options, name) is None:
            setattr(options, name, sizes[quick])
    if options.way:
        json.dump(measure(options.way, options), sys.stdout)
        return 0
    try:
        rows = [in_process(way, options) for way in WAYS]
    except JobError as error:
        print(f"memory: {error}", file=sys.stderr)
        return 1
    facts = environment(torch.device(options.device), "auto")
    parameters = sum(p.numel() for p in model_of(options).parameters())
    title = f"GPT, {parameters:,} parameters, {options.microbatches} micro-batches of {options.tokens} tokens"
    print(heading(facts), title, sep="\n")
    mebi = [[f"{row[key] / 2**20:.1f}" for key in ("peak_bytes", "held_bytes", "peak_process_bytes")] for row in rows]
    print(table(
        ["way", "peak MiB", "held MiB", "weight-sized blocks", "peak RSS MiB"],
        [[row["way"], peak, held, row["weight_sized_blocks"], rss] for row, (peak, held, rss) in zip(rows, mebi)],
    ))  # fmt: skip
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    settings = {k: v for k, v in vars(options).items() if k not in ("way", "out")}
    result = {"benchmark": "memory", "environment": facts, "options": settings, "rows": rows}
    (out / "memory.json").write_text(json.dumps(result) + "\n")
    draw(out / "memory.png", rows, title)
    print(f"memory.json and memory.png are in {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
