"""What can be seen of a torch.amp.GradScaler: who it is, and whether it has unscaled gradients in mid-window.

Its unscale_() tells nobody, and leaves the version counters of what it writes as they are. But its step() asks the
optimizer whether that supports scaling: there it is noted, and from then on, the second window, it can be asked.
"""

from __future__ import annotations

import weakref
from types import FrameType
from typing import NamedTuple

import torch

MIXED = (
    "GradScaler.unscale_() was called between two backwards of one window: p.grad holds an unscaled sum, to which "
    "this backward would add gradients that are scaled; call unscale_() once, after the window's last backward. "
    "zero_grad() and scaler.update() drop the window"
)


class Scaler(NamedTuple):
    """A scaler, and what it knows our optimizer by."""

    scaler: weakref.ref
    key: int

    @classmethod
    def asking(cls, frame: FrameType) -> Scaler | None:
        """The one whose ``step`` runs in ``frame``; None: none does."""
        if frame.f_code is not torch.amp.GradScaler.step.__code__:
            return None
        names = frame.f_locals
        return cls(weakref.ref(names["self"]), id(names["optimizer"]))

    def has_unscaled(self) -> bool:
        """Whether it has unscaled the optimizer's gradients, and no step has followed."""
        scaler = self.scaler()
        state = None if scaler is None else scaler._per_optimizer_states.get(self.key)
        return state is not None and state["stage"].name == "UNSCALED"
