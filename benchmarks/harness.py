"""How the timing benchmarks measure: variants that take turns, intervals, and a gate that lets equals through only.

Times of one machine at one moment are worth little, ratios of variants that took turns within one process are
worth something. So every benchmark is a list of variants, run in a new random order each round; a ratio is taken
within each round, and what is shown is its median over the rounds with a 95 % interval.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import comb
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# What passes as equal: a few fp32 roundings, in another order, of values as large as the tensor's; in bf16 besides
# the neighbour, where fp32 fell on the other side of a tie.
FP32_ROUNDINGS = 16
PRODUCT_ROUNDINGS = 64  # of gradients: sums of hundreds of products, of other terms first, and as exact


FEWEST_ROUNDS = 7  # the fewest that give a 95 % interval are 6


class NotEqual(Exception):
    """Two variants that are to be timed against each other do not compute the same."""


class Estimate(NamedTuple):
    """A median and the 95 % interval it lies in."""

    low: float
    median: float
    high: float


class Limit(NamedTuple):
    """When a comparison is over: after ``rounds``, or ``seconds`` if FEWEST_ROUNDS are done by then."""

    rounds: int
    seconds: float = float("inf")


Stage = tuple[Callable[[], Any], Callable[[], Any]]


@dataclass
class Variant:
    """Something to time. ``stages(k)``: the parts of its k-th run, each (what comes before, what is timed).

    What a generator does between two parts, or after the last, is not timed either.
    """

    name: str
    stages: Callable[[int], Iterable[Stage]]


def nothing() -> None:
    """For a stage that has nothing to prepare."""


# -- time ---------------------------------------------------------------------------------------------------


def host_seconds(call: Callable[[], Any], device: torch.device) -> float:
    """How long ``call`` keeps the host; the device is idle before."""
    synchronize(device)
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def seconds(call: Callable[[], Any], device: torch.device) -> float:
    """How long ``call`` takes: on the host's clock for the CPU, between two events of the stream elsewhere."""
    if device.type == "cpu":
        return host_seconds(call, device)
    start, end = (torch.Event(device=device, enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def interleave(
    variants: Sequence[Variant], limit: Limit, device: torch.device, clock: Callable = seconds
) -> dict[str, list[float]]:
    """Seconds of every variant in every round: ``{name: [of round 0, of round 1, ...]}``."""
    order = random.Random(0)
    begun = time.perf_counter()
    times: dict[str, list[float]] = {variant.name: [] for variant in variants}
    collecting = gc.isenabled()
    gc.disable()  # as timeit does: a collection belongs to no variant
    try:
        for k in range(limit.rounds):
            if k >= FEWEST_ROUNDS and time.perf_counter() - begun > limit.seconds:
                break
            for variant in order.sample(variants, len(variants)):
                spent = 0.0
                for before, timed in variant.stages(k):
                    before()
                    spent += clock(timed, device)
                times[variant.name].append(spent)
    finally:
        if collecting:
            gc.enable()
    return times


def estimate(samples: Sequence[float]) -> Estimate:
    """The median with its 95 % interval by order statistics: no assumption but that rounds are alike.

    The interval from the k-th smallest to the k-th largest misses the median with the probability that fewer than
    k of n coin tosses show heads, twice. With fewer than 6 samples no interval has 95 %: the whole range is given.
    """
    ordered, n = sorted(samples), len(samples)
    k, missed = 0, 0.0
    while k < n // 2 and 2 * (missed + comb(n, k) / 2**n) <= 0.05:
        missed += comb(n, k) / 2**n
        k += 1
    k = max(k, 1)
    return Estimate(ordered[k - 1], statistics.median(ordered), ordered[n - k])


def scaled(samples: Sequence[float], factor: float) -> Estimate:
    return estimate([factor * sample for sample in samples])


def rate(amount: float, samples: Sequence[float]) -> Estimate:
    """``amount`` per second."""
    return estimate([amount / sample for sample in samples])


def ratio(above: Sequence[float], below: Sequence[float], factor: float = 1.0) -> Estimate:
    """``factor * above / below``, taken within each round."""
    return estimate([factor * a / b for a, b in zip(above, below, strict=True)])


# -- the gate -----------------------------------------------------------------------------------------------


def require_equal(
    what: str, ours: dict[str, Tensor], theirs: dict[str, Tensor], updates: int = 1, roundings: int = FP32_ROUNDINGS
) -> str:
    """``"same bits"``, or the largest difference as a part of what is tolerated; raises NotEqual beyond that.

    What is tolerated: ``roundings * eps(fp32) * (|value| + rms of the tensor)``, plus the step to the neighbour
    for narrower dtypes, one for each of the ``updates`` that rounded to them. To be called before anything is timed.
    """
    if ours.keys() != theirs.keys():
        raise NotEqual(f"{what}: {sorted(ours)} against {sorted(theirs)}")
    worst, same = 0.0, True
    for name, a in ours.items():
        b = theirs[name]
        if a.dtype != b.dtype or a.shape != b.shape:
            raise NotEqual(f"{what}: {name} is {a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}")
        if torch.equal(a, b):
            continue
        error, same = difference(a, b, updates, roundings), False
        if not error <= 1:
            raise NotEqual(f"{what}: {name} is off by {error:.3g} times what is tolerated; so nothing is timed")
        worst = max(worst, error)
    return "same bits" if same else f"{worst:.2f} of the tolerance"


def difference(
    a: Tensor, b: Tensor, updates: int = 1, roundings: int = FP32_ROUNDINGS, chunk: int = 1 << 22
) -> float:
    """The largest difference of a and b in units of the tolerance; inf where one is not finite."""
    a, b = a.detach().flatten(), b.detach().flatten()
    rms = (sum(x.double().square().sum().item() for x in b.split(chunk)) / b.numel()) ** 0.5
    rounded = roundings * torch.finfo(torch.float32).eps
    relative = rounded + (updates * torch.finfo(b.dtype).eps if b.dtype != torch.float32 else 0)
    floor = rounded * rms + torch.finfo(torch.float32).tiny
    worst = 0.0
    for x, y in zip(a.split(chunk), b.split(chunk)):
        x, y = x.double(), y.double()
        parts = (x - y).abs() / (relative * y.abs() + floor)
        worst = max(worst, parts.nan_to_num(nan=float("inf")).max().item())
    return worst


def cache_bytes(device: torch.device) -> int:
    """The last-level cache that tensors of ``device`` can stay in."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    try:  # not os.sysconf: it gives what all cores of a socket have together
        levels = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
        return max(int(level.read_text().strip().removesuffix("K")) << 10 for level in levels)
    except (OSError, ValueError):
        return 32 << 20
