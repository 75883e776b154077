"""The CUDA backend: csrc/cuda_*.cu in fused_accum._C_cuda, which is built where there is nvcc.

It makes executors, which run the rows of fused_accum._C's tables.

Counts of updates (``state[p]["step"]``) live on the device, where the kernels count them and make what depends on
them: a step never waits for the GPU, and one that is skipped there counts nothing. Counts from a checkpoint are moved
there by the first step.

A gradient may come from another stream, whose memory it goes back to when it is consumed, while our kernel may not
have read it yet. So torch's allocator is told of every consumed gradient (``record_stream``; nothing happens where
the streams are one). An event would not do: from a tensor it is not known which stream would have to wait for it.

Tests run the same native code without a GPU: their module in place of fused_accum._C_cuda has DEVICE_TYPE "cpu".
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .. import _native, norms
from ..rows import Rows
from ..state import Hyper
from .base import Backend
from .native import _C, MISSING, NativeBucket, accumulate_lists, adamw_lists, place_of

_CUDA, _CUDA_MISSING = _native.load("_C_cuda")
DEVICE_TYPE = "cuda" if _CUDA is None else _CUDA.DEVICE_TYPE


def current_stream(device: torch.device) -> Any:
    """The stream that kernels for ``device`` go to; None: the default one."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def executor(
    device: torch.device,
    slots: Tensor | None = None,
    *,
    skip: Tensor | None = None,
    clip: Tensor | None = None,
    counts: Tensor | None = None,
    squares: Tensor | None = None,
    scale: Tensor | None = None,
) -> Any:
    """What runs rows on ``device``, on its current stream.

    Of a step: ``slots``, memory for its rows' scalars; on the device ``skip``, one float32, not 0 for no update, as a
    GradScaler's found_inf; ``clip``, one float64, multiplies the coefficient; ``counts``, a float64 per row, as
    Rows.counts. Where sums of squares are wanted: ``squares``, memory for them. ``scale``: what the micro-batch is
    multiplied by instead of the call's scale, as ``device_scale`` makes it.
    """
    stream = current_stream(device)
    handle = 0 if stream is None else stream.cuda_stream
    if slots is not None and stream is not None:
        slots.record_stream(stream)
    factors = {"found_inf": skip, "clip": clip, "counts": counts, "scale": scale}
    given = {name: t.data_ptr() for name, t in factors.items() if t is not None}
    for one, many, t in (("slots", "slot_count", slots), ("squares", "square_count", squares)):
        if t is not None:
            given |= {one: t.data_ptr(), many: len(t)}
    return _CUDA.Cuda(device.index or 0, handle, **given)


def slots_for(rows: int, device: torch.device) -> Tensor:
    return torch.empty(rows, _CUDA.SLOT_BYTES, dtype=torch.uint8, device=device)


def device_scale(scale: Tensor) -> Tensor:
    """``scale``, 0-dim float64 on the device, as kernels read it: struct DeviceScale of csrc/cuda_kernels.h."""
    both = scale.repeat(2)
    both.view(torch.float32)[2] = scale
    return both


class CudaBucket(NativeBucket):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.slots: Tensor | None = None
        # Of a call: alive until its kernels are in the stream.
        self.scratch: Tensor | None = None
        self.scale: Tensor | None = None

    def stream(self) -> Any:
        return current_stream(self.device)

    def executor(self, steps: bool, factors: norms.Factors | None = None, counts: Tensor | None = None) -> Any:
        if steps and self.slots is None:
            with torch.inference_mode(False):
                self.slots = slots_for(len(self.params), self.device)
        if not steps:
            return executor(self.device, squares=self.room_for_squares(), scale=self.scale)
        known = {} if factors is None else factors._asdict()
        return executor(self.device, self.slots, **known, counts=counts, scale=self.scale)

    def by_value(self, scale: float | Tensor) -> float:
        on_device = isinstance(scale, Tensor)
        self.scale = device_scale(scale) if on_device else None
        return 1.0 if on_device else scale

    def room_for_squares(self) -> Tensor | None:
        """Memory for the sums that those of what ``collect`` found are made of."""
        if self.options.skip_nonfinite is None and not self.options.measures:
            return None
        with torch.inference_mode(False):
            count = _CUDA.squares_for(*self.table.sizes())
            self.scratch = torch.empty(count, dtype=torch.float64, device=self.device)
        return self.scratch

    def native_hyper(self, hyper: Hyper, group: dict[str, Any]) -> Any:
        """With capturable, or where it lies on the device anyway, lr is read there, by a graph's replay too."""
        lr = group["lr"]
        stays = isinstance(lr, Tensor) and lr.device == self.device and lr.dtype in (torch.float32, torch.float64)
        if stays and (group["capturable"] or lr.device.type != "cpu"):
            return _C.Hyper(hyper, lr.data_ptr(), lr.dtype == torch.float64)
        return _C.Hyper(hyper)

    def release(self) -> None:
        super().release()
        self.scratch = self.scale = None


@cache
def _why_not(index: int) -> str | None:
    return _CUDA.why_not(index) or None


class Cuda(Backend):
    name = "cuda"
    bucket_type = CudaBucket
    decides_on_device = True

    def why_not(self, device: torch.device) -> str | None:
        if _C is None or _CUDA is None:
            return _CUDA_MISSING or MISSING
        if device.type != DEVICE_TYPE:
            return f"it updates {DEVICE_TYPE} tensors only, not {device.type} ones"
        if device.type == "cuda" and torch.version.cuda is None:
            return f"torch {torch.__version__} is not built for CUDA: install a torch that is"
        return _why_not(device.index or 0)

    def meant_for(self, device: torch.device) -> bool:
        return device.type == "cuda"

    def accumulate(
        self, accums: Sequence[Tensor], grads: Sequence[Tensor], first: Sequence[bool], scale: float
    ) -> None:
        if accums:
            device = accums[0].device
            accumulate_lists(executor(device), place_of(device), accums, grads, first, scale)

    def scatter_rows(self, accum: Tensor, index: Tensor, grad: Tensor, skip: int | None) -> None:
        """As Backend's. An index outside the buffer adds nothing: the forward has refused it on the device."""
        device = accum.device
        wide = accum.dtype == torch.float64
        if wide != (grad.dtype == torch.float64):
            grad = grad.to(torch.float64 if wide else torch.float32)  # as the sum does with each element
        rows, order = index.sort(stable=True)
        _C.scatter_rows(
            accum, rows.data_ptr(), order.data_ptr(), grad.contiguous(), -1 if skip is None else skip,
            executor(device), place_of(device),
        )  # fmt: skip

    def adamw(self, rows: Rows) -> None:
        if rows.params:
            device = rows.params[0].device
            slots = slots_for(len(rows.params), device)
            adamw_lists(executor(device, slots), place_of(device), rows)


BACKEND = Cuda()
