"""How a 16-bit parameter keeps what its dtype cannot hold, in Triton: csrc/weights.h on blocks of elements.

``WEIGHTS`` numbers the ways as fused_accum/state.py does.
"""

# ruff: noqa: SIM300  (upper-case parameters are not constants)
import triton
import triton.language as tl

from .. import state
from .triton_access import put, round_to

FP32_MASTER: tl.constexpr = tl.constexpr(state.MASTER)
SPLIT_MASTER: tl.constexpr = tl.constexpr(state.SPLIT)
STOCHASTIC: tl.constexpr = tl.constexpr(state.STOCHASTIC)


@triton.jit
def weight_of(param, kept, DTYPE: tl.constexpr, WEIGHTS: tl.constexpr):
    """The weight to update, from the parameter in float32 and what is kept beside it: the master where the parameter
    is what it rounds to, else (changed from outside) the parameter."""
    if WEIGHTS == FP32_MASTER:
        return tl.where(round_to(kept, DTYPE, tl.float32) == param, kept, param)
    top = param.to(tl.uint32, bitcast=True)
    bits = top + ((kept.to(tl.uint32) ^ 0x8000) - 0x8000)
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, top, bits).to(tl.float32, bitcast=True)


@triton.jit
def split(weight):
    """Its upper half, rounded to nearest with ties away from zero, and the lower one: bits of bfloat16 and int16."""
    bits = weight.to(tl.uint32, bitcast=True)
    bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, bits)
    return ((bits + 0x8000) >> 16).to(tl.uint16), bits.to(tl.uint16)


@triton.jit
def random_words(seed, index, step, start, BLOCK: tl.constexpr):
    """A 32-bit word for each of the elements from ``start``, a multiple of 4, in row-major order."""
    quads = (start // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint64)
    low, high = (quads & 0xFFFFFFFF).to(tl.uint32), (quads >> 32).to(tl.uint32)
    fixed = tl.zeros_like(low)
    w0, w1, w2, w3 = tl.philox(seed, low, high, fixed + index, fixed + step)
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (BLOCK,))


@triton.jit
def encode_by_chance(x, words, DTYPE: tl.constexpr):
    """Bits of ``DTYPE``: away from zero with the chance that the part cut off is of a unit."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    if DTYPE == tl.bfloat16:
        return tl.where(magnitude > 0x7F800000, 0x7FC0, (bits + (words >> 16)) >> 16).to(tl.uint16)
    normal = (magnitude - (112 << 23) + (words >> 19)) >> 13
    # Below 2^-14 the units are 2^-24, and there are at most 1024.
    tiny = magnitude < (113 << 23)
    small = tl.where(tiny, magnitude, 0).to(tl.float32, bitcast=True).to(tl.float64)
    subnormal = (small * 16777216.0 + (words >> 1).to(tl.float64) * 4.656612873077393e-10).to(tl.int32).to(tl.uint32)
    finite = tl.where(tiny, subnormal, tl.minimum(normal, 0x7C00))
    special = tl.where(magnitude > 0x7F800000, 0x7E00, 0x7C00)
    return ((bits >> 16) & 0x8000 | tl.where(magnitude >= 0x47800000, special, finite)).to(tl.uint16)


@triton.jit
def put_bits(pointer, rest, bits, DTYPE: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr):
    """Store the patterns ``bits``, uint16, as elements of a parameter of ``DTYPE``."""
    STORAGE: tl.constexpr = tl.uint16 if DTYPE == tl.bfloat16 else DTYPE
    put(pointer, rest, bits.to(STORAGE, bitcast=True), FULL, BLOCK)
