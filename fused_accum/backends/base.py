"""What a backend is: two operations on lists of tensors. Everything above it is the same for all backends."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import direct_ops
from ..buckets import Bucket
from ..rows import Rows


class Backend:
    """Base of all backends. ``bucket_type`` may be a Bucket that takes a faster road to the same kernels."""

    name: str
    bucket_type: type[Bucket] = Bucket
    # Whether its buckets take a micro-batch's factor as a float64 tensor on their device, where 0 adds nothing, and
    # count updates there, of parameters with a contribution and unless ``Factors.skip``: the host need not know.
    decides_on_device = False

    def why_not(self, device: torch.device) -> str | None:
        """None when this backend works for tensors on ``device`` here, else the reason and the remedy."""
        raise NotImplementedError

    def meant_for(self, device: torch.device) -> bool:
        """Whether ``backend="auto"`` considers it: a backend may work where nobody should get it unasked."""
        return True

    def accumulate(
        self, accums: Sequence[Tensor], grads: Sequence[Tensor], first: Sequence[bool], scale: float
    ) -> None:
        """``accum <- scale*grad`` where ``first`` (accum is not read), else ``accum + scale*grad``, in place."""
        raise NotImplementedError

    def scatter_rows(self, accum: Tensor, index: Tensor, grad: Tensor, skip: int | None) -> None:
        """``accum[index[t]] += grad[t]`` for every t with ``index[t] != skip``, in place; the same bits every time.

        accum: (rows, width), contiguous. index: (tokens,), int64. grad: (tokens, width), any floating dtype.
        """
        if skip is not None:
            kept = index != skip
            index, grad = index[kept], grad[kept]
        if accum.device.type != "cpu":
            accum.index_put_((index,), grad.to(accum.dtype), accumulate=True)  # there it sorts
        else:
            refuse_outside(index, len(accum))
            accum.index_add_(0, index, grad.to(accum.dtype))

    def add_product(self, buffer: Tensor, left: Tensor, right: Tensor, first: bool) -> None:
        """``buffer += left.T @ right``, or ``=`` when ``first`` (the buffer is not read then), in place.

        buffer: (m, n), floating, row- or column-major. left, right: (tokens, m) and (tokens, n), of one dtype.
        """
        direct_ops.add_product(buffer, left, right, first)

    def adamw(self, rows: Rows) -> None:
        """One AdamW update of every row, in place; buffers that were read are zero afterwards."""
        raise NotImplementedError


def refuse_outside(index: Tensor, rows: int) -> None:
    """IndexError for an index that is none of ``rows`` rows; on a GPU an assertion there, which nothing waits for."""
    if not index.numel():
        return
    low, high = index.aminmax()
    if index.device.type != "cpu":
        torch._assert_async((low >= 0) & (high < rows))
    elif not 0 <= int(low) <= int(high) < rows:
        raise IndexError(f"an index of {int(low)} to {int(high)} is outside the {rows} rows")
