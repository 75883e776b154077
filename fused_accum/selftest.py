"""`python -m fused_accum selftest`: every backend that works here against the reference, on small tensors."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from . import _native, backends, report
from .backends import rounding
from .optimizer import FusedAccumAdamW
from .state import LOW_PRECISION

# Around vector and chunk boundaries, empty, 0-dim and strided.
SHAPES = ((0,), (), (1,), (17,), (257, 33), (64, 32), (10_007,))
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MICROBATCHES = (1, 3)  # from the gradient; first write, add and the last add in the update
WINDOWS = 3
KEPT = ({}, {"master_weights": "fp32"}, {"master_weights": "split"}, {"stochastic_rounding": True})

# Largest |difference| / (1 + |reference|), in units of the tensor's dtype's eps: fp32 rounds a few times per
# window, and a parameter rounded to 16 bits may fall on the other side of a tie.
TOLERANCE_EPS = 16.0


def main() -> int:
    """Prints one line per backend and CPU instruction set; returns the exit code."""
    failed, compared = False, 0
    bits: list[Tensor] | None = None  # of the first CPU instruction set; the others must give the same
    for name, device, isa in candidates():
        try:
            ours, worst = compare(name, device)
            verdict = "ok" if worst <= TOLERANCE_EPS else "FAILED"
            verdict += f": largest difference {worst:.2f} eps of the dtype (allowed {TOLERANCE_EPS:g})"
            if isa:
                bits = bits or ours
                same = all(torch.equal(as_bytes(a), as_bytes(b)) for a, b in zip(ours, bits, strict=True))
                verdict += ", same bits" if same else ", FAILED: not the bits of the first instruction set"
        except Exception as error:  # one backend's failure must not hide the others' results
            verdict = f"FAILED: {type(error).__name__}: {error}"
        failed |= "FAILED" in verdict
        compared += 1
        print(f"{name + ' ' + isa:<20} {verdict}")
    if not compared:
        print("only the reference works here: there is nothing to compare with it")
    return report.ONLY_REFERENCE if failed or not compared else report.NATIVE_WORKS


def candidates() -> Iterator[tuple[str, torch.device, str]]:
    """(backend, device, CPU instruction set in use or ""); says what is left out."""
    for row in report.collect()["backends"]:
        if row["backend"] == "reference":
            continue
        if not row["works"]:
            print(f"{row['backend']:<20} not run: {row['reason']}")
        elif row["backend"] != "cpu":
            yield row["backend"], torch.device(row["device"]), ""
        else:
            yield from each_isa()


def each_isa() -> Iterator[tuple[str, torch.device, str]]:
    native, _ = _native.load()
    before = native.cpu_isa()
    try:
        for isa, why in native.cpu_isas().items():
            if why:
                print(f"{'cpu ' + isa:<20} not run: {why}")
                continue
            native.use_cpu_isa(isa)
            yield "cpu", torch.device("cpu"), isa
    finally:
        native.use_cpu_isa(before)


def compare(backend: str, device: torch.device) -> tuple[list[Tensor], float]:
    """All that the backend left, over dtypes, window lengths and options, and its largest error in eps."""
    everything: list[Tensor] = []
    worst = 0.0
    for dtype, microbatches, flip, kept in itertools.product(DTYPES, MICROBATCHES, (False, True), KEPT):
        if kept and dtype not in ((torch.bfloat16,) if "split" in kept.values() else LOW_PRECISION):
            continue
        options = {"amsgrad": flip, "maximize": flip, "lr": 0.1, "weight_decay": 0.3, **kept}
        ours, theirs = (run(name, device, dtype, microbatches, options) for name in (backend, "reference"))
        worst = max(worst, *(error_in_eps(a, b) for a, b in zip(ours, theirs, strict=True)))
        everything += ours
    ours, theirs = (scattered(name, device) for name in (backend, "reference"))
    worst = max(worst, *(error_in_eps(a, b) for a, b in zip(ours, theirs, strict=True)))
    return everything + ours, worst


def run(
    backend: str, device: torch.device, dtype: torch.dtype, microbatches: int, options: dict
) -> list[Tensor]:
    """Parameters, moments and, half-way through the last window, buffers, all as the backend left them."""
    random = torch.Generator().manual_seed(0)

    def tensor(shape: tuple[int, ...]) -> Tensor:
        values = torch.randn(shape, generator=random, device="cpu").to(device, dtype)
        return values.t().contiguous().t() if shape == (64, 32) else values

    params = [torch.nn.Parameter(tensor(shape)) for shape in SHAPES]
    optimizer = FusedAccumAdamW(params, backend=backend, **options)
    left = []
    for window, microbatch in itertools.product(range(WINDOWS), range(microbatches)):
        for p in params:
            p.grad = tensor(tuple(p.shape))
        weight = float(1 + microbatch)
        if microbatch + 1 < microbatches:
            optimizer.accumulate(weight=weight)
        else:
            optimizer.step(weight=weight)
        if window + 1 == WINDOWS and microbatch + 2 == microbatches:
            left += saved_tensors(optimizer)
    weights = [p.detach() for p in params]
    if options.get("master_weights") == "split":  # halves near a tie may differ by a whole unit of the parameter
        weights = [rounding.joined(p.detach(), optimizer.state[p]["master"]) for p in params]
    return left + weights + saved_tensors(optimizer)


def scattered(backend: str, device: torch.device) -> list[Tensor]:
    """Buffers to which an embedding's gradient was added, in rows of 128 bits and odd ones."""
    random = torch.Generator().manual_seed(0)
    on_cpu = partial(torch.randn, generator=random, device="cpu")
    left = []
    for dtype, width in itertools.product(DTYPES, (64, 33)):
        total = on_cpu(20, width).to(device, torch.promote_types(dtype, torch.float32))
        index = torch.randint(20, (100,), generator=random, device="cpu").to(device)
        grad = on_cpu(100, width).to(device, dtype)
        backends.registry()[backend].scatter_rows(total, index, grad, 3)
        left.append(total)
    return left


def saved_tensors(optimizer: FusedAccumAdamW) -> list[Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a mid-window checkpoint needs this optimizer to be read
        state = copy.deepcopy(optimizer.state_dict()["state"])
    tensors = [value for entry in state.values() for value in entry.values() if isinstance(value, Tensor)]
    return [t for t in tensors if t.is_floating_point()]  # halves of masters are no numbers


def error_in_eps(a: Tensor, b: Tensor) -> float:
    if a.dtype != b.dtype or a.shape != b.shape:
        raise AssertionError(f"{a.dtype} {tuple(a.shape)} where the reference has {b.dtype} {tuple(b.shape)}")
    difference = (a.double() - b.double()).abs() / (1 + b.double().abs())
    if not difference.isfinite().all():
        return float("inf")
    return difference.max().item() / torch.finfo(a.dtype).eps if a.numel() else 0.0


def as_bytes(t: Tensor) -> Tensor:
    return t.contiguous().reshape(-1).view(torch.uint8)
