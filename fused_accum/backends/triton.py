"""The Triton backend: one launch per bucket of equal dtypes and flags, over tables of pointers in device memory.

Block sizes are fixed: an autotuner would run an update several times.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..buckets import Bucket
from ..buffers import BY_GRAD
from . import triton_probe
from .base import Backend, Rows, refuse_outside
from .triton_batch import (
    ALIGNMENT,
    Batch,
    Row,
    add_measurement,
    add_sum,
    add_update,
    arithmetic,
    in_line,
    overlap,
)
from .triton_prologue import Prologue
from .triton_tables import Recent, block_map, current_stream, device_table, upload


@cache
def kernels() -> Any:
    """The kernels, imported at first use: importing triton takes a second, and TRITON_INTERPRET is read then."""
    from . import triton_kernels

    return triton_kernels


@cache
def scatter() -> Any:
    from . import triton_scatter

    return triton_scatter


@cache
def triton_dtypes() -> dict[torch.dtype, Any]:
    import triton.language as tl

    names = ("float32", "bfloat16", "float16", "float64")
    return {getattr(torch, name): getattr(tl, name) for name in names}


@cache
def warps_of(threads: int) -> int:
    """How many warps make up a program's threads: of 128, 4 of NVIDIA's, 2 of AMD's."""
    import triton

    if triton.knobs.runtime.interpret:
        return 1
    return threads // triton.runtime.driver.active.get_current_target().warp_size


@cache
def bound() -> dict[str, int]:
    """How many registers a thread that updates may have, where that can be said."""
    import triton

    if triton.knobs.runtime.interpret or triton.runtime.driver.active.get_current_target().backend != "cuda":
        return {}
    return {"maxnreg": kernels().REGISTERS}


def on(device: torch.device) -> AbstractContextManager:
    """Makes ``device`` the current one; the interpreter on the CPU needs numpy's warnings off instead."""
    if device.type != "cpu":
        return torch.accelerator.device_index(device.index)
    import numpy

    return numpy.errstate(all="ignore")


class Launch(NamedTuple):
    """Rows of equal constants: their table, the row of every program, how many programs, elements of each."""

    constants: tuple
    rows: Sequence[Row]
    table: Tensor
    blocks: Tensor
    programs: int
    block: int

    def run(self, kernel: Any, *arguments: Tensor, **options: int) -> None:
        constants = (triton_dtypes()[c] if isinstance(c, torch.dtype) else c for c in self.constants)
        kernel[(self.programs,)](
            self.table, self.blocks, *arguments, *constants, BLOCK=self.block,
            num_warps=warps_of(kernels().THREADS), enable_fp_fusion=False, **options,
        )  # fmt: skip

    def add_up(self, partials: Tensor) -> None:
        kernels().squares_kernel[(len(self.rows),)](
            self.table, partials, BLOCK=self.block, CHUNK=kernels().CHUNK,
            num_warps=warps_of(2 * kernels().THREADS), enable_fp_fusion=False,
        )  # fmt: skip


class TritonBucket(Bucket):
    """A Bucket whose sums of squares come out of the pass that writes a sum; what no such pass has seen is read."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # Of the buffers, by row, then of what was only measured.
        with torch.inference_mode(False):
            self.all_squares = torch.zeros(2 * len(self.params), dtype=torch.float64, device=self.device)

    def address(self, place: int) -> int:
        return self.all_squares.data_ptr() + 8 * place

    def add(self, rows: Sequence[int], scale: float | Tensor) -> None:
        if not self.options.measures:
            super().add(rows, scale)
            return
        accums = [self.accums[i] for i in rows]
        first = [not self.present[i] for i in rows]
        squares = [self.address(i) for i in rows]
        self.backend.accumulate(accums, [self.grads[i] for i in rows], first, scale, squares)
        increment_version(accums)
        for i in rows:
            self.known[i] = 1

    def measure(self, rows: Sequence[int], grads: Sequence[Tensor | None], scale: float | Tensor) -> Tensor:
        places = []
        unseen: list[tuple[Tensor, Tensor | None, Tensor | None, torch.dtype, int]] = []
        for i, g in zip(rows, grads):
            p, aliased = self.params[i], self.present[i] == BY_GRAD
            if g is None and self.known[i] and not aliased:
                places.append(i)
                continue
            accum = self.accums[i] if g is None or aliased else None
            place = len(self.params) + i
            places.append(place)
            dtype = self.options.accum_dtype_for(p)
            unseen.append((p, accum, None if aliased else g, dtype, self.address(place)))
        self.backend.measure(unseen, scale, self.device)
        return self.backend.pick(self.all_squares, places)


class Triton(Backend):
    name = "triton"
    bucket_type = TritonBucket
    decides_on_device = True

    def __init__(self) -> None:
        self.tables = Recent(32)
        self.block_maps = Recent(8)
        self.scales = Recent(32)
        self.prologue = Prologue()
        self.places = Recent(8)

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
        self,
        accums: Sequence[Tensor],
        grads: Sequence[Tensor],
        first: Sequence[bool],
        scale: float | Tensor,
        squares: Sequence[int] | None = None,
    ) -> None:
        """As Backend, with a ``scale`` on the device too, where 0 adds nothing; ``squares``: addresses of float64 for
        the sums of squares of what is in the buffers then."""
        if not accums:
            return
        batch = Batch()
        for accum, grad, is_first, at in zip(accums, grads, first, squares or [0] * len(accums)):
            add_sum(batch, accum, grad, is_first, at)
        self._launch_sums(batch, scale, accums[0].device)

    @torch.no_grad()
    def measure(
        self,
        rows: Sequence[tuple[Tensor, Tensor | None, Tensor | None, torch.dtype, int]],
        scale: float | Tensor,
        device: torch.device,
    ) -> None:
        """Sums of squares of buffers, or of what gradients would begin there: (parameter, buffer or None, gradient or
        None, dtype of the sum, address of a float64) for each."""
        batch = Batch()
        for row in rows:
            add_measurement(batch, *row)
        self._launch_sums(batch, scale, device)

    @torch.no_grad()
    def scatter_rows(self, accum: Tensor, index: Tensor, grad: Tensor, skip: int | None) -> None:
        refuse_outside(index, len(accum))
        tokens, width = grad.shape
        if not grad.numel():
            return
        grad, device = in_line(grad, (width, 1)), accum.device
        with on(device):
            kernel = scatter()
            rows, order = index.sort(stable=True)
            ends = torch.searchsorted(rows, rows, right=True)
            block = kernel.block_of(width)
            parts = -(-width // block)
            places = [place for t in (accum, grad) for place in (t.data_ptr(), width * t.element_size())]
            kernel.scatter_kernel[(tokens * parts,)](
                accum, grad, rows, order, ends, width, parts, -1 if skip is None else skip,
                *(triton_dtypes()[d] for d in (arithmetic(accum.dtype), accum.dtype, grad.dtype)),
                ALIGNED=all(place % ALIGNMENT == 0 for place in places), BLOCK=block,
                num_warps=max(1, warps_of(block // 8)), enable_fp_fusion=False,
            )  # fmt: skip

    def pick(self, t: Tensor, places: Sequence[int]) -> Tensor:
        """A copy of ``t[places]``, without waiting for the device."""

        def make() -> Tensor:
            return upload(torch.tensor(places, dtype=torch.int64, device="cpu"), t.device)

        return t.index_select(0, self.places.get((*places, t.device, current_stream(t.device)), make))

    def _launch_sums(self, batch: Batch, scale: float | Tensor, device: torch.device) -> None:
        with on(device):
            for launch in self._launches(batch, device):
                factor = self._scale(scale, launch.constants[0], device)
                if not launch.rows[0].squares:
                    launch.run(kernels().accumulate_kernel, factor, factor)  # partials are not touched
                    continue
                partials = torch.empty(launch.programs, dtype=torch.float64, device=device)
                launch.run(kernels().accumulate_kernel, factor, partials)
                launch.add_up(partials)
            batch.finish()

    def _scale(self, scale: float | Tensor, wide: torch.dtype, device: torch.device) -> Tensor:
        """As accumulate_kernel reads it."""
        if isinstance(scale, Tensor):
            return torch.stack((scale, (scale == 0).double())).to(wide)

        def make() -> Tensor:
            return upload(torch.tensor([scale, 0.0], dtype=torch.float64, device="cpu").to(wide), device)

        return self.scales.get((scale, wide, device, current_stream(device)), make)

    @torch.no_grad()
    def adamw(self, rows: Rows) -> None:
        if not rows.params:
            return
        device = rows.params[0].device
        every = range(len(rows.params))
        # Parameters that share memory are updated one after the other, as torch does.
        turns = [[i] for i in every] if overlap(rows.params) else [every]
        with on(device):
            scalars = self.prologue.count(rows, device)
            for turn in turns:
                batch = Batch()
                for i in turn:
                    add_update(batch, rows, i, i)
                for launch in self._launches(batch, device):
                    launch.run(kernels().adamw_kernel, scalars[launch.constants[0]], **bound())
                batch.finish()

    def _launches(self, batch: Batch, device: torch.device) -> Iterator[Launch]:
        """One for every set of constants in ``batch``."""
        where = (device, current_stream(device))
        for constants, rows in batch.rows.items():
            block = kernels().block_of(triton_dtypes()[constants[0]])
            counts = [-(-row.numel // block) for row in rows]
            words = array("Q")
            programs = 0
            for row, count in zip(rows, counts):
                words.extend((*row.pointers, row.numel, programs, *row[2:]))
                programs += count
            content = words.tobytes()
            table = self.tables.get((content, *where), lambda: device_table(content, device))  # noqa: B023
            blocks = self.block_maps.get((*counts, *where), lambda: block_map(counts, device))  # noqa: B023
            yield Launch(constants, rows, table, blocks, programs, block)


BACKEND = Triton()
