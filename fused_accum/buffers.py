"""The buffers of a bucket's parameters: where they lie, and what they hold of the open window."""

from __future__ import annotations

from collections.abc import Sequence
from operator import gt
from typing import NamedTuple

import torch
from torch import Tensor

from . import checks
from .state import PARAMETER_DTYPES, Options

SLAB_BYTES = 64 << 20  # buffers are cut from flat allocations of at most this size (larger ones stand alone)
ALIGNMENT = 64  # bytes: a cache line, so that no two threads write to one
# How far the work on what ``collect`` found has come, as enum Progress of csrc/table.h. Where an exception ends it
# WRITING, what it has written is not known.
NOTHING, WRITING, TAKEN, STEPPED = range(4)
BY_GRAD = 2  # in `present`: the buffer's content is what p.grad, an alias of it, holds at this moment


class Accum(NamedTuple):
    """A parameter's buffer, the parameter's dtype when it was made, and whether it holds a contribution."""

    buffer: Tensor
    dtype: int
    present: int
    stale: int


class Buffers:
    """Part of Bucket; entry i of every list belongs to ``params[i]``.

    Attributes:
        accums: persistent buffers, None until a parameter's first contribution; outside ``optimizer.state``.
        present: not 0 where the buffer holds a contribution of the open window (else it is not read): 1 where it was
            put there, BY_GRAD where ``collect`` found that p.grad is the buffer.
        stale: 1 where the buffer, when nothing is present, does not read zero.
        dtypes: the parameter's dtype when its buffer was made, as an index into PARAMETER_DTYPES.
        counts: how many contributions a buffer in ``present`` holds, float64 on the device, where it may be none and
            only the device knows; None: one at least.
    """

    def __init__(self, device: torch.device, params: Sequence[Tensor], options: Options) -> None:
        self.device, self.options = device, options
        self.params = list(params)
        self.accums: list[Tensor | None] = [None] * len(self.params)
        self.dtypes = bytearray(len(self.params))
        self.present = bytearray(len(self.params))
        self.stale = bytearray(len(self.params))
        self.counts: Tensor | None = None
        self.sent: dict[tuple[int, ...], Tensor] = {}

    def is_buffer(self, i: int, g: Tensor) -> bool:
        """Whether the gradient ``g`` of parameter ``i`` is its buffer under another name, element by
        element: a transposed or expanded view of it begins at the same place, and is another gradient."""
        accum = self.accums[i]
        if accum is None or g.numel() == 0 or g.data_ptr() != accum.data_ptr():
            return False
        alike = g.stride() == accum.stride() and g.shape == accum.shape and g.dtype == accum.dtype
        return alike and not g.is_neg()

    def allocate(self, rows: Sequence[int]) -> None:
        """Give ``rows`` buffers, uninitialized: the first contribution writes without reading."""
        if rows:
            checks.refuse_fake_mode("accumulation")
        by_dtype: dict[torch.dtype, list[int]] = {}
        for i in rows:
            by_dtype.setdefault(self.options.accum_dtype_for(self.params[i]), []).append(i)
        with torch.inference_mode(False), torch.no_grad():
            for dtype, members in by_dtype.items():
                unit = ALIGNMENT // dtype.itemsize
                slab: list[int] = []
                size = 0
                for i in members:
                    need = -(-self.params[i].numel() // unit) * unit
                    if slab and (size + need) * dtype.itemsize > SLAB_BYTES:
                        self._cut(slab, size, dtype, unit)
                        slab, size = [], 0
                    slab.append(i)
                    size += need
                if slab:
                    self._cut(slab, size, dtype, unit)

    def _cut(self, rows: Sequence[int], size: int, dtype: torch.dtype, unit: int) -> None:
        flat = torch.empty(size, dtype=dtype, device=self.device)
        at = 0
        for i in rows:
            p = self.params[i]
            dense = torch.empty_like(p, device="meta", memory_format=torch.preserve_format)
            self.dtypes[i] = PARAMETER_DTYPES.index(p.dtype)
            self.stale[i] = 1
            # .data: views of one tensor share a version counter, buffers must not
            self.accums[i] = flat.as_strided(p.shape, dense.stride(), at).data
            at += -(-p.numel() // unit) * unit

    # -- the window's content -------------------------------------------------------------------------------

    def places(self, rows: Sequence[int]) -> Tensor:
        """``rows`` as a tensor on the device, sent there once and without waiting."""
        key = tuple(rows)
        if key not in self.sent:
            if len(self.sent) == 4:
                self.sent.clear()
            with torch.inference_mode(False):
                self.sent[key] = self._send(key, torch.int64)
        return self.sent[key]

    def _send(self, numbers: Sequence[int], dtype: torch.dtype) -> Tensor:
        host = torch.tensor(numbers, dtype=dtype, device="cpu", pin_memory=self.device.type == "cuda")
        return host.to(self.device, non_blocking=True)

    @torch.no_grad()
    def count(self, rows: Sequence[int], scale: float | Tensor) -> None:
        """Before a contribution times ``scale`` is added to ``rows``: count it on the device, where a scale of 0, or
        one before it in this window, may be none."""
        on_device = isinstance(scale, Tensor)
        if self.counts is None:
            if not on_device:
                return
            begun = torch.zeros(len(self.params), dtype=torch.float64, device=self.device)
            self.counts = self._send(self.present, torch.float64) if any(self.present) else begun
        one = (scale != 0).double() if on_device else torch.ones((), dtype=torch.float64, device=self.device)
        if len(rows) == len(self.params):
            self.counts += one
        else:
            self.counts.index_add_(0, self.places(rows), one.expand(len(rows)))

    def counted(self, rows: Sequence[int]) -> Tensor | None:
        """``counts`` of these rows."""
        return None if self.counts is None else self.counts.index_select(0, self.places(rows))

    def settle(self) -> None:
        """Forget contributions that were none; waits for a device that has counted."""
        if self.counts is None:
            return
        for i, count in enumerate(self.counts.tolist()):
            if self.present[i] and not count:
                self.present[i] = self.stale[i] = 0  # zeros were written
        self.counts = None

    def consumed(self, present: Sequence[int]) -> None:
        """The buffers of all rows in ``present`` have been read and zeroed."""
        if 1 in self.stale:
            self.stale[:] = bytes(map(gt, self.stale, present))
        self.present[:] = bytes(len(self.params))
        self.counts = None

    def clear_window(self) -> None:
        """Drop every contribution; the buffers read zero."""
        for i, present in enumerate(self.present):
            if present == 1:
                self.accums[i].zero_()
                self.stale[i] = 0
        self.present[:] = bytes(len(self.params))
        self.counts = None

    def clear_aliases(self) -> None:
        """Make the buffers that ``collect`` found to be p.grad read zero."""
        for i, present in enumerate(self.present):
            if present == BY_GRAD:
                self.accums[i].zero_()
                self.stale[i] = 0

    def export(self) -> dict[int, Accum]:
        """Every buffer by ``id(parameter)``."""
        return {
            id(p): Accum(a, d, present, stale)
            for p, a, d, present, stale in zip(self.params, self.accums, self.dtypes, self.present, self.stale)
            if a is not None
        }

    def adopt(self, accums: dict[int, Accum]) -> None:
        """Take over the buffers of ``accums`` that belong to this bucket's parameters."""
        for i, p in enumerate(self.params):
            if (own := accums.pop(id(p), None)) is not None:
                self.accums[i], self.dtypes[i], self.present[i], self.stale[i] = own
