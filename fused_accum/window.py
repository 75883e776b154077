"""The books of one window: how many micro-batches it holds, and what their sum must be divided by."""

from __future__ import annotations

import copy
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .skipping import Count


class Pending(NamedTuple):
    """What the open window holds: micro-batches with a gradient, and the sum of their weights."""

    microbatches: int
    weight: float


def host_number(name: str, value: Any) -> float:
    """``value`` (a number or a 0-dim tensor) as a float; raises unless it is finite and not negative."""
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


def on_device(value: Any) -> bool:
    """Whether ``value`` is a tensor on a GPU, which reading it here would wait for."""
    return isinstance(value, Tensor) and value.device.type == "cuda"


def number(name: str, value: Any) -> float | Tensor:
    """As ``host_number``; but what a GPU holds stays there, as float64, and is not looked at."""
    if on_device(value) and value.dim() == 0:
        return value.detach().to(torch.float64, copy=True)
    return host_number(name, value)


class Window:
    """Counts and sums of the open window, in float64 on the host; ``weight`` where its micro-batches' were.

    began_state: the optimizer had no state before it.
    """

    def __init__(self) -> None:
        self.rejections = Count()  # by skip_nonfinite="microbatch", in this window and before
        self.previous_scale_sum: float | None = None
        self.warned_scale_sum = False
        self.clear()

    def clear(self) -> None:
        self.microbatches = 0
        self.weighted = False
        self.weight: float | Tensor = 0.0
        self.scale_sum = 0.0
        self.scaled = 0
        self.began_state = False
        self.rejected_before = self.rejections

    def emptied(self) -> Window:
        """A copy that remembers earlier windows only."""
        other = copy.copy(self)
        other.clear()
        return other

    @property
    def pending(self) -> Pending:
        return Pending(self.microbatches, float(self.weight))

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

    def add(self, scale: float | Tensor, weight: float | Tensor | None) -> None:
        """Count one micro-batch; call ``refuse_mixing`` first."""
        self.microbatches += 1
        if weight is not None:
            self.weighted = True
            self.weight = self.weight + weight
        elif not isinstance(scale, Tensor):  # else the host does not know how the sums compare
            self.scale_sum += scale
            self.scaled += 1

    def count(self) -> None:
        """Count one micro-batch that came with its scale already in its gradient."""
        self.microbatches += 1

    def total_weight(self, weight: float | Tensor | None) -> float | Tensor | None:
        """The window's sum of weights with one more micro-batch of ``weight``; None without weights."""
        if weight is None and not self.weighted:
            return None
        return self.weight if weight is None else self.weight + weight

    def close(self) -> str | None:
        """End the window; returns what to warn of: that all of it was rejected, or (once) that its scales add up to
        another sum than before."""
        message = None
        rejected = self.rejections.known - self.rejected_before.known
        if rejected and not self.microbatches:
            message = (
                f"skip_nonfinite='microbatch' rejected all {rejected} micro-batch(es) of this window, whose "
                "gradients have an inf or a NaN: there is nothing to average, so no parameter was updated and the "
                "window is closed; nonfinite_parameter names the first of them"
            )
        if self.scaled and self.scaled == self.microbatches:
            previous, now = self.previous_scale_sum, self.scale_sum
            differs = previous is not None and not math.isclose(previous, now, rel_tol=1e-6)
            if differs and not self.warned_scale_sum:
                self.warned_scale_sum = True
                message = (
                    f"the scales of this window's {self.microbatches} micro-batch(es) add up to {now:g}, those "
                    f"of the window before to {previous:g}: a short window (the tail of an epoch?) gets an "
                    "update of another size. Pass weight= (the micro-batch's token count for a mean loss) to "
                    "accumulate() and step(): the step then divides by the window's own sum of weights"
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
        self.microbatches = int(group.pop("accum_microbatches", 0))
        self.weight = float(group.pop("accum_weight", 0.0))
        self.weighted = bool(group.pop("accum_weighted", False))
        self.scale_sum = float(group.pop("accum_scale_sum", 0.0))
        self.scaled = int(group.pop("accum_scaled", 0 if self.weighted else self.microbatches))
