"""pytest plugin for TRITON_INTERPRET=1: the interpreter, several times as fast.

In every call of a device function Triton's interpreter patches the whole of triton.language anew; the launch around
it has done so already, for the module of the kernel.
"""

import triton
from triton.runtime.interpreter import InterpretedFunction

assert triton.knobs.runtime.interpret, "set TRITON_INTERPRET=1 before Python starts"


patching_call = InterpretedFunction.__call__


def call(self, *args, **kwargs):
    if self.fn.__module__.startswith("triton."):
        return patching_call(self, *args, **kwargs)
    return self.rewrite()(*args, **kwargs)


InterpretedFunction.__call__ = call
