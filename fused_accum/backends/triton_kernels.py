"""Triton kernels: the math of csrc/adamw_math.h, rounding for rounding, over tables of pointers in device memory.

A program works on one block of one row. ``blocks`` names the row of every program, ``rows`` holds what ROW lists
for every row, ``scalars`` what STEP_SCALARS lists for every (group, t), in the dtype of the arithmetic. All three
are device memory, so what changes from step to step never reaches the compiler.

The kernels never contract: they are launched with enable_fp_fusion=False, and every fma is written out.
"""

# ruff: noqa: SIM300  (upper-case parameters are not constants)
import triton
import triton.language as tl

ROW = ("param", "grad", "accum", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "numel", "first_block", "scalars")

PARAM: tl.constexpr = tl.constexpr(0)
GRAD: tl.constexpr = tl.constexpr(1)
ACCUM: tl.constexpr = tl.constexpr(2)
EXP_AVG: tl.constexpr = tl.constexpr(3)
EXP_AVG_SQ: tl.constexpr = tl.constexpr(4)
MAX_EXP_AVG_SQ: tl.constexpr = tl.constexpr(5)
NUMEL: tl.constexpr = tl.constexpr(6)
FIRST_BLOCK: tl.constexpr = tl.constexpr(7)
SCALARS: tl.constexpr = tl.constexpr(8)
COLUMNS: tl.constexpr = tl.constexpr(len(ROW))
STEP_SCALARS: tl.constexpr = tl.constexpr(10)  # values of struct StepScalars, in its order

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
def store(pointer, rest, value, DTYPE: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    if FULL:
        tl.store(pointer + offsets, narrow(value, DTYPE))
    else:
        tl.store(pointer + offsets, narrow(value, DTYPE), mask=offsets < rest)


@triton.jit
def round_to(value, DTYPE: tl.constexpr, WIDE: tl.constexpr):
    """What a buffer of ``DTYPE`` would give back."""
    if DTYPE == WIDE:
        return value
    elif DTYPE == tl.bfloat16:
        return decode_bf16(narrow(value, DTYPE)).to(WIDE)
    else:
        return narrow(value, DTYPE).to(WIDE)


@triton.jit
def divide(x, y, WIDE: tl.constexpr):
    """IEEE quotient: of float32, ``/`` is an approximation."""
    if WIDE == tl.float32:
        return tl.math.div_rn(x, y)
    else:
        return x / y


@triton.jit
def square_root(x, WIDE: tl.constexpr):
    if WIDE == tl.float32:
        return tl.math.sqrt_rn(x)
    else:
        return tl.math.sqrt(x)


@triton.jit
def accumulate_block(
    rows, start, rest, scale,
    WIDE: tl.constexpr, GRAD_DTYPE: tl.constexpr, ACCUM_DTYPE: tl.constexpr,
    ADD: tl.constexpr, ALIGNED: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(1) on elements [start, start + min(rest, BLOCK)) of one row."""
    grad = load(place(rows, GRAD, start, GRAD_DTYPE, ALIGNED), rest, GRAD_DTYPE, WIDE, FULL, BLOCK)
    accum = place(rows, ACCUM, start, ACCUM_DTYPE, ALIGNED)
    if ADD:
        total = tl.fma(scale, grad, load(accum, rest, ACCUM_DTYPE, WIDE, FULL, BLOCK))
    else:
        total = scale * grad
    store(accum, rest, total, ACCUM_DTYPE, FULL, BLOCK)


@triton.jit(do_not_specialize=["rows", "blocks", "scalars"])
def accumulate_kernel(
    rows, blocks, scalars,
    WIDE: tl.constexpr, GRAD_DTYPE: tl.constexpr, ACCUM_DTYPE: tl.constexpr,
    ADD: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``accum <- scale*grad``, or with ADD ``accum + scale*grad``; ``scalars`` holds the one scale."""
    block = tl.program_id(0).to(tl.int64)
    rows += tl.load(blocks + block).to(tl.int64) * COLUMNS
    start = (block - tl.load(rows + FIRST_BLOCK)) * BLOCK
    rest = tl.load(rows + NUMEL) - start
    scale = tl.load(scalars)
    if rest >= BLOCK:
        accumulate_block(rows, start, rest, scale, WIDE, GRAD_DTYPE, ACCUM_DTYPE, ADD, ALIGNED, True, BLOCK)
    else:
        accumulate_block(rows, start, rest, scale, WIDE, GRAD_DTYPE, ACCUM_DTYPE, ADD, ALIGNED, False, BLOCK)


@triton.jit
def adamw_block(
    rows, start, rest, scalars,
    WIDE: tl.constexpr, PARAM_DTYPE: tl.constexpr, GRAD_DTYPE: tl.constexpr, ACCUM_DTYPE: tl.constexpr,
    EXP_AVG_DTYPE: tl.constexpr, EXP_AVG_SQ_DTYPE: tl.constexpr, MAX_DTYPE: tl.constexpr,
    HAS_GRAD: tl.constexpr, HAS_ACCUM: tl.constexpr, AMSGRAD: tl.constexpr,
    ALIGNED: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(2) to (6) on elements [start, start + min(rest, BLOCK)) of one row."""
    scale = tl.load(scalars)
    coefficient = tl.load(scalars + 1)  # negated if maximize
    decay = tl.load(scalars + 2)
    one_minus_beta1 = tl.load(scalars + 3)
    minus_beta1 = tl.load(scalars + 4)
    beta2 = tl.load(scalars + 5)
    one_minus_beta2 = tl.load(scalars + 6)
    minus_step_size = tl.load(scalars + 7)
    inverse_sqrt_bias_correction2 = tl.load(scalars + 8)
    eps = tl.load(scalars + 9)

    # All loads before any arithmetic: the more are under way at once, the better.
    if HAS_ACCUM:
        accum_at = place(rows, ACCUM, start, ACCUM_DTYPE, ALIGNED)
        total = load(accum_at, rest, ACCUM_DTYPE, WIDE, FULL, BLOCK)
    if HAS_GRAD:
        contribution = load(place(rows, GRAD, start, GRAD_DTYPE, ALIGNED), rest, GRAD_DTYPE, WIDE, FULL, BLOCK)
    param_at = place(rows, PARAM, start, PARAM_DTYPE, ALIGNED)
    exp_avg_at = place(rows, EXP_AVG, start, EXP_AVG_DTYPE, ALIGNED)
    exp_avg_sq_at = place(rows, EXP_AVG_SQ, start, EXP_AVG_SQ_DTYPE, ALIGNED)
    param = load(param_at, rest, PARAM_DTYPE, WIDE, FULL, BLOCK)
    exp_avg = load(exp_avg_at, rest, EXP_AVG_DTYPE, WIDE, FULL, BLOCK)
    exp_avg_sq = load(exp_avg_sq_at, rest, EXP_AVG_SQ_DTYPE, WIDE, FULL, BLOCK)
    if AMSGRAD:
        largest_at = place(rows, MAX_EXP_AVG_SQ, start, MAX_DTYPE, ALIGNED)
        largest = load(largest_at, rest, MAX_DTYPE, WIDE, FULL, BLOCK)

    if HAS_GRAD:
        if HAS_ACCUM:
            total = tl.fma(scale, contribution, total)
        else:
            total = scale * contribution
        total = round_to(total, ACCUM_DTYPE, WIDE)
    grad = coefficient * total  # (2)

    # (4) m + w*(g - m), from the end that is nearer: exact at w = 0 and at w = 1
    near = one_minus_beta1 < 0.5
    exp_avg = tl.fma(tl.where(near, one_minus_beta1, minus_beta1), grad - exp_avg, tl.where(near, exp_avg, grad))
    exp_avg_sq = tl.fma(one_minus_beta2 * grad, grad, beta2 * exp_avg_sq)
    if AMSGRAD:  # NaN wins, as in torch.maximum
        largest = tl.where((largest >= exp_avg_sq) | (largest != largest), largest, exp_avg_sq)
        store(largest_at, rest, largest, MAX_DTYPE, FULL, BLOCK)
    else:
        largest = exp_avg_sq
    denominator = tl.fma(square_root(largest, WIDE), inverse_sqrt_bias_correction2, eps)
    param = tl.fma(minus_step_size, divide(exp_avg, denominator, WIDE), param * decay)  # (3), (5)

    store(param_at, rest, param, PARAM_DTYPE, FULL, BLOCK)
    store(exp_avg_at, rest, exp_avg, EXP_AVG_DTYPE, FULL, BLOCK)
    store(exp_avg_sq_at, rest, exp_avg_sq, EXP_AVG_SQ_DTYPE, FULL, BLOCK)
    if HAS_ACCUM:
        store(accum_at, rest, tl.full((BLOCK,), 0, WIDE), ACCUM_DTYPE, FULL, BLOCK)  # (6)


@triton.jit(do_not_specialize=["rows", "blocks", "scalars"])
def adamw_kernel(
    rows, blocks, scalars,
    WIDE: tl.constexpr, PARAM_DTYPE: tl.constexpr, GRAD_DTYPE: tl.constexpr, ACCUM_DTYPE: tl.constexpr,
    EXP_AVG_DTYPE: tl.constexpr, EXP_AVG_SQ_DTYPE: tl.constexpr, MAX_DTYPE: tl.constexpr,
    HAS_GRAD: tl.constexpr, HAS_ACCUM: tl.constexpr, AMSGRAD: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One AdamW update of every row, from its gradient, its buffer, or both; buffers that were read become zero."""
    block = tl.program_id(0).to(tl.int64)
    rows += tl.load(blocks + block).to(tl.int64) * COLUMNS
    start = (block - tl.load(rows + FIRST_BLOCK)) * BLOCK
    rest = tl.load(rows + NUMEL) - start
    scalars += tl.load(rows + SCALARS) * STEP_SCALARS
    if rest >= BLOCK:
        adamw_block(
            rows, start, rest, scalars, WIDE, PARAM_DTYPE, GRAD_DTYPE, ACCUM_DTYPE, EXP_AVG_DTYPE,
            EXP_AVG_SQ_DTYPE, MAX_DTYPE, HAS_GRAD, HAS_ACCUM, AMSGRAD, ALIGNED, True, BLOCK,
        )  # fmt: skip
    else:
        adamw_block(
            rows, start, rest, scalars, WIDE, PARAM_DTYPE, GRAD_DTYPE, ACCUM_DTYPE, EXP_AVG_DTYPE,
            EXP_AVG_SQ_DTYPE, MAX_DTYPE, HAS_GRAD, HAS_ACCUM, AMSGRAD, ALIGNED, False, BLOCK,
        )  # fmt: skip
