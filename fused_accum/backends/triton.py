"""The Triton backend: one launch per bucket of equal dtypes and flags, over tables of pointers in device memory.

Rows whose tensors do not all lie in one linear order (transposed gradients, slices, negative views) go through
temporaries in the parameter's order and are copied back; rows of which a tensor is not aligned to 16 bytes go in
launches of their own. Block sizes are fixed: an autotuner would run an update several times.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import triton_probe
from .base import Backend, Rows
from .triton_tables import Recent, ScalarRows, block_map, current_stream, device_table, upload

ALIGNMENT = 16  # bytes: the widest load and store of a GPU's thread
PARAM, GRAD, ACCUM, EXP_AVG, EXP_AVG_SQ, MAX_EXP_AVG_SQ = range(TENSORS := 6)  # columns of the kernels' table


@cache
def kernels() -> Any:
    """The kernels, imported at first use: importing triton takes a second, and TRITON_INTERPRET is read then."""
    from . import triton_kernels

    return triton_kernels


@cache
def triton_dtypes() -> dict[torch.dtype, Any]:
    import triton.language as tl

    names = ("float32", "bfloat16", "float16", "float64")
    return {getattr(torch, name): getattr(tl, name) for name in names}


@cache
def warps_of_a_program() -> int:
    """How many warps make up a program's threads: 4 of NVIDIA's, 2 of AMD's."""
    import triton

    if triton.knobs.runtime.interpret:
        return 1
    return kernels().THREADS // triton.runtime.driver.active.get_current_target().warp_size


def on(device: torch.device) -> AbstractContextManager:
    """Makes ``device`` the current one; the interpreter on the CPU needs numpy's warnings off instead."""
    if device.type != "cpu":
        return torch.accelerator.device_index(device.index)
    import numpy

    return numpy.errstate(all="ignore")


def arithmetic(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def linear_strides(p: Tensor) -> tuple[int, ...]:
    """The strides every tensor of ``p``'s row must have to be walked as one line: p's, or contiguous ones."""
    if p.is_contiguous() or torch._debug_has_internal_overlap(p) == 0:  # 0: dense, and no two elements in a place
        return p.stride()
    return torch.empty(p.shape, device="meta").stride()


def lies_in(t: Tensor, strides: tuple[int, ...]) -> bool:
    if t.is_neg() or t._is_zerotensor():
        return False
    return t.stride() == strides or all(
        have == want or size == 1 for have, want, size in zip(t.stride(), strides, t.shape)
    )


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
    """A row of a launch: pointers in the order of the kernels' table, elements, number of its scalar row."""

    pointers: list[int]
    numel: int
    scalars: int


class Batch:
    """The rows of one call, by what the compiler must know of them."""

    def __init__(self) -> None:
        self.rows: dict[tuple, list[Row]] = {}
        self.lines: list[Tensor] = []  # temporaries: alive until the kernels that use them are in the stream
        self.copy_back: list[tuple[Tensor, Tensor]] = []

    def add(self, like: Tensor, grad: Tensor | None, written: dict[int, Tensor], constants: tuple, scalars: int):
        """A row whose tensors are shaped as ``like``: the gradient, and by column those that the kernel writes;
        ``constants`` are the kernel's, but for alignment and block size, in its order."""
        if like.numel() == 0:
            return
        strides = linear_strides(like)
        pointers = [0] * TENSORS
        if grad is not None:
            pointers[GRAD] = self._in_line(grad, strides, written=False).data_ptr()
        for column, t in written.items():
            pointers[column] = self._in_line(t, strides, written=True).data_ptr()
        aligned = all(pointer % ALIGNMENT == 0 for pointer in pointers)
        self.rows.setdefault((*constants, aligned), []).append(Row(pointers, like.numel(), scalars))

    def _in_line(self, t: Tensor, strides: tuple[int, ...], written: bool) -> Tensor:
        if lies_in(t, strides):
            return t
        line = torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device).copy_(t)
        self.lines.append(line)
        if written:
            self.copy_back.append((t, line))
        return line


class Triton(Backend):
    name = "triton"
    keeps_weights = False

    def __init__(self) -> None:
        self.tables = Recent(32)
        self.block_maps = Recent(8)
        self.scales = Recent(32)

    def why_not(self, device: torch.device) -> str | None:
        return triton_probe.why_not(device, self._try)

    def meant_for(self, device: torch.device) -> bool:
        return device.type != "cpu"

    def _try(self, device: torch.device) -> None:
        """Compile and run one small accumulation on ``device``; raises what goes wrong."""
        accum, grad = torch.ones(5, device=device), torch.full((5,), 3.0, device=device)
        self.accumulate([accum], [grad], [False], 2.0)
        if accum.tolist() != [7.0] * 5:
            raise RuntimeError(f"1 + 2*3 came out as {accum.tolist()}")

    @torch.no_grad()
    def accumulate(
        self, accums: Sequence[Tensor], grads: Sequence[Tensor], first: Sequence[bool], scale: float
    ) -> None:
        if not accums:
            return
        device = accums[0].device
        with on(device):
            batch = Batch()
            for accum, grad, is_first in zip(accums, grads, first):
                constants = (arithmetic(accum.dtype), grad.dtype, accum.dtype, not is_first)
                batch.add(accum, grad, {ACCUM: accum}, constants, 0)
            self._launch(kernels().accumulate_kernel, batch, device, lambda wide: self._scale(scale, wide, device))

    def _scale(self, scale: float, wide: torch.dtype, device: torch.device) -> Tensor:
        def make() -> Tensor:
            return upload(torch.tensor([scale], dtype=torch.float64).to(wide), device)

        return self.scales.get((scale, wide, device, current_stream(device)), make)

    @torch.no_grad()
    def adamw(self, rows: Rows) -> None:
        if not rows.params:
            return
        device = rows.params[0].device
        steps = torch._foreach_add(rows.steps, 1)
        every = range(len(rows.params))
        # Parameters that share memory are updated one after the other, as torch does.
        turns = [[i] for i in every] if overlap(rows.params) else [every]
        with on(device):
            for turn in turns:
                batch, scalars = Batch(), ScalarRows(device, rows.factors)
                for i in turn:
                    at = scalars.add(rows.groups[i], float(steps[i]), rows)
                    add_update(batch, rows, i, at)
                self._launch(kernels().adamw_kernel, batch, device, scalars.on_device)
        torch._foreach_copy_(rows.steps, steps)

    def _launch(
        self, kernel: Any, batch: Batch, device: torch.device, scalars: Callable[[torch.dtype], Tensor]
    ) -> None:
        """One launch for every set of constants in ``batch``, then what it left in temporaries is copied back."""
        where = (device, current_stream(device))
        for constants, rows in batch.rows.items():
            wide = constants[0]
            block = kernels().block_of(triton_dtypes()[wide])
            counts = [-(-row.numel // block) for row in rows]
            table = array("Q")
            programs = 0
            for row, count in zip(rows, counts):
                table.extend((*row.pointers, row.numel, programs, row.scalars))
                programs += count
            content = table.tobytes()
            kernel[(programs,)](
                self.tables.get((content, *where), lambda: device_table(content, device)),  # noqa: B023
                self.block_maps.get((*counts, *where), lambda: block_map(counts, device)),  # noqa: B023
                scalars(wide),
                *(triton_dtypes()[c] if isinstance(c, torch.dtype) else c for c in constants),
                BLOCK=block,
                num_warps=warps_of_a_program(),
                enable_fp_fusion=False,
            )
        for t, line in batch.copy_back:
            t.copy_(line)


def add_update(batch: Batch, rows: Rows, i: int, scalars: int) -> None:
    """Row ``i`` of ``rows`` as a row of adamw_kernel."""
    p, grad, sum_dtype = rows.params[i], rows.grads[i], rows.accum_dtypes[i]
    written = {PARAM: p, EXP_AVG: rows.exp_avgs[i], EXP_AVG_SQ: rows.exp_avg_sqs[i]}
    largest = rows.max_exp_avg_sqs[i]
    if largest is not None:
        written[MAX_EXP_AVG_SQ] = largest
    if rows.present[i]:
        written[ACCUM] = rows.accums[i]
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
    )
    batch.add(p, grad, written, constants, scalars)


BACKEND = Triton()
