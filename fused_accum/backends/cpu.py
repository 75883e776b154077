"""The native CPU backend: csrc/cpu_*.cpp through fused_accum._C, with its launch table kept between calls."""

from __future__ import annotations

from collections.abc import Sequence
from operator import gt
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from .. import _native, checks
from ..buckets import Bucket
from ..rows import Rows
from ..state import PARAMETER_DTYPES, Hyper
from .base import Backend

_C, _MISSING = _native.load()
if _C is not None:
    _C.set_tensor_class(torch.Tensor)


class NativeBucket(Bucket):
    """A Bucket whose way of a gradient is two native calls; Python takes over for what is unusual."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.table = _C.Table(self.params, self.groups, increment_version)
        self.table.accept(torch.Tensor)
        self.table.accept(torch.nn.Parameter)
        self.inference = any(p.is_inference() for p in self.params)

    def collect(self, buffers: bool) -> int:
        if self.inference:
            self.normalize(buffers)
        found, odd = self.table.collect(self.accums, self.present, self.dtypes, buffers)
        if odd < 0:
            return found
        self.normalize(buffers)
        found, odd = self.table.collect(self.accums, self.present, self.dtypes, buffers)
        self.refuse(odd)
        return found

    def normalize(self, buffers: bool) -> None:
        """Check everything in Python, which raises or makes buffers, and replace gradients the table cannot read."""
        super().collect(buffers)
        for i, (p, g) in enumerate(zip(self.params, self.grads)):
            self.table.accept(type(p))
            if g is None and not self.present[i]:
                continue
            self.check(i, g)
            if g is not None and (type(g) is not Tensor or g.is_neg() or g._is_zerotensor()):
                p.grad = checks.plain_gradient(g)
        self.grads = None

    def accumulate(self, scale: float) -> None:
        self.table.accumulate(self.present, scale, torch.get_num_threads())

    def prepare(self, state: dict, groups: Sequence[dict[str, Any]], hypers: Sequence[Hyper]) -> None:
        self.native_hypers = [_C.Hyper(hyper) for hyper in hypers]
        if self.table.prepare(state, self.native_hypers, self.present) < 0:
            return
        self.grads = [p.grad for p in self.params]
        super().prepare(state, groups, hypers)
        self.grads = None
        self.refuse(self.table.prepare(state, self.native_hypers, self.present))

    def step(self, state: dict, hypers: Sequence[Hyper], scale: float, coefficient: float) -> None:
        code = PARAMETER_DTYPES.index(self.options.accum_dtype)
        present = bytes(self.present)
        self.table.step(self.native_hypers, self.present, code, scale, coefficient, torch.get_num_threads())
        self.stale[:] = bytes(map(gt, self.stale, present))

    def step_row(self, i: int, state: dict, groups: Sequence[dict[str, Any]], coefficient: float) -> None:
        code, threads = PARAMETER_DTYPES.index(self.options.accum_dtype), torch.get_num_threads()
        if self.inference or not self.table.step_row(
            i, self.accums, self.present, self.dtypes, state, self.native_hypers, code, coefficient, threads
        ):
            super().step_row(i, state, groups, coefficient)
        if self.present[i]:
            self.stale[i] = self.present[i] = 0

    def drop_gradients(self) -> None:
        self.table.drop_gradients()

    def release(self) -> None:
        self.table.release()

    def refuse(self, row: int) -> None:
        """Raise for a row that passed every check here but that the table still does not take."""
        if row >= 0:
            p = self.params[row]
            raise RuntimeError(
                f"parameter {self.name_of(p)} ({checks.short(p.dtype)} {tuple(p.shape)}, {type(p).__name__}) cannot "
                "be read by the native code of fused_accum; construct the optimizer with backend='reference'"
            )


class Cpu(Backend):
    name = "cpu"
    bucket_type = NativeBucket

    def why_not(self, device: torch.device) -> str | None:
        if device.type != "cpu":
            return f"it updates CPU tensors only, not {device.type} ones"
        if _C is None:
            return _MISSING
        try:
            _C.cpu_isa()
        except RuntimeError as error:
            return str(error)
        return None

    def accumulate(
        self, accums: Sequence[Tensor], grads: Sequence[Tensor], first: Sequence[bool], scale: float
    ) -> None:
        _C.accumulate_lists(list(accums), list(grads), list(first), scale, torch.get_num_threads())

    def scatter_rows(self, accum: Tensor, index: Tensor, grad: Tensor, skip: int | None) -> None:
        index, grad = index.contiguous(), grad.contiguous()
        _C.scatter_rows(accum, index.data_ptr(), grad, -1 if skip is None else skip, torch.get_num_threads())

    def adamw(self, rows: Rows) -> None:
        accums = [a if present else None for a, present in zip(rows.accums, rows.present)]
        _C.step_lists(
            list(rows.params), list(rows.grads), accums, list(rows.exp_avgs), list(rows.exp_avg_sqs),
            list(rows.max_exp_avg_sqs), list(rows.steps), list(rows.groups), [_C.Hyper(h) for h in rows.hypers],
            [PARAMETER_DTYPES.index(dtype) for dtype in rows.accum_dtypes], rows.scale, rows.coefficient,
            torch.get_num_threads(),
        )  # fmt: skip


BACKEND = Cpu()
