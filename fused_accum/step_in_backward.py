"""The update inside the last micro-batch's backward: each parameter as soon as its gradient is complete.

The sums of the earlier micro-batches leave p.grad for the time being, so that autograd hands over the last gradient
as it is, and one kernel adds it, updates, and zeroes the buffer: the last step of the explicit path, row by row.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from torch import Tensor

from . import streams
from .buffers import BY_GRAD
from .entry import one_graph_break
from .graph_tasks import Task
from .in_backward import InBackward, Slot
from .state import Hyper

if TYPE_CHECKING:
    from .buckets import Bucket
    from .optimizer import FusedAccumAdamW

REENTRANT = (
    "reentrant checkpointing runs a backward inside the backward, so that a parameter's gradient may not be complete "
    "when its hook runs; use checkpoint(..., use_reentrant=False), or step() after the backward"
)


class StepInBackward:
    """The context manager that ``FusedAccumAdamW.step_in_backward`` returns; good for one window."""

    def __init__(self, opt: FusedAccumAdamW) -> None:
        self.opt, self.run = opt, opt._run
        self.session: InBackward | None = None
        self.task: Task | None = None  # the backward that updates
        self.weight: float | Tensor | None = None  # of this micro-batch, when the first parameter was updated
        self.coefficient: float | None = None  # None: nothing to divide by, so no update
        self.done: set[int] = set()
        self.updated = False  # a parameter, if only in part
        self.taken: list[tuple[Bucket, int]] = []  # rows whose p.grad was the buffer

    @one_graph_break
    def __enter__(self) -> None:
        run = self.run
        with run.exclusive("step_in_backward") as _held:
            run.refuse_missing_hooks("step_in_backward")
            for name in ("max_grad_norm", "skip_nonfinite"):
                if (value := getattr(run.options, name)) is not None:
                    raise RuntimeError(
                        f"step_in_backward() with {name}={value!r}: that needs the whole gradient before any "
                        "parameter is updated, and here each is updated as soon as its own is complete; call step() "
                        f"after the backward, or construct the optimizer without {name}"
                    )
            installed = run.backward is not None
            if installed:
                run.backward.refuse_step()
                if run.backward.tasks.ever_nested:
                    raise RuntimeError(f"step_in_backward(): {REENTRANT}")
            hypers = Hyper.of_all(self.opt.param_groups)
            buckets, _ = run.collect(self.opt.param_groups, buffers=False)
            try:
                for bucket in buckets:
                    bucket.prepare(self.opt.state, self.opt.param_groups, hypers)
            finally:
                for bucket in buckets:
                    bucket.release()
            session = run.backward or run.start_backward(self.opt.param_groups, explicit=True)
            self.session, self.temporary = session, not installed
            try:
                session.stepping = self
                session.watch(None)
                for bucket in buckets:
                    bucket.hypers = hypers
                    self._take_from_grad(bucket)
            except BaseException:
                self._undo()
                raise

    def _take_from_grad(self, bucket: Bucket) -> None:
        for row, (p, present) in enumerate(zip(bucket.params, bucket.present)):
            if present == BY_GRAD:
                self.taken.append((bucket, row))
                bucket.present[row] = 1
                p.grad = None

    def _undo(self) -> None:
        """Nothing has been updated: the window is as before. (What of the last backward is in p.grad already, or was
        added directly, the session knows as unfinished.)"""
        session = self.session
        session.stepping = None
        session.watch(None)
        for bucket, row in self.taken:
            slot = session.slots[id(bucket.params[row])]
            session.expose(slot, bucket, row, again=True)
            bucket.present[row] = 0
        if self.temporary:
            session.withdraw()

    @one_graph_break
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is not None and not self.updated:
            self._undo()
            return
        self.session.stepping = None
        self.session.watch(None)
        if error is not None:
            self.run.half_applied = f"an exception inside step_in_backward() ({kind.__name__}: {error})"
        else:
            self.session.finishing = True
            try:
                self.opt.step()  # what had no gradient in the last micro-batch; the books; hooks and schedulers
            finally:
                self.session.finishing = False
            self.run.stepped_in_backward = True
        if self.temporary:
            self.session.remove()

    def update(self, slot: Slot, p: Tensor) -> None:
        """Called by the parameter's hook, when its gradient is complete."""
        task = self.session.tasks.enter()
        if task.nested:
            raise RuntimeError(f"step_in_backward(): {REENTRANT}")
        if self.task is None:
            self._begin(task)
        if task is not self.task or id(p) in self.done:
            raise RuntimeError(
                f"step_in_backward(): parameter {self.run.name_of(p)} got a gradient from a second backward; it "
                "holds one, that of the window's last micro-batch: put the others before it"
            )
        if task.weight is not self.weight:
            raise RuntimeError(
                "step_in_backward(): a second scale_loss() in this backward added weight after parameters had been "
                "updated; scale the sum of the losses once"
            )
        self.done.add(id(p))
        streams.after(slot.stream, p.device)
        bucket, row = self.run.find(p)
        if self.coefficient is not None and (p.grad is not None or bucket.present[row]):
            self.updated = True
            bucket.step_row(row, self.opt.state, self.opt.param_groups, self.coefficient)

    def _begin(self, task: Task) -> None:
        self.run.window.refuse_mixing(task.weight)
        self.task, self.weight = task, task.weight
        total = self.run.window.total_weight(task.weight)
        if total is None:
            self.coefficient = 1.0
        elif (total := float(total)) != 0:  # waits for a sum on a device, once: rows are launched with a number
            self.coefficient = 1.0 / total
