"""One call at a time on an optimizer, and a lock that an interrupted call cannot leave locked."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .runtime import Runtime

CHECKPOINTING = ("state_dict", "load_state_dict")


class Exclusive:
    """The context of ``Runtime.exclusive``; to be used as ``with run.exclusive(call) as _held``.

    No two calls at a time, and none that takes gradients from inside a backward. Hooks of ``state_dict`` and
    ``load_state_dict`` run within them and may call the optimizer.

    An exception that a signal handler raises may come between any two lines, also of ``__exit__``. So the lock is the
    name of its holder, which is taken and noted in one operation; and a holder that is a local variable of no
    function running in its thread (``_held``, or ``self`` in here) has ended without giving it back.
    """

    def __init__(self, run: Runtime, call: str) -> None:
        self.run, self.call = run, call
        self.thread = threading.get_ident()

    def __enter__(self) -> Exclusive:
        run, call = self.run, self.call
        if torch._C._current_graph_task_id() != -1 and call not in CHECKPOINTING:
            raise RuntimeError(
                f"{call}() was called inside a backward pass (from a hook?), when gradients are not complete: "
                "call it after backward() has returned"
            )
        if run.backward is not None and run.backward.stepping is not None and call != "scale_loss":
            raise RuntimeError(f"{call}() was called inside step_in_backward(); leave it first")
        holder = run.busy.setdefault("holder", self)
        if holder is not self:
            self._behind(holder)
        if (run.half_applied is not None or run.torn is not None) and call != "load_state_dict":
            try:
                run.refuse_half_applied(call)
            except RuntimeError:
                self.__exit__()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        busy = self.run.busy
        if busy.get("holder") is self:
            del busy["holder"]

    def _behind(self, holder: Exclusive) -> None:
        """Take over from a holder that has ended; raise behind one that runs, unless this is a hook's call in it."""
        own = holder.thread == self.thread
        if own and not holder.runs():
            self.run.busy["holder"] = self
        elif not own or holder.call not in CHECKPOINTING:
            raise RuntimeError(
                f"{self.call}() was called while another call on the same optimizer is running (from another thread, "
                "or from a signal handler); make one call at a time"
            )

    def runs(self) -> bool:
        """Whether a function in this thread still works under it."""
        frame = sys._getframe(3)  # the one with the `with` statement that waits
        entering = Exclusive.__enter__.__code__
        while frame is not None:
            name = "self" if frame.f_code is entering else "_held"
            if name in frame.f_code.co_varnames and frame.f_locals.get(name) is self:
                return True
            frame = frame.f_back
        return False
