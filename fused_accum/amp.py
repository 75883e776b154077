"""What can be seen of a torch.amp.GradScaler: who it is, whether it has unscaled gradients in mid-window, and whether
what it skipped is still there.

Its unscale_() tells nobody, and leaves the version counters of what it writes as they are. But its step() asks the
optimizer whether that supports scaling: there it is noted, and from then on, the second window, it can be asked.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from .optimizer import FusedAccumAdamW
    from .runtime import Runtime

MIXED = (
    "GradScaler.unscale_() was called between two backwards of one window: p.grad holds an unscaled sum, to which "
    "this backward would add gradients that are scaled; call unscale_() once, after the window's last backward. "
    "zero_grad() and scaler.update() drop the window"
)
LEFT = (
    "GradScaler skipped the last step, and what it skipped is still in p.grad, with its inf or NaN. Every backward "
    "adds to it, so that every later step is skipped too; call zero_grad() after scaler.update()"
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


def left_from_skipped_step(optimizer: FusedAccumAdamW) -> str | None:
    """What to warn of when a scaler's step asks, and it has skipped the one before (``step`` and ``zero_grad`` forget
    that it asked): that the gradients of then are still there. Reads them in this case alone."""
    run = optimizer._run
    grads = (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    first = next(grads, None)
    before, run.asked_with = run.asked_with, None if first is None else weakref.ref(first)
    if before is None or first is None or before() is not first:
        return None
    finite = all(g.isfinite().all() for g in (first, *grads))
    return None if finite else run.window.once("left", LEFT)


class ScalerSupport:
    """Part of FusedAccumAdamW."""

    _run: Runtime

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Makes torch.amp.GradScaler call ``step`` itself with ``grad_scale`` and ``found_inf`` set: where it was
        asked for (fused=True), while explicit micro-batches are pending, so that ``step`` can refuse, and while
        weights are recorded in backward, when p.grad must not be edited; and after step_in_backward(), to refuse."""
        run = self._run
        if asking := Scaler.asking(sys._getframe(1)):
            run.scaler = asking
            if message := left_from_skipped_step(self):
                warnings.warn(message, UserWarning, stacklevel=3)
        explicit = run.backward is None and run.window.microbatches > 0
        weighted = run.backward is not None and run.window.weighted
        return run.amp_requested or explicit or weighted or run.stepped_in_backward

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        self._run.amp_requested = bool(value)
