"""The books of one window: how many micro-batches it holds, and what their sum must be divided by."""

from __future__ import annotations

import copy
import math
import numbers
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .skipping import Count

# What a factor may be, in float32 with room for gradients of any sensible size.
SMALLEST, LARGEST = 1e-18, 1e18


class Pending(NamedTuple):
    """What the open window holds: micro-batches with a gradient, and the sum of their weights."""

    microbatches: int
    weight: float


def refuse_loss(name: str, value: Tensor) -> None:
    if value.requires_grad:
        raise TypeError(
            f"{name} is a tensor that requires grad (the loss?); it is a factor, which backward does not see: pass "
            f"a number of tokens or samples, or {name}.detach()"
        )


def host_number(name: str, value: Any) -> float:
    """``value`` (a number or a 0-dim tensor) as a float; raises unless it is finite and not negative."""
    if isinstance(value, Tensor):
        refuse_loss(name, value)
    if isinstance(value, Tensor) and value.dim() != 0:
        raise ValueError(
            f"{name} is a tensor of shape {tuple(value.shape)}; it must be a number or a 0-dim tensor: "
            f"pass {name}.sum() or {name}.item()"
        )
    if isinstance(value, (str, bytes)) or not hasattr(type(value), "__float__"):
        raise TypeError(f"{name} is {value!r}; it must be a number or a 0-dim tensor")
    number = float(value)
    if not math.isfinite(number) or number < 0:
        hint = "to ascend, construct the optimizer with maximize=True" if number < 0 else "skip this micro-batch"
        raise ValueError(f"{name} is {number}; it must be finite and not negative ({hint})")
    return number


def fits(factor: float) -> bool:
    return factor == 0 or SMALLEST <= factor <= LARGEST


def refuse_extremes(scale: float | Tensor, weight: float | Tensor | None) -> None:
    """Raise ValueError for factors whose products with gradients overflow or vanish; what a GPU holds is not read."""
    if isinstance(scale, Tensor) or isinstance(weight, Tensor):
        return
    if fits(scale if weight is None else scale * weight) and (weight is None or fits(weight)):
        return
    given = f"scale is {scale:g}; it" if weight is None else f"scale is {scale:g}, weight {weight:g}; their product"
    raise ValueError(
        f"{given} must be 0 or from {SMALLEST:g} to {LARGEST:g}{'' if weight is None else ', and so must weight'}: "
        "times gradients it would overflow or vanish in float32. Weights are in any unit: divide all weights of a "
        "window by one number"
    )


def count_as_scale(scale: Any, weight: Any) -> str | None:
    """What to warn of where a scale is, by its type, a count: a whole number above 1 (of a tensor on a GPU only the
    dtype is known). A float never is, nor is what comes with a weight."""
    if type(scale) is float or weight is not None:
        return None
    if isinstance(scale, Tensor):
        dtype = scale.dtype
        whole = scale.dim() == 0 and not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
        if not whole or not (on_device(scale) or scale > 1):
            return None
        given = f"of {dtype}" if on_device(scale) else str(int(scale))
    elif isinstance(scale, numbers.Integral) and scale > 1:
        given = str(scale)
    else:
        return None
    return (
        f"scale is {given}, a whole number: a scale multiplies the gradient, and nothing divides by it again. If it "
        "counts tokens or samples, pass it as weight=: step() then divides by the window's sum of weights. If it is "
        "meant as a factor, pass it as a float"
    )


def on_device(value: Any) -> bool:
    """Whether ``value`` is a tensor on a GPU, which reading it here would wait for."""
    return isinstance(value, Tensor) and value.device.type == "cuda"


def number(name: str, value: Any) -> float | Tensor:
    """As ``host_number``; but what a GPU holds stays there, as float64, and is not looked at."""
    if on_device(value) and value.dim() == 0:
        refuse_loss(name, value)
        return value.detach().to(torch.float64, copy=True)
    return host_number(name, value)


class Window:
    """Counts and sums of the open window, in float64 on the host; ``weight`` where its micro-batches' were.

    began_state: the optimizer had no state before it. restored: how many micro-batches a checkpoint began it with;
    0 once p.grad holds them.
    last: the last scale that was not 0, without weights. usual: the one that all ``earlier`` such ones were; None
        where they differ.
    warned: the kinds of warnings that were given already.
    """

    def __init__(self) -> None:
        self.rejections = Count()  # by skip_nonfinite="microbatch", in this window and before
        self.previous_scale_sum: float | None = None
        self.warned: set[str] = set()
        self.clear()

    def once(self, kind: str, message: str | None) -> str | None:
        """``message``, the first time that there is one of this kind."""
        if message is None or kind in self.warned:
            return None
        self.warned.add(kind)
        return message

    def clear(self) -> None:
        self.microbatches = 0
        self.weighted = False
        self.weight: float | Tensor = 0.0
        self.scale_sum = 0.0
        self.scaled = 0
        self.last = self.usual = None
        self.earlier = 0
        self.began_state = False
        self.restored = 0
        self.rejected_before = self.rejections

    def emptied(self) -> Window:
        """A copy that remembers earlier windows only."""
        other = copy.copy(self)
        other.clear()
        return other

    @property
    def pending(self) -> Pending:
        return Pending(self.microbatches, float(self.weight))

    @property
    def open(self) -> bool:
        """Whether there was a micro-batch, if only one that was rejected."""
        return self.microbatches > 0 or self.rejections.known > self.rejected_before.known

    @property
    def unscaled(self) -> bool:
        """Whether all micro-batches came without a factor."""
        return not self.weighted and self.last == 1 and (self.earlier == 0 or self.usual == 1)

    def settle(self) -> None:
        """Count out what the device has rejected; waits for it."""
        now, before = self.rejections, self.rejected_before
        if now.judged == before.judged:
            return
        self.rejections, self.rejected_before = Count(now.read()), Count(before.read())
        rejected = self.rejections.known - self.rejected_before.known - (now.known - before.known)
        if rejected:
            self.microbatches -= rejected
            self.scaled = 0  # which scales were theirs is not known
            self.weighted = self.weighted and self.microbatches > 0

    def refuse_mixing(self, weight: float | Tensor | None) -> None:
        if self.microbatches and self.weighted != (weight is not None):
            have, got = ("a weight", "none") if self.weighted else ("no weight", "one")
            raise ValueError(
                f"this window's {self.microbatches} micro-batch(es) have {have}, this one has {got}; all "
                "micro-batches of a window have a weight or none has: pass weight= every time, or end the "
                "window with step() or zero_grad() first"
            )

    def with_one_more(
        self, scale: float | Tensor, weight: float | Tensor | None, rejections: Count | None = None
    ) -> tuple:
        """What ``write`` makes of these books one micro-batch later; call ``refuse_mixing`` first."""
        rejections = rejections or self.rejections
        count, scale_sum, scaled = self.microbatches + 1, self.scale_sum, self.scaled
        if weight is not None:
            last, usual, earlier = self.last, self.usual, self.earlier
            return rejections, count, True, self.weight + weight, scale_sum, scaled, last, usual, earlier
        if not isinstance(scale, Tensor):  # else the host does not know how the sums compare
            scale_sum, scaled = scale_sum + scale, scaled + 1
        return rejections, count, self.weighted, self.weight, scale_sum, scaled, *self._remembering(scale)

    def with_one_rejected(self) -> tuple:
        """The same where the host has rejected it."""
        return (
            self.rejections.one_more(), self.microbatches, self.weighted, self.weight, self.scale_sum, self.scaled,
            self.last, self.usual, self.earlier,
        )  # fmt: skip

    def write(self, books: tuple) -> None:
        """The same, however often it is done: an interrupt may have come in between."""
        (
            self.rejections, self.microbatches, self.weighted, self.weight, self.scale_sum, self.scaled,
            self.last, self.usual, self.earlier,
        ) = books  # fmt: skip

    def add(self, scale: float | Tensor, weight: float | Tensor | None) -> None:
        """Count one micro-batch; call ``refuse_mixing`` first."""
        self.write(self.with_one_more(scale, weight))

    def count(self) -> None:
        """Count one micro-batch that came with its scale, if any, already in its gradient."""
        self.microbatches += 1
        self.last, self.usual, self.earlier = self._remembering(1.0)

    def _remembering(self, scale: float | Tensor) -> tuple[float | None, float | None, int]:
        """``last``, ``usual`` and ``earlier`` after one more."""
        scale = math.nan if isinstance(scale, Tensor) else scale  # which is equal to none
        if scale == 0 or self.last is None:
            return (self.last if scale == 0 else scale), self.usual, self.earlier
        usual = self.last if self.earlier == 0 or self.usual == self.last else None
        return scale, usual, self.earlier + 1

    def _forgotten(self) -> str | None:
        """What to warn of where the last micro-batch alone has no scale. Two of them may well have their own, but
        where one is 1/2."""
        if self.last != 1 or self.usual in (None, 1) or not (self.earlier > 1 or self.usual == 0.5):
            return None
        return (
            f"the last micro-batch of this window has scale 1, the {self.earlier} before it {self.usual:g}: so it "
            f"counts {1 / self.usual:g} times as much as each of them. If its scale was forgotten, pass it there "
            "too: step(scale=...), accumulate(scale=...) or, in backward modes, scale_loss(loss, scale=...)"
        )

    def total_weight(self, weight: float | Tensor | None) -> float | Tensor | None:
        """The window's sum of weights with one more micro-batch of ``weight``; None without weights."""
        if weight is None and not self.weighted:
            return None
        return self.weight if weight is None else self.weight + weight

    def close(self) -> str | None:
        """End the window; returns what to warn of: that all of it was rejected, or (once each) that its last scale
        seems forgotten, or that its scales add up to another sum than before."""
        message = None
        rejected = self.rejections.known - self.rejected_before.known
        if rejected and not self.microbatches:
            message = (
                f"skip_nonfinite='microbatch' rejected all {rejected} micro-batch(es) of this window, whose "
                "gradients have an inf or a NaN: there is nothing to average, so no parameter was updated and the "
                "window is closed; nonfinite_parameter names the first of them"
            )
        if (forgotten := self._forgotten()) is not None:
            message = self.once("forgotten", forgotten)
        elif self.scaled and self.scaled == self.microbatches:
            previous, now = self.previous_scale_sum, self.scale_sum
            differs = previous is not None and not math.isclose(previous, now, rel_tol=1e-6)
            if differs:
                message = self.once(
                    "sum",
                    f"the scales of this window's {self.microbatches} micro-batch(es) add up to {now:g}, those "
                    f"of the window before to {previous:g}. If losses are means and 1/N is in the scale, a short "
                    "window (the tail of an epoch?) gets an update of another size: pass weight= (the micro-batch's "
                    "token count) to accumulate() and step(), which then divides by the window's own sum of weights. "
                    "If you have divided each loss by its own window's number of micro-batches, all is well",
                )
            self.previous_scale_sum = now
        self.clear()
        return message

    def as_group_entries(self) -> dict[str, float | int | bool]:
        """The open window as plain group entries of a mid-window ``state_dict``."""
        return {
            "accum_microbatches": self.microbatches,
            "accum_weight": float(self.weight),
            "accum_weighted": self.weighted,
            "accum_scale_sum": self.scale_sum,
            "accum_scaled": self.scaled,
        }

    def take_group_entries(self, group: dict[str, Any]) -> None:
        """Move a saved window from ``group`` (mutated) into this one."""
        self.microbatches = self.restored = int(group.pop("accum_microbatches"))
        self.weight = float(group.pop("accum_weight"))
        self.weighted = bool(group.pop("accum_weighted"))
        self.scale_sum = float(group.pop("accum_scale_sum"))
        self.scaled = int(group.pop("accum_scaled"))
