"""pytest plugin for TRITON_INTERPRET=1: the interpreter, several times as fast, with an fma that rounds once.

Triton's interpreter patches the whole of triton.language anew in every launch and in every call of a device function,
and works out for every tensor what follows from its type. Here both are done once. Before Triton 3.9 its fma is a
multiplication and an addition.
"""

from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction

assert triton.knobs.runtime.interpret, "set TRITON_INTERPRET=1 before Python starts"

# -- patched once: for kernels, which know triton.language, and for functions of Triton itself, which know its core

interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
interpreter._patch_lang = lambda fn: SimpleNamespace(restore=lambda: None)
InterpretedFunction.__call__ = lambda self, *args, **kwargs: self.rewrite()(*args, **kwargs)

# -- worked out once for every type, by its name: not all types can be hashed

np_dtype = interpreter._get_np_dtype
tensor_init, block_type_init = tl.core.tensor.__init__, tl.core.block_type.__init__
of_types, of_tensors, of_block_types = {}, {}, {}


def get_np_dtype(type):
    if type.name not in of_types:
        of_types[type.name] = np_dtype(type)
    return of_types[type.name]


def init_tensor(self, handle, type):
    if type.name not in of_tensors:
        tensor_init(self, None, type)
        of_tensors[type.name] = vars(self).copy()
    vars(self).update(of_tensors[type.name], handle=handle, type=type)


def init_block_type(self, element_ty, shape):
    key = element_ty.name, tuple(map(tl.core._unwrap_if_constexpr, shape))
    if key not in of_block_types:
        block_type_init(self, element_ty, shape)
        of_block_types[key] = vars(self).copy()
    vars(self).update(of_block_types[key])


interpreter._get_np_dtype = get_np_dtype
tl.core.tensor.__init__, tl.core.block_type.__init__ = init_tensor, init_block_type

# -- fma


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
