"""Backward passes whose gradients are known exactly, and failing ones."""

from collections.abc import Iterable

import torch
from harness import values
from oracle import Micro, Oracle
from torch import Tensor


class Failure(Exception):
    pass


class Failing(torch.autograd.Function):
    """The identity, whose backward raises ``error``."""

    @staticmethod
    def forward(ctx, x, error):
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        raise ctx.error


def loss_with(params: Iterable[Tensor], grads: Iterable[Tensor | None], fail_at: int | None = None, error=None):
    """A loss whose gradients are ``grads`` bit for bit; its backward raises before parameter ``fail_at``'s."""
    loss = 0.0
    # Backward runs what was built last first: parameters get their gradients in the order given.
    pairs = [(i, p, g) for i, (p, g) in enumerate(zip(params, grads)) if g is not None]
    for i, p, g in reversed(pairs):
        x = (p * g.to(p.dtype)).sum(dtype=torch.float64 if p.dtype == torch.float64 else None)
        if i == fail_at:
            x = Failing.apply(x, error or Failure("half way"))
        loss = loss + x
    return loss


def gradients(params, count: int, absent=()) -> list[Micro]:
    """``count`` micro-batches of random gradients; ``absent`` holds (micro-batch, parameter) without one."""
    return [
        Micro([None if (k, i) in absent else values(p.shape, p.dtype, p.device) for i, p in enumerate(params)])
        for k in range(count)
    ]


def run_backwards(params, micros: list[Micro]) -> None:
    for micro in micros:
        loss_with(params, micro.grads).backward()


def is_alias(opt, p: Tensor) -> bool:
    """Whether p.grad is the parameter's buffer."""
    accum = opt._run.export()[id(p)].buffer
    return p.grad is not None and p.grad.data_ptr() == accum.data_ptr() and p.grad.dtype == accum.dtype


def buffers_read_zero(opt) -> bool:
    return all(not accum.buffer.any() for accum in opt._run.export().values())


def window(opt, params, oracle: Oracle, count: int = 3, absent=()) -> None:
    """One whole window while accumulating in backward, checked against the oracle."""
    micros = gradients(params, count, absent)
    run_backwards(params, micros)
    oracle.window(micros)
    opt.step()
    oracle.check()
    assert all(p.grad is None for p in params)
    assert buffers_read_zero(opt)
    assert opt.pending == (0, 0.0)
