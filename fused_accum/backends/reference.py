"""The equations in plain torch, in order: the meaning of every other backend, and the road for any device.

Equation numbers are those of the README. (3) to (5) are Loshchilov & Hutter, arXiv 1711.05101, in the form of
torch.optim.AdamW: eps outside the square root, decay on the weight before its update.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from . import rounding
from .base import Backend, Rows


def accumulate_one(accum: Tensor | None, grad: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """(1) The sum after one more micro-batch, rounded to the buffer's ``dtype``; ``accum`` None: the first."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    contribution = grad.to(wide) * scale
    return (contribution if accum is None else accum.to(wide) + contribution).to(dtype)


def adamw_one(rows: Rows, i: int) -> None:
    """(2) to (6) for row ``i`` of ``rows``, in place."""
    p, m, v, v_max = rows.params[i], rows.exp_avgs[i], rows.exp_avg_sqs[i], rows.max_exp_avg_sqs[i]
    hyper = rows.hypers[rows.groups[i]]
    lr = float(hyper.lr)
    wide = torch.float64 if p.dtype == torch.float64 else torch.float32

    total = rows.accums[i] if rows.present[i] else None
    if rows.grads[i] is not None:
        total = accumulate_one(total, rows.grads[i], rows.scale, rows.accum_dtypes[i])

    rows.steps[i].add_(1)
    t = float(rows.steps[i])
    bias_correction1 = 1 - hyper.beta1**t
    bias_correction2 = 1 - hyper.beta2**t

    clip = None if rows.factors is None else rows.factors.clip
    grad = total.to(wide) * (rows.coefficient if clip is None else rows.coefficient * clip)  # (2)
    if hyper.maximize:
        grad = -grad
    kept = rounding.kept(rows, i)
    weight = kept.load().to(wide) * (1 - lr * hyper.weight_decay)  # (3)
    exp_avg = torch.lerp(m.to(wide), grad, 1 - hyper.beta1)  # (4)
    exp_avg_sq = torch.addcmul(v.to(wide) * hyper.beta2, grad, grad, value=1 - hyper.beta2)
    largest = exp_avg_sq
    if hyper.amsgrad:
        largest = torch.maximum(v_max.to(wide), exp_avg_sq)
        v_max.copy_(largest)
    denom = largest.sqrt() / math.sqrt(bias_correction2) + hyper.eps
    kept.store(weight - lr / bias_correction1 * (exp_avg / denom), int(t))  # (5)
    m.copy_(exp_avg)
    v.copy_(exp_avg_sq)
    if rows.present[i]:
        rows.accums[i].zero_()  # (6)


class Reference(Backend):
    name = "reference"

    def why_not(self, device: torch.device) -> str | None:
        return None

    @torch.no_grad()
    def accumulate(
        self, accums: Sequence[Tensor], grads: Sequence[Tensor], first: Sequence[bool], scale: float
    ) -> None:
        for accum, grad, is_first in zip(accums, grads, first):
            accum.copy_(accumulate_one(None if is_first else accum, grad, scale, accum.dtype))

    @torch.no_grad()
    def adamw(self, rows: Rows) -> None:
        for i in range(len(rows.params)):
            adamw_one(rows, i)


BACKEND = Reference()
