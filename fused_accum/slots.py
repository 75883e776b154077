"""What a backward mode knows of one parameter, and how its hook gets on and off it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from . import _native
from .entry import never_compiled

if TYPE_CHECKING:
    from .in_backward import InBackward

current_task_id = torch._C._current_graph_task_id  # of autograd's graph task: -1 outside a backward


NO_TASK = -2
NOTHING, VERSIONS, ALL = range(3)  # Watch of csrc/hook.h


class PlainPulse:
    """Pulse of csrc/hook.h, where there is no native code."""

    __slots__ = ("entering", "task", "watch")

    def __init__(self) -> None:
        self.task = self.entering = NO_TASK
        self.watch = NOTHING


class PlainHook:
    """Hook of csrc/hook.h, where there is no native code."""

    __slots__ = ("ptr", "pulse", "version")
    slow: Callable[[Tensor], None]

    def __init__(self, pulse: PlainPulse) -> None:
        self.pulse, self.ptr, self.version = pulse, -1, 0

    @never_compiled
    def __call__(self, p: Tensor) -> None:
        pulse = self.pulse
        if current_task_id() != pulse.task or pulse.watch == ALL:
            return self.enter(p)
        g = p.grad
        if g is None:
            return None
        try:  # as address(): a call costs as much as all else here
            at = g.data_ptr()
        except RuntimeError:
            at = None
        if at != self.ptr:
            return self.enter(p)
        if pulse.watch == VERSIONS:
            version = g._version
            if version > self.version + 1:
                return self.enter(p)
            self.version = version
        return None

    @never_compiled
    def enter(self, p: Tensor) -> None:
        if self.pulse.entering == NO_TASK:
            self.pulse.entering = current_task_id()
        self.slow(p)


_C, _ = _native.load()
Pulse, Hook = (PlainPulse, PlainHook) if _C is None else _C.hook_types(current_task_id)


def address(g: Tensor) -> int | None:
    """Where a gradient lies; None for one without a storage (sparse)."""
    try:
        return g.data_ptr()
    except RuntimeError:
        return None


class Slot(Hook):
    """What is known of one parameter, and its hook. Holds neither the parameter nor its buffer, nor its session.

    ptr: where the buffer is, as far as the last hook knows (-1: nowhere yet).
    owner: weak reference to the session.
    view: weak reference to the tensor that p.grad was set to.
    window: number of the window in which it was set.
    backward: how many backwards had finished when it was set.
    version: of that tensor after the last addition, while weights are recorded.
    stream: of a device, that something was added to the buffer on directly.
    contributions: additions to the buffer, in this window, of a parameter that gets them directly.
    """

    __slots__ = (
        "__weakref__", "backward", "contributions", "grad_dtype", "handle", "owner",
        "param", "stream", "view", "window",
    )  # fmt: skip

    def __init__(self, p: Tensor, session: InBackward) -> None:
        super().__init__(session.tasks.pulse)
        self.param, self.owner = weakref.ref(p), weakref.ref(session)
        self.window = self.backward = -1
        self.contributions = 0
        self.stream: Any = None
        self.view: Callable[[], Tensor | None] = lambda: None
        self.grad_dtype: torch.dtype | None = None  # what to restore, if it was changed
        self.handle: torch.utils.hooks.RemovableHandle | None = None

    @never_compiled
    def slow(self, p: Tensor) -> None:
        """Called as the parameter's hook, where there may be something to do."""
        session = self.owner()
        if session is not None:
            session.hook(self, p)
        if self.pulse.entering == current_task_id():
            self.pulse.entering = NO_TASK


def may_train(p: Tensor) -> bool:
    """Whether p requires grad or can be unfrozen: integers (a quantized base) and inference tensors cannot."""
    with torch._C.DisableTorchFunctionSubclass():  # of an uninitialized parameter too
        return p.requires_grad or ((p.is_floating_point() or p.is_complex()) and not p.is_inference())


def install(slot: Slot, p: Tensor) -> None:
    """Register the slot as p's hook. torch does so only for what requires grad, and is asked for the hooks of an
    uninitialized parameter (of a lazy layer) by way of the base class; they stay when that gets its shape."""
    frozen = not p.requires_grad
    with torch._C.DisableTorchFunctionSubclass():
        if frozen:
            p.requires_grad_(True)
        slot.handle = p.register_post_accumulate_grad_hook(slot)
        if frozen:
            p.requires_grad_(False)


def trains(p: Tensor) -> bool:
    return p.requires_grad and p.device.type != "meta" and not is_lazy(p)


def accept_any_dtype(slot: Slot, p: Tensor) -> None:
    """Let p.grad have the buffer's dtype; None adds gradients of p's dtype to it without a cast copy."""
    if slot.grad_dtype is None:
        slot.grad_dtype = p.grad_dtype
    p.grad_dtype = None


def refuse_second_owner(name: str, p: Tensor, session: InBackward) -> None:
    if not _has_other_owner(p, session):
        return
    gc.collect()  # a scheduler and its optimizer hold each other, so that one nobody has any more may still live
    if _has_other_owner(p, session):
        raise RuntimeError(
            f"parameter {name} is already accumulated in backward by another FusedAccumAdamW; one p.grad can be the "
            "buffer of one optimizer only: remove() the other's handle first, or give each its own parameters"
        )


def _has_other_owner(p: Tensor, session: InBackward) -> bool:
    hooks = (getattr(p, "_post_accumulate_grad_hooks", None) or {}).values()
    owners = [hook.owner() for hook in hooks if isinstance(hook, Slot)]
    return any(owner not in (None, session) and owner.run() is not None for owner in owners)


def remove_hook(slot: Slot) -> None:
    if slot.handle is not None:
        slot.handle.remove()
        slot.handle = None


def uninstall(slot: Slot) -> None:
    """Give the parameter back as it was, but for a p.grad that is there."""
    remove_hook(slot)
    p = slot.param()
    if p is not None and slot.grad_dtype is not None and (p.grad is None or p.grad.dtype == slot.grad_dtype):
        p.grad_dtype = slot.grad_dtype


def abandon(slots: dict[int, Slot]) -> None:
    """What is left to do when an optimizer is gone: a p.grad becomes one that others can use."""
    with torch.inference_mode(False), torch.no_grad():
        for slot in slots.values():
            p = slot.param()
            if p is not None and p.grad is not None and p.grad.dtype != p.dtype and slot.grad_dtype is not None:
                p.grad = p.grad.to(p.dtype)
            uninstall(slot)
