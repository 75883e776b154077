"""The books of a window that p.grad holds: when it is whole, when it is gone, and what its weights are worth."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from . import checks, streams
from .amp import MIXED
from .entry import in_compiled_autograd
from .graph_tasks import GraphTasks, Task
from .slots import ALL, NOTHING, VERSIONS, Slot

if TYPE_CHECKING:
    from .runtime import Runtime
    from .scale_loss import Mark
    from .step_in_backward import StepInBackward

UNFINISHED = (
    "a backward pass before this call did not finish (an exception, out of memory, an interrupt), so that p.grad "
    "holds part of a micro-batch; call zero_grad() to drop the window, then repeat its micro-batches"
)


class WindowInGrad:
    """Part of InBackward, which makes the attributes.

    window: number of the open window. backwards: how many have finished. spoiled: why the window cannot be stepped.
    edited: the parameter whose undivided p.grad was changed. direct: slots of parameters that get their gradients
    directly; direct_backwards: how many backwards of this window had such. leftover: some p.grad may be from before
    the hooks. handed_out: what scale_loss returned last, if its backward has not come. aside: a loss with a weight
    went backward, but not into p.grad. books: of the open window, another object for each.
    """

    run: Callable[[], Runtime | None]
    tasks: GraphTasks
    slots: dict[int, Slot]
    direct: list[Slot]
    stepping: StepInBackward | None
    ready: Callable[[Slot, Tensor], None] | None
    spoiled: Exception | None
    edited: str | None
    window: int
    backwards: int
    direct_backwards: int
    check_direct: bool
    finishing: bool
    installed: bool
    handed_out: weakref.ref | None
    leftover: bool
    aside: bool
    books: object

    def end_removed(self) -> None:
        raise NotImplementedError

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

    def watch(self, ready: Callable[[Slot, Tensor], None] | None) -> None:
        """Have ``ready`` called after every hook from now on; None: only ``stepping``, if that."""
        self.ready = ready
        self.tasks.pulse.watch = ALL if self.stepping is not None else VERSIONS if ready is not None else NOTHING

    def close(self) -> None:
        """The window's books start again; p.grad is left alone."""
        self.run().window.clear()
        self.spoiled = self.edited = None
        self.leftover = self.aside = False
        self.books = object()
        self.watch(None)
        self.direct_backwards = 0

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
        self.refuse_wrong_counts()
        self._refuse_aside()
        if self.run().window.weighted:
            self.audit()
            if self.edited is not None:
                raise RuntimeError(
                    f"p.grad of parameter {self.edited} was changed after its backward, while scale_loss() has "
                    "recorded weights: it holds the sum not yet divided by them, which step() does, so that clipping "
                    "or scaling it acts on another gradient than meant; clip inside the step with max_grad_norm, or "
                    "leave the weights out and divide the loss yourself. (DistributedDataParallel changes it so when "
                    "it averages after no_sync(): docs/distributed.md.) zero_grad() drops the window"
                    if self.installed
                    else f"a backward, or something else, changed p.grad of parameter {self.edited} after the handle "
                    "was removed, in a window with weights: no hook saw with which. End a window with step() before "
                    "remove(); zero_grad() drops this one"
                )

    def refuse_wrong_counts(self) -> None:
        """The self-check of direct_wgrad: every backward adds the same number of times to a parameter."""
        count = self.direct_backwards
        for slot in self.direct if self.check_direct and count else ():
            if slot.window == self.window and slot.contributions % count:
                raise RuntimeError(
                    f"parameter {self.run().name_of(slot.param())} got {slot.contributions} direct contributions in "
                    f"{count} backwards, which is not the same number in each; zero_grad() drops the window"
                )

    # -- weights ----------------------------------------------------------------------------------------------

    def expect(self, weight: float | Tensor | None) -> None:
        """A loss is being given a weight, or none: raises ValueError where the open window has it otherwise."""
        self.settle()
        window = self.run().window
        window.refuse_mixing(weight)
        if weight is not None:
            if self.leftover:
                self._refuse_leftover()
            if window.weighted:
                self.audit()
            self.watch(self._note_version)

    def _refuse_leftover(self) -> None:
        """Raise RuntimeError where a p.grad that no hook has seen would be divided by weights."""
        for slot in self.slots.values():
            p = slot.param()
            if p is not None and p.grad is not None and not self.holds(slot) and (p.grad.is_sparse or p.grad.any()):
                raise RuntimeError(
                    f"p.grad of parameter {self.run().name_of(p)} is from before hooks were installed: it has no "
                    "weight, and would be divided by those of this window; call step() or zero_grad() first, or put "
                    "its backward, with scale_loss(loss, weight=...), after them"
                )
        self.leftover = False

    def _refuse_aside(self) -> None:
        """Raise RuntimeError where p.grad is most likely what torch.autograd.grad gave of a loss with a weight."""
        if self.aside and not self.run().window.microbatches and (held := self.sums()):
            raise RuntimeError(
                f"p.grad of parameter {self.run().name_of(held[0][0])} was put there, but the only backward of a "
                "scale_loss(weight=...) in this window left nothing in p.grad (torch.autograd.grad?): its weight, "
                "which its gradients are multiplied by, is not recorded. Give torch.autograd.grad the loss itself, "
                "without scale_loss(), or call backward(); zero_grad() drops the window"
            )

    def record(self, scale: float | Tensor, weight: float | Tensor | None, mark: Mark) -> None:
        """The running backward is that of a scaled loss; it counts once it has finished, and the loss once only,
        however many backwards it has (of parts, with ``inputs=``)."""
        self.refuse_compiled_autograd()
        self.handed_out = None
        task = self.tasks.enter()
        if weight is None:
            task.scale = scale
            return
        if mark.books is self.books:
            weight = 0.0
        task.marks.append(mark)
        task.weight = weight if task.weight is None else task.weight + weight

    def _warn_of_dropped(self) -> None:
        """After the backward of a loss without a factor: warn where one that scale_loss returned is gone, unused."""
        dropped = self.handed_out is not None and self.handed_out() is None
        message = "the loss that scale_loss() returned was dropped, and one without its factor went backward"
        if dropped and (message := self.run().window.once("dropped", message)):
            warnings.warn(f"{message}: optimizer.scale_loss(loss, ...).backward()", UserWarning, stacklevel=2)

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
            if p is not None and p.grad is not None and p.grad.numel():  # nothing lies anywhere of an empty one
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
        checks.refuse_fake_mode("backward")
        self.refuse_compiled_autograd()
        run.stepped_in_backward = False
        if len(self.tasks.running) > 1 and self.tasks.concurrent(task):
            raise RuntimeError(
                "two backward passes at once, in different threads, while accumulating in backward: torch does not "
                "lock what its hooks do, and gradients would be lost; run one backward at a time (a lock around it), "
                "or call accumulate() after them, without accumulate_in_backward(). zero_grad() drops the window"
            )
        if self.tasks.left_entering(task.id):  # what it left in p.grad looks like what this backward puts there
            raise RuntimeError(UNFINISHED)
        if len(self.tasks.running) > 1 and self.tasks.unfinished():
            # Discarded in between, if all that is there now was put there by this backward.
            if any(self.holds(slot) for slot in self.slots.values()):
                raise RuntimeError(UNFINISHED)
            self.tasks.forget_failures()
            self.close()
        if run.window.microbatches and run.scaler is not None and run.scaler.has_unscaled():
            raise RuntimeError(MIXED)

    @staticmethod
    def refuse_compiled_autograd() -> None:
        if in_compiled_autograd():
            raise RuntimeError(
                "a backward within compiled autograd (torch._dynamo.config.compiled_autograd) while accumulating in "
                "backward: it does not say when it has finished, so that no micro-batch could be counted. Switch it "
                "off (torch.compile of the model works without), or use explicit mode, accumulate() after every "
                "backward. zero_grad() drops the window"
            )

    def holds(self, slot: Slot) -> bool:
        """Whether p.grad still is what a hook of this window set it to."""
        p = slot.param()
        return slot.window == self.window and p is not None and p.grad is not None and p.grad is slot.view()

    def _finished(self, task: Task) -> None:
        streams.after_all(task.streams)  # the caller's are the current ones here
        run = self.run()
        if run is None:
            return
        if not task.touched:
            self.aside = self.aside or isinstance(task.weight, Tensor) or task.weight != 0
            return
        replaced = task.replaced and self.stepping is None and self.edited is None
        if replaced and not any(slot.backward != self.backwards and self.holds(slot) for slot in self.slots.values()):
            self.close()  # nothing of the earlier micro-batches is left
        self.backwards += 1
        self.direct_backwards += task.direct
        window = run.window
        if window.microbatches and window.weighted != (task.weight is not None):
            try:
                window.refuse_mixing(task.weight)
            except ValueError as error:
                self.spoiled = error
                raise
        if task.weight is not None:
            window.add(1.0, task.weight)
            for mark in task.marks:
                mark.books = self.books
        elif task.scale is not None:
            window.add(task.scale, None)
        else:
            window.count()
            self._warn_of_dropped()
