"""Accumulation by backward itself: p.grad is the authority, and the parameter's buffer is its storage.

After the first micro-batch ``p.grad`` is the buffer under another name, so that autograd adds into it and whatever
clips, unscales, logs or clears gradients works on what the step will use. A hook that finds any other gradient in
its place, a fresh one or one that somebody put there, moves it into the buffer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from . import checks, streams
from .entry import never_compiled
from .graph_tasks import GraphTasks
from .slots import (
    Slot,
    abandon,
    accept_any_dtype,
    address,
    current_task_id,
    install,
    may_train,
    refuse_second_owner,
    remove_hook,
    trains,
    uninstall,
)  # fmt: skip
from .state import PARAMETER_DTYPES
from .window_in_grad import WindowInGrad

if TYPE_CHECKING:
    from .buckets import Bucket
    from .runtime import Runtime
    from .step_in_backward import StepInBackward


class InBackward(WindowInGrad):
    """The hooks of one optimizer. Neither they nor this object hold a parameter or a buffer: no leak.

    ready: called with (slot, parameter) after every hook, when set. stepping: while inside step_in_backward(), which
    finishing ends. installed: False once removed in mid-window, until the window ends: p.grad stays the authority
    for it.
    """

    def __init__(self, run: Runtime) -> None:
        self.run = weakref.ref(run)
        self.tasks = GraphTasks(self._touched, self._finished)
        self.slots: dict[int, Slot] = {}
        self.window = self.backwards = 0
        self.spoiled: Exception | None = None  # why the window cannot be stepped
        self.edited: str | None = None  # the parameter whose undivided p.grad was changed
        self.installed = True
        self.leftover = self.aside = False
        self.books = object()
        self.handed_out: weakref.ref | None = None
        self.ready: Callable[[Slot, Tensor], None] | None = None
        self.stepping: StepInBackward | None = None
        self.finishing = False
        self.direct: list[Slot] = []  # of parameters that get their gradients directly
        self.direct_backwards = 0  # how many backwards of this window had such gradients
        self.check_direct = False
        self.forsaken = weakref.finalize(run, abandon, self.slots)
        self.forsaken.atexit = False

    # -- hooks ----------------------------------------------------------------------------------------------

    def cover(self, params: Iterable[Tensor]) -> None:
        """Install hooks on exactly these parameters. Raises for one that another optimizer's hooks own."""
        members = {id(p): p for p in params}
        for key, slot in list(self.slots.items()):
            if key not in members or slot.param() is not members[key]:
                uninstall(self.slots.pop(key))
        run = self.run()
        bare = [p for key, p in members.items() if key not in self.slots or self.slots[key].handle is None]
        bare = [p for p in bare if may_train(p)]
        for p in bare:
            refuse_second_owner(run.name_of(p), p, self)
        for p in bare:
            slot = self.slots.setdefault(id(p), Slot(p, self))
            install(slot, p)
            if p.dtype != run.options.accum_dtype_for(p) and p.grad is None:
                accept_any_dtype(slot, p)

    def hook(self, slot: Slot, p: Tensor) -> None:
        """What the parameter's hook does, where it does not see at once that p.grad is the buffer, added to."""
        if current_task_id() != self.tasks.pulse.task:
            self.tasks.touch()
        g = p.grad
        if g is not None and address(g) != slot.ptr:
            self.adopt(slot, p)
        if self.stepping is not None:
            self.stepping.update(slot, p)
        elif self.ready is not None:
            self.ready(slot, p)

    def remove(self) -> None:
        """Take all hooks out. A window that p.grad holds can still be stepped."""
        self.installed = False
        for slot in self.slots.values():
            remove_hook(slot)
        self.end_removed()

    def end_removed(self) -> None:
        """Once the window of removed hooks is over: put back what the parameters had."""
        run = self.run()
        if run is None or self.installed or any(p.grad is not None for p in self.params()):
            return
        if run.backward is self:
            run.window.clear()
        self.withdraw()

    def withdraw(self) -> None:
        """Be gone; a window that is open is the buffers' alone."""
        self.installed = False
        for slot in self.slots.values():
            uninstall(slot)
        self.slots.clear()
        self.forsaken.detach()
        run = self.run()
        if run.backward is self:
            run.backward = None

    # -- the buffer as p.grad -------------------------------------------------------------------------------

    def adopt(self, slot: Slot, p: Tensor) -> None:
        """Move the gradient that autograd left in p.grad into the buffer, and the buffer into p.grad."""
        run = self.run()
        if run is None or self.stepping is not None:
            return
        self.move(slot, *run.find(p))

    def move(self, slot: Slot, bucket: Bucket, row: int) -> None:
        p, run = bucket.params[row], self.run()
        g = p.grad
        self.check(bucket, row)
        if run.window.weighted and slot.window == self.window and g._version > 0:
            self.edited = run.name_of(p)  # something was put there, and added to since: not a new gradient
        with torch.no_grad():
            buffer = self.buffer(slot, bucket, row)
            if g.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr():  # a view of what is written to
                g = g.clone()
            buffer.copy_(g)
            self.expose(slot, bucket, row)

    @staticmethod
    def check(bucket: Bucket, row: int) -> None:
        """Raise, by name, for a p.grad that cannot be added to a buffer."""
        p = bucket.params[row]
        checks.check_parameter(bucket.name_of(p), p)
        checks.check_gradient(bucket.name_of(p), p, p.grad)

    def acquire(self, slot: Slot, p: Tensor, node: Node) -> tuple[Tensor, bool]:
        """The buffer for something to be added to it in this backward, and whether it is the first contribution: the
        buffer is then to be overwritten, and ``expose`` to be called. node: autograd's, that accumulates p's."""
        if current_task_id() != self.tasks.pulse.task:
            self.tasks.touch()
        slot.stream = streams.after(slot.stream, p.device)
        if slot.stream is not None:
            self._before(node, slot, p.device)
        bucket, row = self.run().find(p)
        g = p.grad
        if g is not None and self.ready is not None and g._version != slot.version:
            self.edited = self.run().name_of(p)
        if g is not None and (g.data_ptr() != slot.ptr or g.numel()) and not bucket.is_buffer(row, g):
            self.move(slot, bucket, row)
        elif g is None and self.stepping is not None and bucket.present[row]:  # the earlier micro-batches
            return bucket.accums[row], False
        elif g is None:
            return self.buffer(slot, bucket, row), True
        return bucket.accums[row], False

    def _before(self, node: Node, slot: Slot, device: torch.device) -> None:
        """Order what other uses of the parameter have autograd add to p.grad, once per backward and on a stream that
        need not be this one, after what is added here."""
        task = self.tasks.running[current_task_id()]
        if slot in task.ordered:
            return
        task.ordered.add(slot)

        @never_compiled
        def wait(_: Any) -> None:
            handle.remove()
            slot.stream = streams.after(slot.stream, device)

        handle = node.register_prehook(wait)

    def added(self, slot: Slot, p: Tensor) -> None:
        """After ``acquire`` and the addition: p.grad is the buffer."""
        task = self.tasks.running[current_task_id()]
        task.direct = True
        if slot.stream is not None:
            task.streams.add(slot.stream)
        slot.contributions += 1
        if p.grad is None:
            self.expose(slot, *self.run().find(p))
            slot.contributions = 1

    def clear(self, p: Tensor) -> None:
        """Make a buffer that is to be overwritten read zero, if it does not."""
        bucket, row = self.run().find(p)
        if bucket.stale[row]:
            bucket.accums[row].zero_()

    def buffer(self, slot: Slot, bucket: Bucket, row: int) -> Tensor:
        """The parameter's buffer, to be written from scratch; a new one while somebody still holds the contents
        of the old one (as ``g = p.grad; p.grad = None``), or after a cast."""
        p, accum = bucket.params[row], bucket.accums[row]
        if accum is not None:
            held = slot.view() if slot.window == self.window else None
            cast = accum.shape != p.shape or PARAMETER_DTYPES[bucket.dtypes[row]] != p.dtype
            if cast or (held is not None and held is not p.grad):
                bucket.accums[row] = None
                bucket.allocate([row])
        else:  # all at once: they then lie in few slabs
            bucket.allocate([i for i, q in enumerate(bucket.params) if bucket.accums[i] is None and trains(q)])
        return bucket.accums[row]

    def expose(self, slot: Slot, bucket: Bucket, row: int, again: bool = False) -> None:
        """Set p.grad to the buffer, which now holds the window's sum; ``again`` where we took it out ourselves."""
        p = bucket.params[row]
        view = bucket.accums[row].data  # with a version counter of its own
        if slot.window == self.window and not again:  # set in this window before: somebody discarded or replaced it
            self.tasks.touch().replaced = True
        if view.dtype != p.dtype and p.grad_dtype is not None:
            p.grad = None
            accept_any_dtype(slot, p)
        p.grad = view
        bucket.stale[row] = 1
        slot.ptr, slot.view = view.data_ptr(), weakref.ref(view)
        slot.window, slot.version = self.window, view._version
        slot.backward = self.backwards

    def publish(self) -> None:
        """Hand a window that the buffers hold (restored from a checkpoint) over to p.grad."""
        run = self.run()
        for bucket in run.built():
            for row, present in enumerate(bucket.present):
                slot = self.slots.get(id(bucket.params[row]))
                if present and slot is not None:
                    slot.window = -1
                    self.expose(slot, bucket, row)
                    bucket.present[row] = 0


class Handle:
    """What ``accumulate_in_backward`` returns: ``remove()`` takes the hooks out; so does leaving ``with`` it."""

    def __init__(self, session: InBackward) -> None:
        self._session = session

    def remove(self) -> None:
        """Take the hooks out; p.grad, where it holds an open window, is still stepped. Harmless a second time."""
        self._session.remove()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()
