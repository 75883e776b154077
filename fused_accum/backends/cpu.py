"""The native CPU backend: csrc/cpu_*.cpp through fused_accum._C."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import norms
from ..rows import Rows
from .base import Backend
from .native import _C, MISSING, NativeBucket, accumulate_lists, adamw_lists, place_of


def executor() -> Any:
    return _C.Cpu(torch.get_num_threads())


class CpuBucket(NativeBucket):
    def executor(self, steps: bool, factors: norms.Factors | None = None, counts: Tensor | None = None) -> Any:
        return executor()


class Cpu(Backend):
    name = "cpu"
    bucket_type = CpuBucket

    def why_not(self, device: torch.device) -> str | None:
        if device.type != "cpu":
            return f"it updates CPU tensors only, not {device.type} ones"
        if _C is None:
            return MISSING
        try:
            _C.cpu_isa()
        except RuntimeError as error:
            return str(error)
        return None

    def accumulate(
        self, accums: Sequence[Tensor], grads: Sequence[Tensor], first: Sequence[bool], scale: float
    ) -> None:
        accumulate_lists(executor(), place_of(torch.device("cpu")), accums, grads, first, scale)

    def scatter_rows(self, accum: Tensor, index: Tensor, grad: Tensor, skip: int | None) -> None:
        index, grad = index.contiguous(), grad.contiguous()
        _C.scatter_rows(
            accum, index.data_ptr(), 0, grad, -1 if skip is None else skip, executor(), place_of(accum.device)
        )

    def add_product(self, buffer: Tensor, left: Tensor, right: Tensor, first: bool) -> None:
        if not buffer.is_contiguous():
            buffer, left, right = buffer.t(), right, left
        # Else what the kernel packs would be more than a quarter of the buffer, which is small.
        fits = _C.has_product() and 4 * min(len(left), _C.TERM_TOKENS) <= len(buffer)
        if not fits or not _C.add_product(buffer, left, right, first, torch.get_num_threads()):
            super().add_product(buffer, left, right, first)

    def adamw(self, rows: Rows) -> None:
        adamw_lists(executor(), place_of(torch.device("cpu")), rows)


BACKEND = Cpu()
