"""How Triton kernels reach the tensors of a row: the table's columns, loads and stores of any dtype.

A program works on one block of one row. ``blocks`` names the row of every program, ``rows`` holds what ROW lists
for every row, all of it device memory, so what changes from step to step never reaches the compiler.
"""

# ruff: noqa: SIM300  (upper-case parameters are not constants)
import triton
import triton.language as tl

ROW = (
    "param", "grad", "accum", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master", "numel", "first_block", "scalars",
    "squares", "seed", "index",
)  # fmt: skip

PARAM: tl.constexpr = tl.constexpr(0)
GRAD: tl.constexpr = tl.constexpr(1)
ACCUM: tl.constexpr = tl.constexpr(2)
EXP_AVG: tl.constexpr = tl.constexpr(3)
EXP_AVG_SQ: tl.constexpr = tl.constexpr(4)
MAX_EXP_AVG_SQ: tl.constexpr = tl.constexpr(5)
MASTER: tl.constexpr = tl.constexpr(6)
NUMEL: tl.constexpr = tl.constexpr(7)
FIRST_BLOCK: tl.constexpr = tl.constexpr(8)
SCALARS: tl.constexpr = tl.constexpr(9)
SQUARES: tl.constexpr = tl.constexpr(10)  # where the row's sum of squares goes, a float64
SEED: tl.constexpr = tl.constexpr(11)  # of stochastic rounding
INDEX: tl.constexpr = tl.constexpr(12)  # of the parameter in the optimizer
COLUMNS: tl.constexpr = tl.constexpr(len(ROW))

THREADS = 128  # of a program


def block_of(wide: tl.dtype) -> int:
    """Elements of a program: 8 a thread, which is 128 bits of bfloat16; for float64 4, to spare registers."""
    return THREADS * (4 if wide == tl.float64 else 8)


@triton.jit
def decode_bf16(bits):
    return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def encode_bf16(x):
    """Round to nearest even on the bits, as csrc/dtypes.h: one meaning on every GPU and in the interpreter."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded).to(tl.uint16)


@triton.jit
def place(rows, COLUMN: tl.constexpr, start, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointer to element ``start`` of the row's tensor in ``COLUMN``; bfloat16 is read and written as its bits."""
    STORAGE: tl.constexpr = tl.uint16 if DTYPE == tl.bfloat16 else DTYPE
    pointer = tl.load(rows + COLUMN).to(tl.pointer_type(STORAGE)) + start
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def load(pointer, rest, DTYPE: tl.constexpr, WIDE: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    if FULL:
        value = tl.load(pointer + offsets)
    else:
        value = tl.load(pointer + offsets, mask=offsets < rest, other=0)
    if DTYPE == tl.bfloat16:
        value = decode_bf16(value)
    return value.to(WIDE)


@triton.jit
def narrow(value, DTYPE: tl.constexpr):
    """Rounded to ``DTYPE``; float64 goes to 16 bits by way of float32, as in csrc/dtypes.h."""
    if DTYPE == tl.bfloat16:
        return encode_bf16(value.to(tl.float32))
    elif DTYPE == tl.float16:
        return value.to(tl.float32).to(tl.float16)
    else:
        return value.to(DTYPE)


@triton.jit
def put(pointer, rest, stored, FULL: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    if FULL:
        tl.store(pointer + offsets, stored)
    else:
        tl.store(pointer + offsets, stored, mask=offsets < rest)


@triton.jit
def store(pointer, rest, value, DTYPE: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr):
    put(pointer, rest, narrow(value, DTYPE), FULL, BLOCK)


@triton.jit
def round_to(value, DTYPE: tl.constexpr, WIDE: tl.constexpr):
    """What a buffer of ``DTYPE`` would give back."""
    if DTYPE == WIDE:
        return value
    elif DTYPE == tl.bfloat16:
        return decode_bf16(narrow(value, DTYPE)).to(WIDE)
    else:
        return narrow(value, DTYPE).to(WIDE)
