"""Accumulation by backward itself: p.grad is the authority, and the parameter's buffer is its storage.

After the first micro-batch ``p.grad`` is the buffer under another name, so that autograd adds into it and whatever
clips, unscales, logs or clears gradients works on what the step will use. A hook that finds any other gradient in
its place, a fresh one or one that somebody put there, moves it into the buffer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import checks
from .graph_tasks import GraphTasks, Task, current_task_id
from .state import PARAMETER_DTYPES

if TYPE_CHECKING:
    from .buckets import Bucket
    from .runtime import Runtime
    from .step_in_backward import StepInBackward

UNFINISHED = (
    "a backward pass before this call did not finish (an exception, out of memory, an interrupt), so that p.grad holds "
    "part of a micro-batch; call zero_grad() to drop the window, then repeat its micro-batches"
)


class Slot:
    """What is known of one parameter. Holds neither the parameter nor its buffer.

    ptr: where the buffer is, as far as the last hook knows (-1: nowhere yet).
    view: weak reference to the tensor that p.grad was set to.
    window: number of the window in which it was set.
    backward: how many backwards had finished when it was set.
    version: of that tensor after the last addition, while weights are recorded.
    """

    __slots__ = ("__weakref__", "backward", "grad_dtype", "handle", "param", "ptr", "version", "view", "window")

    def __init__(self, p: Tensor) -> None:
        self.param = weakref.ref(p)
        self.ptr = self.window = self.backward = -1
        self.version = 0
        self.view: Callable[[], Tensor | None] = lambda: None
        self.grad_dtype: torch.dtype | None = None  # what to restore, if it was changed
        self.handle: torch.utils.hooks.RemovableHandle | None = None


class InBackward:
    """The hooks of one optimizer. Hooks hold this object, and it holds no parameter: no cycle, no leak.

    ready: called with (slot, parameter) after every hook, when set. stepping: while inside step_in_backward(), which
    finishing ends. installed: False once removed in mid-window,
    until the window ends: p.grad stays the authority for it.
    """

    def __init__(self, run: Runtime) -> None:
        self.run = weakref.ref(run)
        self.tasks = GraphTasks(self._touched, self._finished)
        self.slots: dict[int, Slot] = {}
        self.window = self.backwards = 0
        self.spoiled: Exception | None = None  # why the window cannot be stepped
        self.edited: str | None = None  # the parameter whose undivided p.grad was changed
        self.installed = True
        self.ready: Callable[[Slot, Tensor], None] | None = None
        self.stepping: StepInBackward | None = None
        self.finishing = False
        weakref.finalize(run, _remove_hooks, self.slots).atexit = False

    # -- hooks ----------------------------------------------------------------------------------------------

    def cover(self, params: Iterable[Tensor]) -> None:
        """Install hooks on exactly these parameters. Raises for one that another optimizer's hooks own."""
        members = {id(p): p for p in params}
        for key, slot in list(self.slots.items()):
            if key not in members or slot.param() is not members[key]:
                self._uncover(self.slots.pop(key))
        run = self.run()
        bare = [p for key, p in members.items() if key not in self.slots or self.slots[key].handle is None]
        for p in bare:
            _refuse_second_owner(run.name_of(p), p, self)
        for p in bare:
            slot = self.slots.setdefault(id(p), Slot(p))
            hook = self._hook(slot)
            hook.owner = weakref.ref(self)
            with _requiring_grad(p):
                slot.handle = p.register_post_accumulate_grad_hook(hook)
            if p.dtype != run.options.accum_dtype_for(p) and p.grad is None:
                _accept_any_dtype(slot, p)

    def _hook(self, slot: Slot) -> Callable[[Tensor], None]:
        tasks, session = self.tasks, self

        def hook(p: Tensor) -> None:
            if current_task_id() != tasks.current:
                tasks.touch()
            g = p.grad
            if g is not None:
                try:
                    at = g.data_ptr()
                except RuntimeError:  # no storage (sparse): refused there, by name
                    at = None
                if at != slot.ptr:
                    session.adopt(slot, p)
            if session.stepping is not None:
                session.stepping.update(slot, p)
            elif session.ready is not None:
                session.ready(slot, p)

        return hook

    def remove(self) -> None:
        """Take all hooks out. A window that p.grad holds can still be stepped."""
        self.installed = False
        _remove_hooks(self.slots)
        self.end_removed()

    def end_removed(self) -> None:
        """Once the window of removed hooks is over: put back what the parameters had."""
        run = self.run()
        if self.installed or any(p.grad is not None for p in self.params()):
            return
        for slot in self.slots.values():
            self._uncover(slot)
        self.slots.clear()
        if run.backward is self:
            run.backward = None
            run.window.clear()

    def _uncover(self, slot: Slot) -> None:
        _remove_hooks({0: slot})
        p = slot.param()
        if p is not None and slot.grad_dtype is not None and (p.grad is None or p.grad.dtype == slot.grad_dtype):
            p.grad_dtype = slot.grad_dtype

    # -- the buffer as p.grad -------------------------------------------------------------------------------

    def adopt(self, slot: Slot, p: Tensor) -> None:
        """Move the gradient that autograd left in p.grad into the buffer, and the buffer into p.grad."""
        run = self.run()
        if run is None or self.stepping is not None:
            return
        g = p.grad
        bucket, row = run.find(p)
        checks.check_parameter(run.name_of(p), p)
        checks.check_gradient(run.name_of(p), p, g)
        if run.window.weighted and slot.window == self.window and g._version > 0:
            self.edited = run.name_of(p)  # something was put there, and added to since: not a new gradient
        with torch.no_grad():
            buffer = self.buffer(slot, bucket, row)
            buffer.copy_(g)
            self.expose(slot, bucket, row)

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
            bucket.allocate([i for i, q in enumerate(bucket.params) if bucket.accums[i] is None and _trains(q)])
        return bucket.accums[row]

    def expose(self, slot: Slot, bucket: Bucket, row: int) -> None:
        """Set p.grad to the buffer, which now holds the window's sum."""
        p = bucket.params[row]
        view = bucket.accums[row].data  # with a version counter of its own
        if slot.window == self.window:  # it had been set in this window already: somebody discarded or replaced it
            self.tasks.touch().replaced = True
        if view.dtype != p.dtype and p.grad_dtype is not None:
            p.grad = None
            _accept_any_dtype(slot, p)
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

    # -- the window -----------------------------------------------------------------------------------------

    def params(self) -> Iterator[Tensor]:
        for bucket in self.run().built():
            yield from bucket.params

    def sums(self) -> list[tuple[Tensor, Tensor]]:
        """(parameter, gradient) of every parameter with a contribution: what a step would use."""
        return [(p, p.grad) for p in self.params() if p.grad is not None]

    def settle(self) -> None:
        """When nothing is left of the window, because all p.grad were set to None, close its books."""
        if self.stepping is not None or not self.run().window.microbatches:
            return
        if any(p.grad is not None for p in self.params()):
            return
        if any(slot.window == self.window for slot in self.slots.values()):  # else its weights are 0, and that counts
            self.close()

    def close(self) -> None:
        """The window's books start again; p.grad is left alone."""
        self.run().window.clear()
        self.spoiled = self.edited = None
        self.ready = None

    def discarded(self) -> None:
        """p.grad was cleared by the optimizer itself: whatever happened to it is over."""
        self.tasks.forget_failures()
        self.close()
        self.end_removed()

    def stepped(self) -> None:
        """The window was consumed: what p.grad was set to in it reads zero from now on."""
        self.window += 1
        self.close()
        self.end_removed()

    def refuse_step(self) -> None:
        """Raise RuntimeError unless p.grad holds whole micro-batches."""
        if self.finishing:
            return
        self.refuse_unfinished()
        self.settle()
        if self.run().window.weighted:
            self.audit()
            if self.edited is not None:
                raise RuntimeError(
                    f"p.grad of parameter {self.edited} was changed after its backward, while scale_loss() has recorded "
                    "weights: it holds the sum not yet divided by them, which step() does, so that clipping or scaling "
                    "it acts on another gradient than meant; clip inside the step with max_grad_norm, or leave the "
                    "weights out and divide the loss yourself. zero_grad() drops the window"
                )

    # -- weights ----------------------------------------------------------------------------------------------

    def expect(self, weight: float | None) -> None:
        """A loss is being given a weight, or none: raises ValueError where the open window has it otherwise."""
        self.settle()
        window = self.run().window
        window.refuse_mixing(weight)
        if weight is not None:
            if window.weighted:
                self.audit()
            self.ready = self._note_version

    def record(self, scale: float, weight: float | None) -> None:
        """The running backward is that of a scaled loss; it counts once it has finished."""
        task = self.tasks.enter()
        if weight is None:
            task.scale = scale
        else:
            task.weight = (task.weight or 0.0) + weight

    def _note_version(self, slot: Slot, p: Tensor) -> None:
        """After a hook, while weights are recorded: autograd's addition raises the version by one."""
        if p.grad is not None:
            version = p.grad._version
            if version > slot.version + 1:
                self.edited = self.run().name_of(p)
            slot.version = version

    def audit(self) -> None:
        """Note whether a p.grad has been changed since the last hook."""
        for slot in self.slots.values():
            p = slot.param()
            if p is not None and p.grad is not None:
                own = self.holds(slot) and p.grad.data_ptr() == slot.ptr and p.grad._version == slot.version
                if not own:
                    self.edited = self.run().name_of(p)

    def drop(self) -> None:
        """Set every p.grad of an open window to None."""
        if self.run().window.microbatches or self.tasks.unfinished():
            for p in self.params():
                p.grad = None
        self.discarded()

    def refuse_unfinished(self) -> None:
        """Raise RuntimeError while p.grad holds a part of a micro-batch."""
        if self.spoiled is not None:
            self.settle()
            if self.spoiled is not None:
                raise self.spoiled
        if not self.tasks.unfinished():
            return
        if any(p.grad is not None for p in self.params()):
            raise RuntimeError(UNFINISHED)
        self.tasks.forget_failures()
        self.close()

    def _touched(self, task: Task) -> None:
        """Before anything of a new backward is counted in."""
        run = self.run()
        if run is None:
            return
        run.refuse_half_applied("backward")
        run.stepped_in_backward = False
        if len(self.tasks.running) > 1 and self.tasks.unfinished():
            # Discarded in between, if all that is there now was put there by this backward.
            if any(self.holds(slot) for slot in self.slots.values()):
                raise RuntimeError(UNFINISHED)
            self.tasks.forget_failures()
            self.close()

    def holds(self, slot: Slot) -> bool:
        """Whether p.grad still is what a hook of this window set it to."""
        p = slot.param()
        return slot.window == self.window and p is not None and p.grad is not None and p.grad is slot.view()

    def _finished(self, task: Task) -> None:
        run = self.run()
        if run is None:
            return
        if self.stepping is None and task.replaced and self.edited is None and not any(slot.backward != self.backwards and self.holds(slot) for slot in self.slots.values()):
            self.close()  # nothing of the earlier micro-batches is left
        self.backwards += 1
        window = run.window
        if window.microbatches and window.weighted != (task.weight is not None):
            try:
                window.refuse_mixing(task.weight)
            except ValueError as error:
                self.spoiled = error
                raise
        if task.weight is not None:
            window.add(1.0, task.weight)
        elif task.scale is not None:
            window.add(task.scale, None)
        else:
            window.count()


class Handle:
    """What ``accumulate_in_backward`` returns: ``remove()`` takes the hooks out; so does leaving ``with`` it."""

    def __init__(self, session: InBackward) -> None:
        self._session = session

    def remove(self) -> None:
        """Take the hooks out; p.grad, where it holds an open window, is still stepped. Calling it again is harmless."""
        self._session.remove()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class _requiring_grad:
    """torch registers hooks only on what requires grad; a frozen parameter may be unfrozen later."""

    def __init__(self, p: Tensor) -> None:
        self.p, self.frozen = p, not p.requires_grad

    def __enter__(self) -> None:
        if self.frozen:
            self.p.requires_grad_(True)

    def __exit__(self, *_: object) -> None:
        if self.frozen:
            self.p.requires_grad_(False)


def _trains(p: Tensor) -> bool:
    return p.requires_grad and p.device.type != "meta"


def _accept_any_dtype(slot: Slot, p: Tensor) -> None:
    """Let p.grad have the buffer's dtype; None adds gradients of p's dtype to it without a cast copy."""
    if slot.grad_dtype is None:
        slot.grad_dtype = p.grad_dtype
    p.grad_dtype = None


def _refuse_second_owner(name: str, p: Tensor, session: InBackward) -> None:
    for hook in (getattr(p, "_post_accumulate_grad_hooks", None) or {}).values():
        owner = getattr(hook, "owner", None)
        if owner is not None and owner() not in (None, session) and owner().run() is not None:
            raise RuntimeError(
                f"parameter {name} is already accumulated in backward by another FusedAccumAdamW; one p.grad can be "
                "the buffer of one optimizer only: remove() the other's handle first, or give each its own parameters"
            )


def _remove_hooks(slots: dict[int, Slot]) -> None:
    for slot in slots.values():
        if slot.handle is not None:
            slot.handle.remove()
            slot.handle = None
