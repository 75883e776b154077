"""The host's side of triton_counts.py: what a step tells its prologue, and what that leaves for the update."""

from __future__ import annotations

import struct
from array import array
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..rows import Rows
from .triton_tables import Recent, current_stream, device_table, upload

SCALE, COEFFICIENT, SKIP = range(3)  # in the numbers of a step


@cache
def kernel() -> Any:
    """The module of the kernel, imported at first use: importing triton takes a second."""
    from . import triton_counts

    return triton_counts


def known_numbers(rows: Rows) -> list[float]:
    """The numbers of a step, as far as the host knows them."""
    scale_there, counts_there = isinstance(rows.scale, Tensor), rows.counts is not None
    numbers = [0.0 if scale_there else rows.scale, rows.coefficient, 0.0, float(scale_there), float(counts_there)]
    for hyper in rows.hypers:
        lr = 0.0 if isinstance(hyper.lr, Tensor) else hyper.lr
        numbers += [lr, hyper.beta1, hyper.beta2, hyper.eps, hyper.weight_decay, float(hyper.maximize)]
    return numbers


def with_what_the_device_knows(numbers: Tensor, rows: Rows) -> Tensor:
    """``numbers``; a copy, where only the device knows some of them."""
    clip, skip = (None, None) if rows.factors is None else rows.factors
    k = kernel()
    given: list[tuple[int, Any]] = [(SCALE, rows.scale), (SKIP, skip)]
    given += [(k.NUMBERS.value + i * k.OF_A_GROUP.value, hyper.lr) for i, hyper in enumerate(rows.hypers)]
    given = [(at, value) for at, value in given if isinstance(value, Tensor)]
    if not given and clip is None:
        return numbers
    numbers = numbers.clone()
    for at, value in given:
        numbers[at].copy_(value)
    if clip is not None:
        numbers[COEFFICIENT] *= clip
    return numbers


def table_of(rows: Rows) -> bytes:
    """A line for each row. Counts that the host keeps of tensors elsewhere (of lists, never of an optimizer) go by
    value."""
    k = kernel()
    kinds = {torch.float32: k.FLOAT32.value, torch.float64: k.FLOAT64.value}
    words = array("q")
    for i, step in enumerate(rows.steps):
        kind, place = kinds[step.dtype], step.data_ptr()
        if step.device != rows.params[i].device:
            kind, place = k.COUNTED.value, struct.unpack("q", struct.pack("d", float(step + 1)))[0]
        flags = (rows.grads[i] is not None) * k.HAS_GRAD.value + bool(rows.present[i]) * k.HAS_ACCUM.value
        words.extend((place, kind, rows.groups[i], flags))
    return words.tobytes()


class Prologue:
    """Runs it, and keeps tables that do not change."""

    def __init__(self) -> None:
        self.tables = Recent(8)
        self.numbers = Recent(8)

    def count(self, rows: Rows, device: torch.device) -> dict[torch.dtype, Tensor]:
        """Count an update of every row, but for those that are dropped; returns the scalars of all, by the dtype of
        the arithmetic."""
        k, where = kernel(), (device, current_stream(device))
        content, known = table_of(rows), known_numbers(rows)
        table = self.tables.get((content, *where), lambda: device_table(content, device))
        numbers = self.numbers.get(
            (*known, *where), lambda: upload(torch.tensor(known, dtype=torch.float64, device="cpu"), device)
        )
        numbers = with_what_the_device_knows(numbers, rows)
        count = len(rows.params)
        scalars = {
            dtype: torch.empty(count, k.STEP_SCALARS.value, dtype=dtype, device=device)
            for dtype in (torch.float32, torch.float64)
        }
        k.count_kernel[(-(-count // k.ROWS),)](
            table, numbers, numbers if rows.counts is None else rows.counts, *scalars.values(), count, ROWS=k.ROWS,
            num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
        on_host = [step for step in rows.steps if step.device != device]
        if on_host:
            torch._foreach_add_(on_host, 1)
        return scalars
