"""What a backward mode knows of one parameter, and how its hook gets on and off it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .in_backward import InBackward


class Slot:
    """What is known of one parameter. Holds neither the parameter nor its buffer.

    ptr: where the buffer is, as far as the last hook knows (-1: nowhere yet).
    view: weak reference to the tensor that p.grad was set to.
    window: number of the window in which it was set.
    backward: how many backwards had finished when it was set.
    version: of that tensor after the last addition, while weights are recorded.
    contributions: additions to the buffer, in this window, of a parameter that gets them directly.
    """

    __slots__ = (
        "__weakref__", "backward", "contributions", "grad_dtype", "handle",
        "param", "ptr", "version", "view", "window",
    )  # fmt: skip

    def __init__(self, p: Tensor) -> None:
        self.param = weakref.ref(p)
        self.ptr = self.window = self.backward = -1
        self.version = self.contributions = 0
        self.view: Callable[[], Tensor | None] = lambda: None
        self.grad_dtype: torch.dtype | None = None  # what to restore, if it was changed
        self.handle: torch.utils.hooks.RemovableHandle | None = None


class RequiringGrad:
    """torch registers hooks only on what requires grad; a frozen parameter may be unfrozen later."""

    def __init__(self, p: Tensor) -> None:
        self.p, self.frozen = p, not p.requires_grad

    def __enter__(self) -> None:
        if self.frozen:
            self.p.requires_grad_(True)

    def __exit__(self, *_: object) -> None:
        if self.frozen:
            self.p.requires_grad_(False)


def trains(p: Tensor) -> bool:
    return p.requires_grad and p.device.type != "meta"


def accept_any_dtype(slot: Slot, p: Tensor) -> None:
    """Let p.grad have the buffer's dtype; None adds gradients of p's dtype to it without a cast copy."""
    if slot.grad_dtype is None:
        slot.grad_dtype = p.grad_dtype
    p.grad_dtype = None


def refuse_second_owner(name: str, p: Tensor, session: InBackward) -> None:
    for hook in (getattr(p, "_post_accumulate_grad_hooks", None) or {}).values():
        owner = getattr(hook, "owner", None)
        if owner is not None and owner() not in (None, session) and owner().run() is not None:
            raise RuntimeError(
                f"parameter {name} is already accumulated in backward by another FusedAccumAdamW; one p.grad can be "
                "the buffer of one optimizer only: remove() the other's handle first, or give each its own parameters"
            )


def remove_hooks(slots: dict[int, Slot]) -> None:
    for slot in slots.values():
        if slot.handle is not None:
            slot.handle.remove()
            slot.handle = None
