"""Scales and token weights where backward accumulates: factors of the loss, recorded by its backward."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .entry import never_compiled

if TYPE_CHECKING:
    from .in_backward import InBackward


class ScaleLoss(torch.autograd.Function):
    """``factor * loss``, whose backward tells the session what it is weighted with, first of all its nodes."""

    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, session: weakref.ref, scale: float | Tensor, weight: float | Tensor | None
    ) -> Tensor:
        ctx.session, ctx.scale, ctx.weight = session, scale, weight
        ctx.factor = scale if weight is None else scale * weight
        ctx.set_materialize_grads(False)
        return times(loss, ctx.factor)

    @staticmethod
    @never_compiled
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        session: InBackward | None = ctx.session()
        if session is None or not session.installed:
            raise RuntimeError(
                "backward of a scale_loss() whose handle was removed in between (or whose optimizer is gone): nobody "
                "records its factor; repeat the forward, and call backward before remove()"
            )
        session.record(ctx.scale, ctx.weight)
        # Of a factor of 0 no gradient at all goes down, so that none can turn 0 into NaN.
        nothing = grad is None or (not isinstance(ctx.factor, Tensor) and ctx.factor == 0)
        return (None if nothing else times(grad, ctx.factor)), None, None, None


def times(x: Tensor, factor: float | Tensor) -> Tensor:
    """In the dtype of x, whatever the dtype of the factor."""
    return x * (factor.to(x.dtype) if isinstance(factor, Tensor) else factor)


def scale_loss(
    session: InBackward, loss: Tensor, scale: float | Tensor, weight: float | Tensor | None
) -> Tensor:
    """``scale * weight * loss``; see ``FusedAccumAdamW.scale_loss``."""
    inner = loss.grad_fn
    if weight is not None and isinstance(inner, ScaleLoss._backward_cls) and inner.weight is not None:
        raise ValueError(
            f"scale_loss(weight={weight}) of a loss that scale_loss() has returned: it has a weight already, and "
            "would be multiplied with both, but divided by their sum; scale each loss once"
        )
    session.expect(weight)
    scaled = ScaleLoss.apply(loss, weakref.ref(session), scale, weight)
    session.handed_out = weakref.ref(scaled)
    return scaled
