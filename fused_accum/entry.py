"""What a call of ``accumulate`` and ``step`` passes on its way in: torch's decorators, at no cost while unused."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

try:
    from torch._C._dynamo.eval_frame import (
        _FrameAction,
        _FrameExecStrategy,
        get_eval_frame_callback,
        set_code_exec_strategy,
    )
except ImportError:  # another torch: as if all calls were compiled

    def get_eval_frame_callback() -> Any:
        return True

    def skip_frame(code: Any, calls: bool = False) -> None:
        pass

else:

    def skip_frame(code: Any, calls: bool = False) -> None:
        of_calls = _FrameAction.SKIP if calls else _FrameAction.DEFAULT
        set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.SKIP, of_calls))


def never_compiled(function: Callable) -> Callable:
    """Marks what autograd calls back, so that neither it nor what it calls is compiled when a backward runs within a
    compiled function: they look at addresses and at the running graph task, which mean nothing to a tracer."""
    skip_frame(function.__code__, calls=True)
    return function


def in_compiled_autograd() -> bool:
    """Whether compiled autograd runs this backward: it calls hooks, but not what is to follow the whole."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return getattr(module, "in_compiled_autograd_region", False)


# What torch.compile(fullgraph=True) says where it meets such a method.
NOT_COMPILED = (
    "FusedAccumAdamW's methods are not compiled, they break the graph: compile with fullgraph=True only the model or "
    "a function without them; or leave fullgraph out (numbers of any kind may then change without recompiling)"
)


def one_graph_break(method: Callable) -> Callable:
    """``torch._disable_dynamo(method)``, without what that costs a call (a tenth of a small step) while nothing is
    being compiled."""
    outside = torch._disable_dynamo(method)
    outside._torchdynamo_disable = True  # as torch.compiler.disable(reason=) does
    outside._torchdynamo_disable_msg = NOT_COMPILED

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or get_eval_frame_callback() is not None:
            return outside(self, *args, **kwargs)
        return method(self, *args, **kwargs)

    skip_frame(call.__code__)  # else a compiled caller would break its graph in here once more
    return call


def hooked(step: Callable) -> Callable:
    """``Optimizer.profile_hook_step(step)``, which runs the hooks and names the step to a profiler; straight to
    ``step`` where there are neither: naming it costs a tenth of a small step even when nobody records."""
    watched = Optimizer.profile_hook_step(step)

    @functools.wraps(step)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        needed = type(self).step is entry and (  # else torch has wrapped the subclass's own step, which calls this
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or _global_optimizer_pre_hooks
            or _global_optimizer_post_hooks
            or torch.autograd._profiler_enabled()
        )
        return (watched if needed else step)(self, *args, **kwargs)

    entry = one_graph_break(call)
    entry.hooked = True  # torch's mark: it does not wrap this step again
    return entry
