"""The measuring parts of benchmarks.device_check, each in a process of its own. Rows are appended as they come."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness, kernels, overhead, results, window
from benchmarks.gpt import GPT
from benchmarks.harness import DTYPES, Limit, Stage, Variant, rate, ratio, scaled
from fused_accum import FusedAccumAdamW, backends

COPY_BYTES = 8  # per element of b.copy_(a) in fp32


class Run:
    """Where the rows go, how long this part may take, and the sizes."""

    def __init__(self, rows: Path, seconds: float, emulated: bool) -> None:
        self.rows, self.emulated = rows, emulated
        self.begun = time.perf_counter()
        self.seconds = seconds
        self.device = torch.device("cpu" if emulated else "cuda")

    def write(self, part: str, **row: Any) -> None:
        with open(self.rows, "a") as file:
            file.write(json.dumps({"part": part, "emulated": self.emulated, **row}) + "\n")

    def limit(self, comparisons: int) -> Limit:
        """A share of the time for each of ``comparisons``, of which a half is for setting up."""
        return Limit(harness.FEWEST_ROUNDS if self.emulated else 101, self.seconds / comparisons / 2)

    def over(self) -> bool:
        return time.perf_counter() - self.begun > self.seconds * 0.9


def working(device: torch.device) -> list[str]:
    """The backends to measure: those with kernels, that work here."""
    return [name for name in ("cuda", "triton") if backends.registry()[name].why_not(device) is None]


def environment(run: Run) -> None:
    facts = results.environment(run.device, "cuda")
    facts["backends"] = {name: b.why_not(run.device) or "works" for name, b in backends.registry().items()}
    gpu = "nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,clocks.max.mem --format=csv,noheader"
    for command in ("nvcc --version", gpu):
        try:
            done = subprocess.run(command.split(), capture_output=True, text=True, timeout=15)
            facts[command.split()[0]] = done.stdout.strip().splitlines()[-1:]
        except (OSError, subprocess.SubprocessError) as error:
            facts[command.split()[0]] = str(error)
    run.write("environment", **facts)


# -- kernels alone -------------------------------------------------------------------------------------------------


class Copy(kernels.Probe):
    """b.copy_(a) in fp32: what device memory can do here and now."""

    def call(self) -> None:
        self.a.copy_(self.b)


def measure_kernel(name: str, kind: str, numel: int, backend: str, run: Run, limit: Limit) -> dict[str, Any]:
    """GB/s of one kernel against a copy; tensors far beyond the cache, so that one set of them is enough."""
    kernel, weights = kernels.KERNELS[name], kernels.WEIGHTS[kind]
    param, grad = (torch.randn(numel, device=run.device).to(DTYPES[weights.dtype]) for _ in range(2))
    ours = kernels.Ours(kernel, param.clone(), grad, backend, weights.master)
    theirs = kernels.Torch(kernel, param, grad, weights.master)
    for one in (ours, theirs):
        one.before()
        one.call()
    equal = harness.require_equal(f"{name}, {kind}, {backend}", ours.results(), theirs.results())
    ours.after()
    del theirs
    copy = Copy(numel, run.device)
    variants = [Variant("ours", lambda _: ours.stages()), Variant("copy", lambda _: copy.stages())]
    times = harness.interleave(variants, limit, run.device)
    moved = kernel.bytes[kind] * numel
    return {
        "backend": backend, "kernel": name, "dtype": kind, "numel": numel, "bytes": moved,
        "rounds": len(times["ours"]), "ms": scaled(times["ours"], 1e3), "gb_per_s": rate(moved / 1e9, times["ours"]),
        "copy_gb_per_s": rate(COPY_BYTES * numel / 1e9, times["copy"]),
        "fraction_of_copy": ratio(times["copy"], times["ours"], moved / (COPY_BYTES * numel)), "equal": equal,
    }  # fmt: skip


def measure_kernels(run: Run) -> None:
    # At least 256 MB for the pass that moves least, 6 bytes an element.
    sizes = [5000] if run.emulated else [64 << 20, 256 << 20]
    chosen = []
    for backend in working(run.device):
        for kind in kernels.WEIGHTS:
            chosen += [(backend, kind, name) for name, kernel in kernels.KERNELS.items() if kind in kernel.bytes]
    limit = run.limit(len(sizes) * len(chosen))
    for numel in sizes:
        for backend, kind, name in chosen:
            if run.over():
                return
            run.write("kernels", **measure_kernel(name, kind, numel, backend, run, limit))


# -- whole windows -------------------------------------------------------------------------------------------------


def measure_windows(run: Run) -> None:
    lists = {
        "gpt-124M": window.gpt(768, 12, 50_257, 1024),
        "gpt-1B": window.gpt(2048, 18, 50_257, 1024),
    }
    if run.emulated:
        lists = {"gpt-tiny": window.gpt(8, 1, 30, 8)}
    counts = (1, 4) if run.emulated else window.MICROBATCHES
    kinds = (*DTYPES, "bf16+fp32")
    limit = run.limit(len(lists) * len(kinds) * len(counts))
    for name, shapes in lists.items():
        for kind in kinds:
            for n in counts:
                if run.over():
                    return
                for row in window.measure(name, shapes, kind, n, limit, "cuda", run.device):
                    run.write("windows", **row)


# -- host time -----------------------------------------------------------------------------------------------------


def measure_host(run: Run) -> None:
    counts = (3,) if run.emulated else (300, 1000)
    for call in overhead.CALLS:
        for count in counts:
            for row in overhead.measure(call, count, run.limit(2 * len(counts)), "cuda", run.device):
                run.write("host", **{"part_of_torch" if k == "part" else k: v for k, v in row.items()})


# -- training ------------------------------------------------------------------------------------------------------


class Training:
    """A GPT on random bytes, bf16 autocast; ``window()`` is one window of ``microbatches``."""

    def __init__(self, name: str, run: Run, microbatches: int) -> None:
        torch.manual_seed(0)
        width, layers, heads, length, passages = (16, 1, 2, 8, 2) if run.emulated else (768, 12, 12, 512, 8)
        self.device, self.microbatches = run.device, microbatches
        self.model = GPT(width, layers, heads, length).to(run.device)
        if name == "fused_accum":
            self.optimizer = FusedAccumAdamW(self.model.parameters(), backend="cuda")
        else:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.text = torch.randint(256, (passages, length + 1), device=run.device)
        self.tokens = microbatches * passages * length

    def window(self) -> None:
        ours = isinstance(self.optimizer, FusedAccumAdamW)
        for k in range(self.microbatches):
            with torch.autocast(self.device.type, torch.bfloat16):
                loss = self.model.loss(self.text[:, :-1], self.text[:, 1:])
            if ours:
                loss.backward()
                last = k == self.microbatches - 1
                (self.optimizer.step if last else self.optimizer.accumulate)(scale=1 / self.microbatches)
            else:
                (loss / self.microbatches).backward()
        if not ours:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def stages(self) -> Iterator[Stage]:
        yield harness.nothing, self.window


def measure_training(run: Run) -> None:
    names = ("fused_accum", "torch AdamW(fused)")
    counts = (2,) if run.emulated else (1, 4, 8)
    for n in counts:
        peak = {}
        for name in names:  # alone on the device
            if run.device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            training = Training(name, run, n)
            for _ in range(2):
                training.window()
            peak[name] = torch.cuda.max_memory_allocated() / 2**30 if run.device.type == "cuda" else None
            parameters = sum(p.numel() for p in training.model.parameters())
            del training
        sides = {name: Training(name, run, n) for name in names}
        for side in sides.values():
            side.window()
        variants = [Variant(name, lambda _, side=side: side.stages()) for name, side in sides.items()]
        times = harness.interleave(variants, run.limit(2 * len(counts)), run.device)
        for name, side in sides.items():
            run.write(
                "training", optimizer=name, parameters=parameters, microbatches=n, peak_gib=peak[name],
                tokens_per_s=rate(side.tokens, times[name]), ratio=ratio(times[names[1]], times[name]),
            )  # fmt: skip


# -- for compute-sanitizer -----------------------------------------------------------------------------------------


def small(run: Run) -> None:
    """Every kernel once or twice, on little memory."""
    options = [{}, {"amsgrad": True}, {"max_grad_norm": 1.0}]
    keeping = [{"stochastic_rounding": True}, {"master_weights": "fp32"}, {"master_weights": "split"}]
    kept = {torch.float32: [], torch.bfloat16: keeping, torch.float16: keeping[:2], torch.float64: []}
    for dtype, more in kept.items():
        for chosen in options + more:
            params = [torch.nn.Parameter(torch.randn(n, device=run.device).to(dtype)) for n in (1, 4099, 9000)]
            params.append(torch.nn.Parameter(torch.randn(31, 9, device=run.device).to(dtype).t()))
            optimizer = FusedAccumAdamW(params, backend="cuda", **chosen)
            for calls in ("s", "as", "aas"):  # from the gradient, with the last add
                for call in calls:
                    for p in params:
                        p.grad = torch.randn(p.shape, device=run.device).to(dtype)
                    optimizer.step() if call == "s" else optimizer.accumulate()
            for p in params:
                p.grad = torch.ones(p.shape, device=run.device).to(dtype)
            optimizer.accumulate()
            optimizer.step()  # from the buffer
    harness.synchronize(run.device)


PARTS: dict[str, Callable[[Run], None]] = {
    "environment": environment,
    "kernels": measure_kernels,
    "windows": measure_windows,
    "host": measure_host,
    "training": measure_training,
    "small": small,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device_parts", description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--rows", type=Path, required=True, help="file of JSON rows to append to")
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--emulated", action="store_true")
    options = parser.parse_args()
    if options.emulated:
        torch.set_num_threads(1)
    PARTS[options.part](Run(options.rows, options.seconds, options.emulated))
    return 0


if __name__ == "__main__":
    sys.exit(main())
