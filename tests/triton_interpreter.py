"""pytest plugin for TRITON_INTERPRET=1: the interpreter, several times as fast, with an fma that rounds once.

In every call of a device function Triton's interpreter patches the whole of triton.language anew; the launch around
it has done so already, for the module of the kernel. Before Triton 3.9 its fma is a multiplication and an addition.
"""

from fractions import Fraction

import numpy as np
import triton
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction

assert triton.knobs.runtime.interpret, "set TRITON_INTERPRET=1 before Python starts"


patching_call = InterpretedFunction.__call__


def call(self, *args, **kwargs):
    if self.fn.__module__.startswith("triton."):
        return patching_call(self, *args, **kwargs)
    return self.rewrite()(*args, **kwargs)


InterpretedFunction.__call__ = call


def fma_fp32(x, y, z):
    """The sum rounded to odd in float64, where the product is exact, so that rounding to float32 is the only one."""
    product = x.astype(np.float64) * y.astype(np.float64)
    total = product + z
    part = total - product
    error = (product - (total - part)) + (z - part)
    bits = total.view(np.int64).copy()
    even = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
    bits[even] += np.where((error > 0) == (total > 0), 1, -1)[even]
    return bits.view(np.float64).astype(np.float32)


def fma_fp64(x, y, z):
    """In rational numbers; a float is the nearest to one."""
    plain = x * y + z
    out = plain.copy()
    for i in np.flatnonzero(np.isfinite(plain)):
        a, b, c = (Fraction(float(v.flat[i])) for v in (x, y, z))
        out.flat[i] = float(a * b + c) or plain.flat[i]  # which zero it is, the plain sum tells
    return out


def create_fma(self, x, y, z):
    arguments = np.broadcast_arrays(x.data, y.data, z.data)
    with np.errstate(all="ignore"):
        if x.data.dtype == np.float32:
            return interpreter.TensorHandle(fma_fp32(*arguments), z.dtype.scalar)
        assert x.data.dtype == np.float64
        return interpreter.TensorHandle(fma_fp64(*arguments), z.dtype.scalar)


if not hasattr(interpreter._interpreter, "fma_fp32"):
    interpreter.InterpreterBuilder.create_fma = create_fma
