"""What the Triton kernels read from device memory: tables of rows, maps of blocks, rows of scalars."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from ..norms import Factors
from ..rows import Rows
from ..state import Hyper

COEFFICIENT = 1  # where step_scalars has it


def current_stream(device: torch.device) -> int:
    return 0 if device.type == "cpu" else torch.accelerator.current_stream(device).stream_id


class Recent:
    """The last few things made, by what they were made from. Optimizers of several threads share it."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.kept: OrderedDict[Hashable, Tensor] = OrderedDict()
        self.lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        with self.lock:
            if key not in self.kept:
                self.kept[key] = make()
                if len(self.kept) > self.limit:
                    self.kept.popitem(last=False)
            self.kept.move_to_end(key)
            return self.kept[key]


def upload(host: Tensor, device: torch.device) -> Tensor:
    """``host`` on ``device``, in order on the current stream, without waiting for it."""
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def power(beta: float, t: float) -> float:
    """``beta**t`` for a count ``t``, operation by operation as csrc/adamw_math.h has it."""

    def exact(x: float, y: float) -> tuple[float, float]:
        """x*y as an unevaluated sum of two floats (Dekker's product; the native code has fma)."""
        high = x * y
        (x1, x2), (y1, y2) = halves(x), halves(y)
        return high, x2 * y2 - (((high - x1 * y1) - x2 * y1) - x1 * y2)

    def halves(x: float) -> tuple[float, float]:
        big = 134217729.0 * x
        upper = big - (big - x)
        return upper, x - upper

    def product(x: tuple[float, float], y: tuple[float, float]) -> tuple[float, float]:
        high, low = exact(x[0], y[0])
        low += x[0] * y[1] + x[1] * y[0]
        total = high + low
        return total, low - (total - high)

    result, square, n = (1.0, 0.0), (beta, 0.0), int(t)
    while n:
        if n & 1:
            result = product(result, square)
        square = product(square, square)
        n >>= 1
    return result[0]


def step_scalars(hyper: Hyper, t: float, scale: float, coefficient: float) -> list[float]:
    """struct StepScalars of csrc/adamw_math.h: what an update needs that no element changes, in float64; then 32
    bits of ``t`` in halves, which float32 holds too."""
    lr = float(hyper.lr)
    return [
        scale,
        -coefficient if hyper.maximize else coefficient,
        1 - lr * hyper.weight_decay,
        1 - hyper.beta1,
        -hyper.beta1,
        hyper.beta2,
        1 - hyper.beta2,
        -lr / (1 - power(hyper.beta1, t)),
        1 / math.sqrt(1 - power(hyper.beta2, t)),
        hyper.eps,
        int(t) & 0xFFFF,
        int(t) >> 16 & 0xFFFF,
    ]


class ScalarRows:
    """One row of scalars per (group, t), rounded once to the dtype of the arithmetic.

    Kernels read them from device memory, so that rows computed there (of steps that live on the device) can take
    the place of these.
    """

    def __init__(self, device: torch.device, factors: Factors | None = None) -> None:
        self.device, self.factors = device, factors
        self.at: dict[tuple[int, float], int] = {}
        self.rows: list[list[float]] = []
        self.tensors: dict[torch.dtype, Tensor] = {}

    def add(self, group: int, t: float, table: Rows) -> int:
        """The number of the scalar row for update ``t`` of a parameter of ``group``."""
        if (group, t) not in self.at:
            self.at[group, t] = len(self.rows)
            self.rows.append(step_scalars(table.hypers[group], t, table.scale, table.coefficient))
        return self.at[group, t]

    def on_device(self, wide: torch.dtype) -> Tensor:
        if wide not in self.tensors:
            exact = torch.tensor(self.rows, dtype=torch.float64)
            if self.factors is None or self.factors.clip is None:
                self.tensors[wide] = upload(exact.to(wide), self.device)
            else:
                table = upload(exact, self.device).clone()
                table[:, COEFFICIENT] *= self.factors.clip
                self.tensors[wide] = table.to(wide)
        return self.tensors[wide]


def device_table(content: bytes, device: torch.device) -> Tensor:
    return upload(torch.frombuffer(bytearray(content), dtype=torch.int64), device)


def block_map(counts: Sequence[int], device: torch.device) -> Tensor:
    """The row of every program, made on the device: for large models it is megabytes."""
    rows = torch.arange(len(counts), dtype=torch.int32, device=device)
    repeats = upload(torch.tensor(counts), device)
    return rows.repeat_interleave(repeats, output_size=sum(counts))
