"""The launch table: what one call of a backend's update works on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .norms import Factors
from .state import MASTER, PLAIN, SPLIT, STOCHASTIC, Hyper


@dataclass
class Rows:
    """A launch table: entry i of every list belongs to one parameter. ``None`` where it has no such tensor.

    Attributes:
        params, exp_avgs, exp_avg_sqs, max_exp_avg_sqs: mutated in place; any strides, same shape per row.
        grads: the last micro-batch's gradients, still to be added; never written.
        accums: the buffers; those of rows in ``present`` hold the earlier micro-batches, and read zero afterwards.
        present: whether the buffer holds a contribution of this window.
        accum_dtypes: dtype the window's sum is rounded to, also where no buffer exists.
        steps: 0-dim tensors, incremented by one; on the device where the backend decides there, else on the CPU.
        groups: index into ``hypers``.
        scale: multiplies ``grads`` before they are added (``s`` of the design's equations); a 0-dim float64 on the
            device, where 0 adds nothing, for backends that decide there.
        coefficient: multiplies the window's sum (``c``).
        factors: more of it, on the device; of backends whose tensors are not on the CPU. ``skip`` is for those that
            decide there.
        masters: mutated; float32 masters of 16-bit parameters, or as int16 the half of the master that the parameter
            lacks. Empty: none has one.
        rounding_seed: where given, 16-bit parameters are rounded up or down by chance.
        indices: of each parameter in the optimizer, for stochastic rounding.
        counts: for backends that decide on the device: how many contributions each buffer in ``present`` holds,
            float64 there; 0 is none. None: one at least.
    """

    params: Sequence[Tensor]
    grads: Sequence[Tensor | None]
    accums: Sequence[Tensor | None]
    present: Sequence[int]
    accum_dtypes: Sequence[torch.dtype]
    exp_avgs: Sequence[Tensor]
    exp_avg_sqs: Sequence[Tensor]
    max_exp_avg_sqs: Sequence[Tensor | None]
    steps: Sequence[Tensor]
    groups: Sequence[int]
    hypers: Sequence[Hyper]
    scale: float | Tensor
    coefficient: float
    factors: Factors | None = None
    masters: Sequence[Tensor | None] = ()
    rounding_seed: int | None = None
    indices: Sequence[int] = ()
    counts: Tensor | None = None

    @property
    def weights(self) -> int:
        """What 16-bit parameters keep beside them: one kind in a table."""
        masters = [t for t in self.masters if t is not None]
        if masters:
            return SPLIT if masters[0].dtype == torch.int16 else MASTER
        return PLAIN if self.rounding_seed is None else STOCHASTIC

    def written(self) -> list[Tensor]:
        """Every tensor that an update of these rows writes."""
        buffers = [a for a, present in zip(self.accums, self.present) if present]
        maxima = [t for t in self.max_exp_avg_sqs if t is not None]
        masters = [t for t in self.masters if t is not None]
        return [*self.params, *self.exp_avgs, *self.exp_avg_sqs, *maxima, *self.steps, *buffers, *masters]
