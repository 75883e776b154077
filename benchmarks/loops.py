"""How one micro-batch becomes a gradient, and the last one of a window an update: one small function per way.

These are the lines to copy into a training loop. ``loss`` is the mean over the micro-batch's tokens; micro-batches
hold different numbers of tokens and the last window of an epoch fewer micro-batches, and each way makes the update
that one batch over all tokens of the window would make.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.batches import MicroBatch
from fused_accum import FusedAccumAdamW


def explicit(optimizer: FusedAccumAdamW, loss: torch.Tensor, batch: MicroBatch) -> None:
    """FusedAccumAdamW, told of every micro-batch; the step adds the last one and divides by the window's tokens."""
    loss.backward()
    if batch.ends_window:
        optimizer.step(weight=batch.tokens)
    else:
        optimizer.accumulate(weight=batch.tokens)


def torch_adamw(optimizer: torch.optim.AdamW, loss: torch.Tensor, batch: MicroBatch) -> None:
    """torch.optim.AdamW, its sum of gradients weighted by hand: the window's tokens must be known beforehand."""
    (loss * (batch.tokens / batch.window_tokens)).backward()
    if batch.ends_window:
        optimizer.step()
        optimizer.zero_grad()


def in_backward(optimizer: FusedAccumAdamW, loss: torch.Tensor, batch: MicroBatch) -> None:
    """FusedAccumAdamW after accumulate_in_backward() or direct_wgrad(): backward itself accumulates."""
    optimizer.scale_loss(loss, weight=batch.tokens).backward()
    if batch.ends_window:
        optimizer.step()


def step_in_backward(optimizer: FusedAccumAdamW, loss: torch.Tensor, batch: MicroBatch) -> None:
    """The same, with the update inside the window's last backward."""
    loss = optimizer.scale_loss(loss, weight=batch.tokens)
    if batch.ends_window:
        with optimizer.step_in_backward():
            loss.backward()
    else:
        loss.backward()


def begin(mode: str, optimizer: FusedAccumAdamW, model: torch.nn.Module) -> Any:
    """What ``mode`` needs before the first micro-batch; keep what it returns as long as it is to last."""
    if mode == "in-backward":
        return optimizer.accumulate_in_backward()
    if mode in ("direct", "step-in-backward"):
        return optimizer.direct_wgrad(model)
    return None


MODES = {
    "explicit": explicit,
    "in-backward": in_backward,
    "direct": in_backward,
    "step-in-backward": step_in_backward,
}


def gradient_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all gradients and accumulation buffers that are alive."""
    held = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if isinstance(optimizer, FusedAccumAdamW):
        held += [accum.buffer for accum in optimizer._run.export().values()]
    return sum(x.nbytes for x in {x.data_ptr(): x for x in held}.values())
