"""The buffers as ``p.main_grad``, for layers that add their weight gradients themselves.

The protocol of Megatron-Core (core/tensor_parallel/layers.py, core/distributed) and TransformerEngine: a layer's
backward does ``p.main_grad += dY^T X``. It then returns no gradient for p; or, where p has the attribute
``grad_added_to_main_grad``, sets that and returns a dummy, uninitialized but for ``p.zero_out_wgrad`` (a weight that
another layer uses too: zeros then).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn.parameter import is_lazy

from .entry import never_compiled
from .in_backward import InBackward
from .slots import ALL, Slot, current_task_id, trains

if TYPE_CHECKING:
    from .buckets import Bucket
    from .runtime import Runtime


OURS = "_fused_accum"  # attribute of our main_grads: one from a pickle, where hooks are not, is nobody's any more


class MainGrad(InBackward):
    """An InBackward whose buffers are written by others too, at any time in a backward: they must be clean then."""

    def __init__(self, run: Runtime) -> None:
        super().__init__(run)
        self.guards: list[Any] = []
        self.detached = weakref.finalize(run, _detach, self.slots, self.guards)
        self.detached.atexit = False
        self.watch(None)

    def cover(self, params: Iterable[Tensor]) -> None:
        params = list(params)
        for p in params:
            self._refuse(p)
        super().cover(params)
        for bucket in self.run().built():
            bucket.allocate([i for i, p in enumerate(bucket.params) if bucket.accums[i] is None and trains(p)])
            for row, (p, accum) in enumerate(zip(bucket.params, bucket.accums)):
                if accum is not None and not _lies_at(p, accum):
                    self._clear(bucket, row)
                    p.main_grad = accum.data
                    setattr(p.main_grad, OURS, True)
                    self.guards.append(p.register_hook(self._guard(self.slots[id(p)])))

    def _refuse(self, p: Tensor) -> None:
        bucket, row = self.run().find(p)
        existing, accum = getattr(p, "main_grad", None), bucket.accums[row]
        free = existing is None or hasattr(existing, OURS)
        if not free and (accum is None or not _lies_at(p, accum)):
            raise RuntimeError(
                f"parameter {bucket.name_of(p)} has a main_grad that is not this optimizer's (of Megatron's "
                "DistributedDataParallel?); one owner only: del p.main_grad first"
            )
        if is_lazy(p):
            raise RuntimeError(
                f"parameter {bucket.name_of(p)} of a lazy layer has no shape yet, which its main_grad must have; run "
                "the model's forward once before attach_main_grad()"
            )
        if not p.is_contiguous():
            raise RuntimeError(
                f"parameter {bucket.name_of(p)} is not contiguous, which its main_grad must be; make it so with "
                "p.data = p.data.contiguous() first"
            )

    def _guard(self, slot: Slot) -> Callable[[Tensor | None], None]:
        """Runs before autograd adds: a dummy must not be added to the buffer that p.grad is."""
        session = self

        @never_compiled
        def guard(_: Tensor | None) -> None:
            p = slot.param()
            if session.stepping is not None:
                return
            bucket, row = session.run().find(p)
            if slot.window == session.window and not (session.holds(slot) and bucket.is_buffer(row, p.grad)):
                raise RuntimeError(
                    f"p.grad of parameter {session.run().name_of(p)} was cleared or replaced, which its main_grad, "
                    "added to by its layer, does not know; discard with optimizer.zero_grad()"
                )
            if _added(p) and not getattr(p, "zero_out_wgrad", False):
                p.grad = None

        return guard

    def watch(self, ready: Callable[[Slot, Tensor], None] | None) -> None:
        super().watch(ready)
        self.tasks.pulse.watch = ALL  # what layers have added is not seen in p.grad

    def hook(self, slot: Slot, p: Tensor) -> None:
        run = self.run()
        if run is None or getattr(p, "main_grad", None) is None:
            return
        if current_task_id() != self.tasks.pulse.task:
            self.tasks.touch()
        bucket, row = run.find(p)
        if _added(p):
            p.grad_added_to_main_grad = False
            if not getattr(p, "zero_out_wgrad", False):
                p.grad = None
        g = p.grad
        if self.stepping is not None:
            bucket.present[row] = 1  # whoever added to it
            self.stepping.update(slot, p)
            return
        if g is not None and not bucket.is_buffer(row, g):
            self.add(slot, bucket, row)
        elif g is None:
            self.expose(slot, bucket, row, again=True)
        if self.ready is not None:
            self.ready(slot, p)

    def add(self, slot: Slot, bucket: Bucket, row: int) -> None:
        """An ordinary gradient, on top of what layers may have added in this backward."""
        p = bucket.params[row]
        self.check(bucket, row)
        bucket.accums[row].add_(p.grad)
        self.expose(slot, bucket, row)

    def stepped(self) -> None:
        self._clear_all()
        super().stepped()

    def discarded(self) -> None:
        self._clear_all()
        self.window += 1  # main_grad is empty: what p.grad was is of no interest
        super().discarded()

    def remove(self) -> None:
        _detach(self.slots, self.guards)
        super().remove()

    def end_removed(self) -> None:
        super().end_removed()
        run = self.run()
        if run is not None and run.backward is not self:
            self.detached.detach()

    def _clear_all(self) -> None:
        """What was discarded rather than stepped: layers add to what is there."""
        for bucket in self.run().built():
            for row, p in enumerate(bucket.params):
                if bucket.accums[row] is not None and (p.grad is None or not bucket.is_buffer(row, p.grad)):
                    self._clear(bucket, row)

    @staticmethod
    def _clear(bucket: Bucket, row: int) -> None:
        if bucket.stale[row]:
            bucket.accums[row].zero_()
            bucket.stale[row] = 0


def _lies_at(p: Tensor, accum: Tensor) -> bool:
    """Whether the buffer is p.main_grad."""
    main_grad = getattr(p, "main_grad", None)
    return main_grad is not None and main_grad.data_ptr() == accum.data_ptr()


def _detach(slots: dict[int, Slot], guards: list[Any]) -> None:
    """Take what belongs to this mode from the parameters."""
    for guard in guards:
        guard.remove()
    guards.clear()
    for slot in slots.values():
        p = slot.param()
        if hasattr(getattr(p, "main_grad", None), OURS):
            del p.main_grad


def _added(p: Tensor) -> bool:
    return getattr(p, "grad_added_to_main_grad", False)
