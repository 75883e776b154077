"""What can be seen of a torch.amp.GradScaler that unscales p.grad between two backwards of one window."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

MIXED = (
    "GradScaler.unscale_() was called between two backwards of one window: p.grad holds an unscaled sum, to which "
    "this backward adds gradients that are scaled; call unscale_() once, after the window's last backward. "
    "zero_grad() drops the window"
)


class Versions(NamedTuple):
    """Two of a window's p.grad, and their versions when a backward had finished."""

    seen: tuple[tuple[weakref.ref, int], ...] = ()

    @classmethod
    def of(cls, gradients: Iterable[Tensor]) -> Versions:
        return cls(tuple((weakref.ref(g), g._version) for g in islice(gradients, 2)))

    def changed(self) -> bool:
        """Whether they were changed since, by more than the one addition that a first hook comes after."""
        kept = [(ref(), version) for ref, version in self.seen]
        return sum(g._version - version for g, version in kept if g is not None) > 1


def unscaled(opt: Optimizer | None) -> bool:
    """Whether a scaler has unscaled the gradients of ``opt``, and no step has followed.

    The optimizer is not told, and the scaler is not ours to know: all objects are looked through, which takes tens of
    milliseconds, so ask only where p.grad has been changed.
    """
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.amp.GradScaler):  # isinstance would ask lazy modules for their class
            state = thing._per_optimizer_states.get(id(opt))
            if state is not None and state["stage"].name == "UNSCALED":
                return True
    return False
