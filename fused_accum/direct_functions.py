"""The functions that covered layers run: their backward adds the weight's gradient into the buffer.

No gradient is returned for the weight then. Its hook still fires, once all of its uses in the backward are done, as
for any other.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .direct_ops import add_row_sum, linear
from .entry import never_compiled

if TYPE_CHECKING:
    from .direct_wgrad import Link
    from .in_backward import InBackward


def _wanted(ctx: Any, input: int, p: Tensor, session: InBackward) -> bool:
    """Whether this backward is to add to the gradient of the given input, the parameter p."""
    if not ctx.needs_input_grad[input]:
        return False
    try:
        wanted = torch._C._will_engine_execute_node(ctx.next_functions[input][0])
    except RuntimeError as error:
        raise RuntimeError(
            f"torch.autograd.grad() with respect to parameter {session.run().name_of(p)}: its gradient goes straight "
            "into the optimizer's buffer (direct_wgrad) and is never a tensor; remove() the handle first, or use "
            "backward()"
        ) from error
    if wanted and torch.is_grad_enabled():
        raise RuntimeError(
            f"a backward with create_graph=True reached parameter {session.run().name_of(p)}, whose gradient goes "
            "straight into the optimizer's buffer (direct_wgrad) and has no graph; remove() the handle before double "
            "backward"
        )
    return wanted


class _Direct(torch.autograd.Function):
    """Base: ``ctx.link`` and the slots of the parameters."""

    @staticmethod
    def session(ctx: Any) -> InBackward:
        session = ctx.link.session()
        if session is None or session.run() is None or not session.installed:
            raise RuntimeError(
                "the optimizer or its direct_wgrad() handle is gone, but this backward is of a forward made before; "
                "repeat the forward"
            )
        return session


class DirectLinear(_Direct):
    """y = x W^T + b, or x W + b where ``transposed`` (Conv1D). x (..., in), W (out, in) or (in, out), b (out)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        link: Link,
        transposed: bool,
        dtype: torch.dtype | None,
    ) -> Tensor:
        ctx.link, ctx.transposed = link, transposed
        ctx.parameters = weakref.ref(weight), None if bias is None else weakref.ref(bias)
        ctx.set_materialize_grads(False)
        used = weight if dtype is None else weight.to(dtype)
        ctx.save_for_backward(x, used)
        offset = bias if bias is None or dtype is None else bias.to(dtype)
        return linear(x, used.t() if transposed else used, offset)

    @staticmethod
    @never_compiled
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:
        if g is None:
            return (None,) * 6
        session = _Direct.session(ctx)
        x, used = ctx.saved_tensors
        dx = db = None
        if ctx.needs_input_grad[0]:
            dx = g.matmul(used.t() if ctx.transposed else used)
        tokens_out = g.reshape(-1, g.shape[-1])
        weight, bias = (p and p() for p in ctx.parameters)
        if ctx.needs_input_grad[1] and _wanted(ctx, 1, weight, session):
            tokens_in = x.reshape(-1, x.shape[-1])
            slot = session.slots[id(weight)]
            pair = (tokens_in, tokens_out) if ctx.transposed else (tokens_out, tokens_in)
            buffer, first = session.acquire(slot, weight, ctx.next_functions[1][0])
            session.run().find(weight)[0].backend.add_product(buffer, *pair, first)
            session.added(slot, weight)
        if ctx.needs_input_grad[2]:
            slot = session.slots.get(id(bias))
            if slot is None:
                db = tokens_out.sum(0).to(bias.dtype)
            elif _wanted(ctx, 2, bias, session):
                buffer, first = session.acquire(slot, bias, ctx.next_functions[2][0])
                add_row_sum(buffer, tokens_out, first)
                session.added(slot, bias)
        return dx, None, db, None, None, None


class DirectEmbedding(_Direct):
    """Rows of ``weight`` (rows, width) by ``index`` (any shape, integer)."""

    @staticmethod
    def forward(ctx: Any, index: Tensor, weight: Tensor, padding: int | None, link: Link) -> Tensor:
        ctx.link, ctx.padding, ctx.parameter = link, padding, weakref.ref(weight)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(index)
        return F.embedding(index, weight, padding)

    @staticmethod
    @never_compiled
    def backward(ctx: Any, g: Tensor | None) -> tuple[None, ...]:
        if g is None:
            return (None,) * 4
        session, weight = _Direct.session(ctx), ctx.parameter()
        if _wanted(ctx, 1, weight, session):
            (index,) = ctx.saved_tensors
            slot = session.slots[id(weight)]
            buffer, first = session.acquire(slot, weight, ctx.next_functions[1][0])
            if first:
                session.clear(weight)
            backend = session.run().find(weight)[0].backend
            backend.scatter_rows(buffer, index.reshape(-1).long(), g.reshape(-1, g.shape[-1]), ctx.padding)
            session.added(slot, weight)
        return (None,) * 4
