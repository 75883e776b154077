"""One call of an optimizer at a time."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .runtime import Runtime


class Exclusive:
    """The context of ``Runtime.exclusive``: a class, since a generator would cost every call three microseconds."""

    def __init__(self, run: Runtime, call: str) -> None:
        self.run, self.call, self.holds = run, call, False

    def __enter__(self) -> None:
        run, call = self.run, self.call
        checkpointing = call in ("state_dict", "load_state_dict")
        if not checkpointing and torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                f"{call}() was called inside a backward pass (from a hook?), when gradients are not complete: "
                "call it after backward() has returned"
            )
        if call != "load_state_dict":
            run.refuse_half_applied(call)
        if run.backward is not None and run.backward.stepping is not None and call != "scale_loss":
            raise RuntimeError(f"{call}() was called inside step_in_backward(); leave it first")
        thread = threading.get_ident()
        if run.checkpointing_thread == thread:
            return
        if not run.busy.acquire(blocking=False):
            raise RuntimeError(
                f"{call}() was called while another call on the same optimizer is running (from another thread, "
                "or from a signal handler); make one call at a time"
            )
        self.holds = True
        run.checkpointing_thread = thread if checkpointing else None

    def __exit__(self, *_: object) -> None:
        if self.holds:
            self.run.checkpointing_thread = None
            self.run.busy.release()
