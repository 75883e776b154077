"""Which backward passes run, which have finished, and which never did.

A graph task is autograd's name for one running backward pass. The engine calls back when a task has finished; a task
that failed drops the callback uncalled, so that a weak reference to it tells the one from the other. A task nested in
another (reentrant checkpointing runs one per segment) is a part of its micro-batch: the outer task is followed too,
from the first node it runs after the one that nested.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, _engine_run_backward

from .entry import never_compiled
from .slots import NO_TASK, Pulse, current_task_id

_engine = torch.autograd.Variable._execution_engine


class _Finish:
    """What the engine calls; only the task holds it."""

    __slots__ = ("__weakref__", "id", "tasks")

    def __init__(self, tasks: GraphTasks, id: int) -> None:
        self.tasks, self.id = tasks, id

    @never_compiled
    def __call__(self) -> None:
        self.tasks._finish(self.id)


class Task:
    """One backward pass. touched: it has added to a gradient. replaced: it found a ``p.grad`` that was not where it
    had been put. direct: it has added to buffers directly, on these ``streams`` of devices; ``ordered``: slots of
    which autograd's own addition waits for that. scale, weight: what
    ``scale_loss`` gave it; ``marks``: of the losses that gave it weights. nested: it runs within another."""

    __slots__ = (
        "alive", "direct", "id", "marks", "nested", "ordered", "replaced", "scale", "streams", "touched", "weight",
    )  # fmt: skip

    def __init__(self, id: int, alive: weakref.ref, nested: bool) -> None:
        self.id, self.alive, self.nested = id, alive, nested
        self.touched = self.replaced = self.direct = False
        self.streams: set[Any] = set()
        self.ordered: set[Any] = set()
        self.scale: float | Tensor | None = None
        self.weight: float | Tensor | None = None
        self.marks: list[Any] = []


class GraphTasks:
    """The tasks that add to gradients of one optimizer.

    pulse: with the id of the task whose hook came last, so that a hook needs one comparison; and of the one whose
        hook was called and has not returned: all that is known of a backward interrupted before its first hook ran.
    on_touch: called with a task before its first addition is counted in; may raise.
    on_finish: called with an outermost task that has added to gradients, or has a weight, when it has finished; may
        raise.
    awaited: nested tasks whose outer task has not been heard of since.
    ever_nested: whether a task was ever seen inside another.
    """

    def __init__(self, on_touch: Callable[[Task], Any], on_finish: Callable[[Task], Any]) -> None:
        self.on_touch, self.on_finish = on_touch, on_finish
        self.pulse = Pulse()
        self.running: dict[int, Task] = {}
        self.awaited: set[Task] = set()
        self.ever_nested = False

    def enter(self) -> Task:
        """The task that is running here."""
        id = current_task_id()
        task = self.running.get(id)
        if task is None:
            outer = _outer_node()
            callback = _Finish(self, id)
            task = self.running[id] = Task(id, weakref.ref(callback), outer is not None)
            _engine.queue_callback(callback)
            if outer is not None:
                self.ever_nested = True
                self._await(outer, task)
        return task

    def touch(self) -> Task:
        """The running task, which now adds to gradients."""
        task = self.enter()
        if not task.touched:
            task.touched = True
            self.on_touch(task)
        self.pulse.task = task.id
        return task

    def unfinished(self) -> bool:
        """Whether a task has added to gradients and then failed. (A nested one is awaited in its outer backward.)"""
        return (
            any(task.touched and task.alive() is None for task in list(self.running.values()))
            or (bool(self.awaited) and current_task_id() == -1)
            or self.left_entering(current_task_id())
        )

    def left_entering(self, task: int) -> bool:
        """Whether a hook of another backward than ``task`` never returned."""
        return self.pulse.entering not in (NO_TASK, task)

    def concurrent(self, task: Task) -> bool:
        """Whether another backward runs, in another thread: neither within ``task`` nor around it."""
        others = [other for other in list(self.running.values()) if other is not task and not other.nested]
        return not task.nested and any(other.alive() is not None for other in others)

    def forget_failures(self) -> None:
        self.awaited.clear()
        self.pulse.entering = NO_TASK
        for id, task in list(self.running.items()):
            if task.alive() is None:
                del self.running[id]

    def _await(self, outer: Any, task: Task) -> None:
        """Follow the outer task as soon as it runs the next node."""
        self.awaited.add(task)
        handles: list[Any] = []

        @never_compiled
        def heard(*_: Any) -> None:
            for handle in handles:
                handle.remove()
            handles.clear()
            if task in self.awaited:
                self.awaited.remove(task)
                own = self.enter()
                own.touched = own.touched or task.touched
                own.replaced = own.replaced or task.replaced
                own.direct = own.direct or task.direct
                own.streams |= task.streams

        handles += [node.register_prehook(heard) for node, _ in outer.next_functions if node is not None]

    def _finish(self, id: int) -> None:
        task = self.running[id]
        self.pulse.task = NO_TASK
        try:
            if (task.touched or task.marks) and not task.nested:
                self.on_finish(task)
        except Exception:
            del self.running[id]
            raise
        del self.running[id]  # not after an interrupt: then the micro-batch may not have been counted


def roots() -> Sequence[Tensor | GradientEdge]:
    """What the backward that runs here was called on; empty where it was called in another thread (on a GPU)."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not _engine_run_backward.__code__:
        frame = frame.f_back
    return () if frame is None else frame.f_locals["t_outputs"]


def _outer_node() -> Any:
    """The node of an outer backward that runs the present one, or None."""
    frame, inside = sys._getframe(1), False
    while frame is not None:
        if frame.f_code is _engine_run_backward.__code__:
            inside = True
        elif inside and frame.f_code is BackwardCFunction.apply.__code__:
            return frame.f_locals["self"]
        frame = frame.f_back
    return None
