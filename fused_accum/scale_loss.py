"""Scales and token weights where backward accumulates: factors of the loss, recorded by its backward."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from .entry import never_compiled
from .graph_tasks import roots

if TYPE_CHECKING:
    from .in_backward import InBackward


class Mark:
    """books: of the window, if any, in which the weight of a loss has been counted. Holds nothing of its graph."""

    books: object = None


class ScaleLoss(torch.autograd.Function):
    """``factor * loss``, whose backward tells the session what it is weighted with, first of all its nodes."""

    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, session: weakref.ref, scale: float | Tensor, weight: float | Tensor | None
    ) -> Tensor:
        ctx.session, ctx.scale, ctx.weight, ctx.mark = session, scale, weight, Mark()
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
        if ctx.weight is not None:
            _refuse_sum(ctx, session)
        session.record(ctx.scale, ctx.weight, ctx.mark)
        # Of a factor of 0 no gradient at all goes down, so that none can turn 0 into NaN.
        nothing = grad is None or (not isinstance(ctx.factor, Tensor) and ctx.factor == 0)
        return (None if nothing else times(grad, ctx.factor)), None, None, None


def _refuse_sum(node: Any, session: InBackward) -> None:
    """Raise RuntimeError where this backward is of a sum in which another term is not multiplied with a weight, but
    would be divided by the weights. (Seen where the backward was called in this thread: on the CPU.)"""
    starts = [root.node if isinstance(root, GradientEdge) else root.grad_fn for root in roots()]
    if starts == [node]:
        return
    terms, others = list(starts), []
    while terms:
        term = terms.pop()
        if isinstance(term, ScaleLoss._backward_cls):
            continue
        inputs = [edge for edge, _ in term.next_functions if edge is not None]
        if term.name() in SUMS or (term.name() in PRODUCTS and len(inputs) == 1):
            terms += inputs
        else:
            others.append(term)
    if any(_adds_unscaled(term, session) for term in others):
        raise RuntimeError(
            "backward of a sum of a loss that scale_loss(weight=...) returned and one without: all of the window is "
            "divided by the sum of weights, but that other term was not multiplied; add the losses first: "
            "scale_loss(a + b, weight=...). zero_grad() drops the window"
        )


SUMS = ("AddBackward0", "SubBackward0")
PRODUCTS = ("MulBackward0", "DivBackward0")


def _adds_unscaled(term: Node, session: InBackward) -> bool:
    """Whether the graph reaches a parameter of the optimizer, and no scaled loss."""
    nodes, seen, reaches = [term], {term}, False
    while nodes:
        node = nodes.pop()
        if isinstance(node, ScaleLoss._backward_cls):
            return False
        reaches = reaches or id(getattr(node, "variable", None)) in session.slots
        found = {edge for edge, _ in node.next_functions if edge is not None} - seen
        seen |= found
        nodes += found
    return reaches


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
