"""The norm of a window's gradient, and what follows from it: clipping, and skipping what is not finite.

Between collect and update, ``Bucket.sum_up`` leaves every bucket with the sums of squares of its parameters' sums, in
float64. Their sum times the coefficient c is the global norm of the gradient that the update will use; it is finite
exactly where all elements are (but for float64 gradients beyond 1e154, whose squares overflow).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .buckets import Bucket

SKIPPING = (None, "step", "microbatch")
EPS = 1e-6  # torch.nn.utils.clip_grad_norm_'s


def checked_max_grad_norm(value: Any) -> float | None:
    """``value`` as a float; ValueError unless it is None or finite and above 0."""
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"max_grad_norm is {value!r}; it must be None (no clipping) or a finite number above 0")
    return number


def checked_skip_nonfinite(value: Any) -> str | None:
    if value not in SKIPPING:
        raise ValueError(f"skip_nonfinite is {value!r}; it must be None, 'step' or 'microbatch'")
    return value


def there(number: float | Tensor, device: torch.device) -> float | Tensor:
    """``number`` on ``device``, which nothing waits for."""
    return number.to(device, non_blocking=True) if isinstance(number, Tensor) else number


class Factors(NamedTuple):
    """What a step on a device is told without waiting for it; None: nothing.

    clip: 0-dim float64, multiplies the coefficient (of clipping, or of the sum of weights). skip: 0-dim float32, not
    0 where nothing is to be updated.
    """

    clip: Tensor | None
    skip: Tensor | None

    def on(self, device: torch.device) -> Factors:
        return Factors(*(f if f is None else f.to(device, non_blocking=True) for f in self))

    def and_(self, other: Factors) -> Factors:
        def both(a: Tensor | None, b: Tensor | None, join: Callable[[Tensor, Tensor], Tensor]) -> Tensor | None:
            return b if a is None else a if b is None else join(a, b.to(a.device, non_blocking=True))

        return Factors(both(self.clip, other.clip, torch.mul), both(self.skip, other.skip, torch.maximum))


def unscaled(grad_scale: Tensor | None, found_inf: Tensor) -> Factors:
    """What a GradScaler asks for: gradients divided by ``grad_scale``, and nothing done where an inf was found."""
    return Factors(None if grad_scale is None else 1 / grad_scale.double().squeeze(), found_inf.float().squeeze())


def divided_by(total: Tensor) -> Factors:
    """What divides by ``total``, a sum of weights on a device, and drops the window where that is 0."""
    empty = total == 0
    return Factors(1 / torch.where(empty, 1.0, total), empty.float())


class Norms:
    """The norms of one step's gradient, where they were found; ``value``: the global one, where the host knows it."""

    def __init__(self, buckets: Sequence[Bucket], coefficient: float | Tensor) -> None:
        self.coefficient = coefficient  # a tensor: only its device knows it
        self.value: float | None = None
        self.parts = [(b.params, b.name_of, b.measured, b.squares) for b in buckets if b.measured]

    @property
    def dtype(self) -> torch.dtype:
        double = any(params[i].dtype == torch.float64 for params, _, rows, _ in self.parts for i in rows)
        return torch.float64 if double else torch.float32

    def on_host(self) -> float:
        """The global norm; on a GPU this waits for it. Added up in one order, for the same bits everywhere."""
        total = sum(sum(squares.tolist()) for _, _, _, squares in self.parts)
        self.value = math.sqrt(total) * self.coefficient
        return self.value

    def total(self) -> Tensor:
        """The global norm, 0-dim float64 on the first device."""
        device = self.parts[0][3].device
        if self.value is not None:
            return torch.tensor(self.value, dtype=torch.float64, device=device)
        sums = [squares.sum().to(device, non_blocking=True) for _, _, _, squares in self.parts]
        return torch.stack(sums).sum().sqrt() * there(self.coefficient, device)

    def finite(self) -> Tensor:
        """Whether all gradients are, 0-dim bool on the first device."""
        device = self.parts[0][3].device
        each = [(squares < math.inf).all().to(device, non_blocking=True) for _, _, _, squares in self.parts]
        return each[0] if len(each) == 1 else torch.stack(each).all()

    def each(self) -> dict[Tensor, Tensor]:
        found: dict[Tensor, Tensor] = {}
        for params, _, rows, squares in self.parts:
            each = (squares.sqrt() * there(self.coefficient, squares.device)).to(self.dtype).unbind()
            found.update(zip([params[i] for i in rows], each))
        return found

    def nonfinite(self) -> str | None:
        """The name of the first parameter whose gradient is not finite."""
        for params, name_of, rows, squares in self.parts:
            for i, square in zip(rows, squares.tolist()):
                if not math.isfinite(square):
                    return name_of(params[i])
        return None


def norms_of(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The norm of each, in float64 where the device has that: one pass, nothing written."""
    wide = torch.float32 if tensors[0].device.type == "mps" else torch.float64
    return torch._foreach_norm(list(tensors), 2, wide)


def clip_coefficient(norm: float, max_norm: float) -> float:
    """As clip_grad_norm_; NaN stays NaN."""
    coefficient = max_norm / (norm + EPS)
    return 1.0 if coefficient > 1 else coefficient


def factors(norm: Tensor, max_norm: float | None, skip: bool) -> Factors:
    """The same on the device of ``norm``; a number over a tensor would be rounded twice."""
    clip = None if max_norm is None else (torch.full_like(norm, max_norm) / (norm + EPS)).clamp(max=1.0)
    return Factors(clip, (~norm.isfinite()).float() if skip else None)
