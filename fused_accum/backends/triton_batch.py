"""The rows of one call as the Triton kernels want them: tensors in one linear order, by what the compiler must know.

Rows whose tensors do not all lie in one linear order (transposed gradients, slices, negative views) go through
temporaries in the parameter's order and are copied back; rows of which a tensor is not aligned to 16 bytes go in
launches of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .. import state
from ..rows import Rows

ALIGNMENT = 16  # bytes: the widest load and store of a GPU's thread
PARAM, GRAD, ACCUM, EXP_AVG, EXP_AVG_SQ, MAX_EXP_AVG_SQ, MASTER = range(TENSORS := 7)  # columns of the kernels' table


def arithmetic(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def row_major_strides(p: Tensor) -> tuple[int, ...]:
    return torch.empty(p.shape, device="meta").stride()


def linear_strides(p: Tensor) -> tuple[int, ...]:
    """The strides every tensor of ``p``'s row must have to be walked as one line: p's, or contiguous ones."""
    if p.is_contiguous() or torch._debug_has_internal_overlap(p) == 0:  # 0: dense, and no two elements in a place
        return p.stride()
    return row_major_strides(p)


def lies_in(t: Tensor, strides: tuple[int, ...]) -> bool:
    if t.is_neg() or t._is_zerotensor():
        return False
    return t.stride() == strides or all(
        have == want or size == 1 for have, want, size in zip(t.stride(), strides, t.shape)
    )


def in_line(t: Tensor, strides: tuple[int, ...]) -> Tensor:
    """``t`` where it has ``strides``, else a copy that has."""
    if lies_in(t, strides):
        return t
    return torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device).copy_(t)


def overlap(params: Sequence[Tensor]) -> bool:
    """Whether two of ``params`` may share memory."""
    spans = []
    for p in params:
        if p.numel():
            last = sum((size - 1) * stride for size, stride in zip(p.shape, p.stride()))
            spans.append((p.data_ptr(), p.data_ptr() + (last + 1) * p.element_size()))
    spans.sort()
    return any(end > start for (_, end), (start, _) in pairwise(spans))


class Row(NamedTuple):
    """A row of a launch, in the order of the kernels' table but for the first block, which the launch knows.

    squares: where its sum of squares goes. seed, index: what its random words depend on.
    """

    pointers: list[int]
    numel: int
    scalars: int
    squares: int = 0
    seed: int = 0
    index: int = 0


class Batch:
    """The rows of one call, by what the compiler must know of them."""

    def __init__(self) -> None:
        self.rows: dict[tuple, list[Row]] = {}
        self.lines: list[Tensor] = []  # temporaries: alive until the kernels that use them are in the stream
        self.copy_back: list[tuple[Tensor, Tensor]] = []

    def add(
        self,
        like: Tensor,
        grad: Tensor | None,
        others: dict[int, Tensor],
        constants: tuple,
        *,
        scalars: int = 0,
        squares: int = 0,
        randomness: tuple[int, int] | None = None,
    ) -> None:
        """A row whose tensors are shaped as ``like``: the gradient, and by column those that the kernel may write.

        constants: the kernel's, but for alignment and block size, in its order. randomness: seed and index, where the
        order of elements matters: then it is the row-major one.
        """
        if like.numel() == 0:
            return
        strides = linear_strides(like) if randomness is None else row_major_strides(like)
        pointers = [0] * TENSORS
        if grad is not None:
            pointers[GRAD] = self._in_line(grad, strides, written=False).data_ptr()
        for column, t in others.items():
            pointers[column] = self._in_line(t, strides, written=True).data_ptr()
        aligned = all(pointer % ALIGNMENT == 0 for pointer in pointers)
        row = Row(pointers, like.numel(), scalars, squares, *(randomness or ()))
        self.rows.setdefault((*constants, aligned), []).append(row)

    def _in_line(self, t: Tensor, strides: tuple[int, ...], written: bool) -> Tensor:
        line = in_line(t, strides)
        if line is not t:
            self.lines.append(line)
            if written:
                self.copy_back.append((t, line))
        return line

    def finish(self) -> None:
        """Copy back what the kernels left in temporaries."""
        for t, line in self.copy_back:
            t.copy_(line)


def add_sum(batch: Batch, accum: Tensor, grad: Tensor, first: bool, squares: int = 0) -> None:
    """A row of accumulate_kernel that adds ``grad`` to ``accum``, or begins it."""
    constants = (arithmetic(accum.dtype), grad.dtype, accum.dtype, True, not first, True, squares != 0)
    batch.add(accum, grad, {ACCUM: accum}, constants, squares=squares)


def add_measurement(
    batch: Batch, like: Tensor, accum: Tensor | None, grad: Tensor | None, dtype: torch.dtype, squares: int
) -> None:
    """A row of accumulate_kernel that only measures: ``accum``, or else what ``grad`` would begin there."""
    constants = (
        arithmetic(dtype),
        dtype if grad is None else grad.dtype,
        dtype,
        grad is not None,
        grad is None,
        False,
        True,
    )
    batch.add(like, grad, {} if accum is None else {ACCUM: accum}, constants, squares=squares)


def add_update(batch: Batch, rows: Rows, i: int, scalars: int) -> None:
    """Row ``i`` of ``rows`` as a row of adamw_kernel."""
    p, grad, sum_dtype = rows.params[i], rows.grads[i], rows.accum_dtypes[i]
    weights = rows.weights if p.dtype in state.LOW_PRECISION else state.PLAIN
    others = {PARAM: p, EXP_AVG: rows.exp_avgs[i], EXP_AVG_SQ: rows.exp_avg_sqs[i]}
    largest = rows.max_exp_avg_sqs[i]
    if largest is not None:
        others[MAX_EXP_AVG_SQ] = largest
    if rows.present[i]:
        others[ACCUM] = rows.accums[i]
    if weights in (state.MASTER, state.SPLIT):
        others[MASTER] = rows.masters[i]
    constants = (
        arithmetic(p.dtype),
        p.dtype,
        sum_dtype if grad is None else grad.dtype,
        sum_dtype,
        rows.exp_avgs[i].dtype,
        rows.exp_avg_sqs[i].dtype,
        (rows.exp_avg_sqs[i] if largest is None else largest).dtype,
        grad is not None,
        bool(rows.present[i]),
        largest is not None,
        weights,
    )
    randomness = (rows.rounding_seed, rows.indices[i]) if weights == state.STOCHASTIC else None
    batch.add(p, grad, others, constants, scalars=scalars, randomness=randomness)
