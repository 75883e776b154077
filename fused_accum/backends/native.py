"""What the backends of native code share: a bucket with its launch table kept between calls, and calls on lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _native, checks, norms
from ..buckets import Bucket
from ..rows import Rows
from ..state import PARAMETER_DTYPES, Hyper

PLACE_TYPES = {"cpu": 1, "cuda": 2}  # DLPack's

_C, MISSING = _native.load()
if _C is not None:
    _C.set_tensor_class(torch.Tensor)


def place_of(device: torch.device) -> Any:
    """A device as DLPack names it."""
    return _C.Place(PLACE_TYPES[device.type], device.index or 0)


class NativeBucket(Bucket):
    """A Bucket whose way of a gradient is two native calls; Python takes over for what is unusual.

    A subclass makes what runs the rows of a call.
    ``all_squares``: where kernels put sums of squares, a float64 per parameter.
    """

    def executor(self, steps: bool, factors: norms.Factors | None = None, counts: Tensor | None = None) -> Any:
        """What runs the rows of the coming call, a step or an accumulation; ``counts``: as Rows'."""
        raise NotImplementedError

    def native_hyper(self, hyper: Hyper, group: dict[str, Any]) -> Any:
        return _C.Hyper(hyper)

    def by_value(self, scale: float | Tensor) -> float:
        """What to give to the native calls; a scale on the device goes to their executors instead."""
        return scale

    def stream(self) -> Any:
        """The torch stream that the coming call's kernels go to, for the allocator; None where there is none."""
        return None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.table = _C.Table(
            self.params, self.groups, torch._C._increment_version, place_of(self.device), self.indices,
            self.options.weights,
            self.options.rounding_seed,
        )  # fmt: skip
        self.table.accept(torch.Tensor)
        self.table.accept(torch.nn.Parameter)
        with torch._C.DisableTorchFunctionSubclass():  # which an uninitialized parameter has refuse it
            self.inference = any(p.is_inference() for p in self.params)
        self.all_squares = self.new_squares() if self.options.measures else None

    def progress(self) -> int:
        return self.table.progress()

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

    def accumulate(self, scale: float | Tensor) -> None:
        if self.counts is not None or isinstance(scale, Tensor):
            self.count(self.table.gradients(), scale)
        address, scale = 0 if self.all_squares is None else self.all_squares.data_ptr(), self.by_value(scale)
        self.table.accumulate(self.present, scale, self.executor(False), self.stream(), self.known, address)

    def sum_up(self, scale: float | Tensor) -> None:
        if self.counts is not None or isinstance(scale, Tensor):
            self.count([i for i in self.table.gradients() if self.present[i]], scale)
        code, address = PARAMETER_DTYPES.index(self.options.accum_dtype), self.all_squares.data_ptr()
        scale = self.by_value(scale)
        self.measured = self.table.sum_up(
            self.present, scale, code, self.executor(False), self.stream(), self.known, address
        )
        self.squares = self.those_measured(self.all_squares)

    def measure_gradients(self, scale: float | Tensor) -> None:
        code, squares = PARAMETER_DTYPES.index(self.options.accum_dtype), self.new_squares()
        scale = self.by_value(scale)
        self.measured = self.table.measure_gradients(scale, code, self.executor(False), squares.data_ptr())
        self.squares = self.those_measured(squares)

    def new_squares(self) -> Tensor:
        with torch.inference_mode(False):
            return torch.zeros(len(self.params), dtype=torch.float64, device=self.device)

    def those_measured(self, squares: Tensor) -> Tensor:
        """The entries of ``squares`` for the rows ``measured``, copied; nothing waits for a device."""
        return squares.index_select(0, self.places(self.measured))

    def prepare(self, state: dict, groups: Sequence[dict[str, Any]], hypers: Sequence[Hyper]) -> None:
        self.native_hypers = [self.native_hyper(hyper, group) for hyper, group in zip(hypers, groups)]
        if self.table.prepare(state, self.native_hypers, self.present) < 0:
            return
        self.grads = [p.grad for p in self.params]
        super().prepare(state, groups, hypers)
        self.grads = None
        self.refuse(self.table.prepare(state, self.native_hypers, self.present))

    def step(
        self,
        state: dict,
        hypers: Sequence[Hyper],
        scale: float | Tensor,
        coefficient: float,
        factors: norms.Factors | None = None,
    ) -> None:
        code, scale = PARAMETER_DTYPES.index(self.options.accum_dtype), self.by_value(scale)
        present = bytes(self.present)
        counts = None if self.counts is None else self.counted(self.table.stepping())
        executor = self.executor(True, factors, counts)
        self.table.step(self.native_hypers, self.present, code, scale, coefficient, executor, self.stream())
        self.consumed(present)

    def step_row(self, i: int, state: dict, groups: Sequence[dict[str, Any]], coefficient: float) -> None:
        code = PARAMETER_DTYPES.index(self.options.accum_dtype)
        if self.inference or not self.table.step_row(
            i, self.accums, self.present, self.dtypes, state, self.native_hypers, code, coefficient,
            self.executor(True), self.stream(),
        ):  # fmt: skip
            super().step_row(i, state, groups, coefficient)
        if self.present[i]:
            self.stale[i] = self.present[i] = 0

    def drop_gradients(self) -> None:
        self.table.drop_gradients()

    def release(self) -> None:
        super().release()
        self.table.release()

    def refuse(self, row: int) -> None:
        """Raise for a row that passed every check here but that the table still does not take."""
        if row >= 0:
            p = self.params[row]
            raise RuntimeError(
                f"parameter {self.name_of(p)} ({checks.short(p.dtype)} {tuple(p.shape)}, {type(p).__name__}), its "
                "gradient or its state cannot be read by the native code of fused_accum; construct the optimizer "
                "with backend='reference'"
            )


def accumulate_lists(
    executor: Any, place: Any, accums: Sequence[Tensor], grads: Sequence[Tensor], first: Sequence[bool], scale: float
) -> None:
    """``Backend.accumulate`` in native code."""
    _C.accumulate_lists(list(accums), list(grads), list(first), scale, executor, place)


def adamw_lists(executor: Any, place: Any, rows: Rows) -> None:
    """``Backend.adamw`` in native code."""
    accums = [a if present else None for a, present in zip(rows.accums, rows.present)]
    _C.step_lists(
        list(rows.params), list(rows.grads), accums, list(rows.exp_avgs), list(rows.exp_avg_sqs),
        list(rows.max_exp_avg_sqs), list(rows.steps), list(rows.groups), [_C.Hyper(h) for h in rows.hypers],
        [PARAMETER_DTYPES.index(dtype) for dtype in rows.accum_dtypes], rows.scale, rows.coefficient, executor, place,
        list(rows.masters), list(rows.indices) or [0] * len(rows.params), rows.weights, rows.rounding_seed or 0,
    )  # fmt: skip
