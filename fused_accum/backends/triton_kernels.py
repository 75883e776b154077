"""Triton kernels: the math of csrc/adamw_math.h, rounding for rounding, over tables of pointers in device memory.

``scalars`` holds what count_kernel (triton_counts.py) has made for every row, in the dtype of the arithmetic, device
memory as the table of rows (triton_access.py). The kernels never contract: they are launched with
enable_fp_fusion=False, and every fma is written out.
"""

# ruff: noqa: SIM109, SIM300  (upper-case parameters are not constants; Triton knows no `in`)
import triton
import triton.language as tl

from .triton_access import (
    ACCUM,
    COLUMNS,
    EXP_AVG,
    EXP_AVG_SQ,
    FIRST_BLOCK,
    GRAD,
    INDEX,
    MASTER,
    MAX_EXP_AVG_SQ,
    NUMEL,
    PARAM,
    SCALARS,
    SEED,
    SQUARES,
    THREADS,
    block_of,
    load,
    place,
    put,
    round_to,
    store,
)
from .triton_counts import STEP_SCALARS
from .triton_weights import (
    FP32_MASTER,
    SPLIT_MASTER,
    STOCHASTIC,
    encode_by_chance,
    put_bits,
    random_words,
    split,
    weight_of,
)

__all__ = [
    "CHUNK", "REGISTERS", "THREADS", "accumulate_kernel", "adamw_kernel", "block_of", "squares_kernel",
]  # fmt: skip

CHUNK = 4096  # sums of squares that a program adds up at a time
REGISTERS = 128  # of a thread that updates, at most; told nothing, ptxas used more, and for one GPU spilled some


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
def sum_of_squares(x, BLOCK: tl.constexpr):
    """In float64. Neighbours are added until one is left: the same bits however the block lies in registers."""
    x = x.to(tl.float64)
    x *= x
    for level in tl.static_range(BLOCK.bit_length()):
        if BLOCK >> level > 2:
            x = tl.sum(tl.reshape(x, (BLOCK >> (level + 1), 2)), axis=1)
    return tl.sum(x)


@triton.jit
def accumulate_block(
    rows, start, rest, scale, nothing, partial,
    WIDE: tl.constexpr, GRAD_DTYPE: tl.constexpr, ACCUM_DTYPE: tl.constexpr, HAS_GRAD: tl.constexpr,
    HAS_ACCUM: tl.constexpr, STORES: tl.constexpr, SQUARED: tl.constexpr,
    ALIGNED: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(1) on elements [start, start + min(rest, BLOCK)) of one row."""
    accum_at = place(rows, ACCUM, start, ACCUM_DTYPE, ALIGNED)
    if HAS_GRAD:
        grad = load(place(rows, GRAD, start, GRAD_DTYPE, ALIGNED), rest, GRAD_DTYPE, WIDE, FULL, BLOCK)
        if HAS_ACCUM:
            total = load(accum_at, rest, ACCUM_DTYPE, WIDE, FULL, BLOCK)
            total = tl.where(nothing, total, tl.fma(scale, grad, total))
        else:
            total = tl.where(nothing, 0.0, scale * grad)
    else:
        total = load(accum_at, rest, ACCUM_DTYPE, WIDE, FULL, BLOCK)
    if STORES:
        store(accum_at, rest, total, ACCUM_DTYPE, FULL, BLOCK)
    if SQUARED:
        tl.store(partial, sum_of_squares(round_to(total, ACCUM_DTYPE, WIDE), BLOCK))


@triton.jit(do_not_specialize=["rows", "blocks", "scalars", "partials"])
def accumulate_kernel(
    rows, blocks, scalars, partials,
    WIDE: tl.constexpr, GRAD_DTYPE: tl.constexpr, ACCUM_DTYPE: tl.constexpr, HAS_GRAD: tl.constexpr,
    HAS_ACCUM: tl.constexpr, STORES: tl.constexpr, SQUARED: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``accum + scale*grad``, without HAS_ACCUM ``scale*grad``, without HAS_GRAD ``accum``; ``scalars`` holds the one
    scale, and whether it adds nothing, not even NaN. With STORES it becomes the buffer, with SQUARED its sum of
    squares goes to ``partials``, by program."""
    block = tl.program_id(0).to(tl.int64)
    rows += tl.load(blocks + block).to(tl.int64) * COLUMNS
    start = (block - tl.load(rows + FIRST_BLOCK)) * BLOCK
    rest = tl.load(rows + NUMEL) - start
    scale = tl.load(scalars)
    nothing = tl.load(scalars + 1) != 0
    if rest >= BLOCK:
        accumulate_block(
            rows, start, rest, scale, nothing, partials + block, WIDE, GRAD_DTYPE, ACCUM_DTYPE, HAS_GRAD, HAS_ACCUM,
            STORES, SQUARED, ALIGNED, True, BLOCK,
        )  # fmt: skip
    else:
        accumulate_block(
            rows, start, rest, scale, nothing, partials + block, WIDE, GRAD_DTYPE, ACCUM_DTYPE, HAS_GRAD, HAS_ACCUM,
            STORES, SQUARED, ALIGNED, False, BLOCK,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "partials"])
def squares_kernel(rows, partials, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """The sum of squares of each row, a program's one, from those that accumulate_kernel left of its blocks."""
    rows += tl.program_id(0).to(tl.int64) * COLUMNS
    count = tl.cdiv(tl.load(rows + NUMEL), BLOCK)
    partials += tl.load(rows + FIRST_BLOCK)
    offsets = tl.arange(0, CHUNK)
    total = tl.zeros((CHUNK,), tl.float64)
    for first in range(0, count, CHUNK):
        total += tl.load(partials + first + offsets, mask=offsets < count - first, other=0)
    tl.store(tl.load(rows + SQUARES).to(tl.pointer_type(tl.float64)), tl.sum(total))


@triton.jit
def adamw_block(
    rows, start, rest, scalars,
    WIDE: tl.constexpr, PARAM_DTYPE: tl.constexpr, GRAD_DTYPE: tl.constexpr, ACCUM_DTYPE: tl.constexpr,
    EXP_AVG_DTYPE: tl.constexpr, EXP_AVG_SQ_DTYPE: tl.constexpr, MAX_DTYPE: tl.constexpr,
    HAS_GRAD: tl.constexpr, HAS_ACCUM: tl.constexpr, AMSGRAD: tl.constexpr, WEIGHTS: tl.constexpr,
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
    ignores_grad = tl.load(scalars + 13) != 0

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
    if WEIGHTS == FP32_MASTER or WEIGHTS == SPLIT_MASTER:
        MASTER_DTYPE: tl.constexpr = tl.uint16 if WEIGHTS == SPLIT_MASTER else tl.float32
        master_at = place(rows, MASTER, start, MASTER_DTYPE, ALIGNED)
        kept = load(master_at, rest, MASTER_DTYPE, MASTER_DTYPE, FULL, BLOCK)
    exp_avg = load(exp_avg_at, rest, EXP_AVG_DTYPE, WIDE, FULL, BLOCK)
    exp_avg_sq = load(exp_avg_sq_at, rest, EXP_AVG_SQ_DTYPE, WIDE, FULL, BLOCK)
    if AMSGRAD:
        largest_at = place(rows, MAX_EXP_AVG_SQ, start, MAX_DTYPE, ALIGNED)
        largest = load(largest_at, rest, MAX_DTYPE, WIDE, FULL, BLOCK)

    if HAS_GRAD:
        if HAS_ACCUM:
            total = tl.where(ignores_grad, total, tl.fma(scale, contribution, total))
        else:
            total = scale * contribution
        total = round_to(total, ACCUM_DTYPE, WIDE)
    grad = coefficient * total  # (2)
    if WEIGHTS == FP32_MASTER or WEIGHTS == SPLIT_MASTER:
        param = weight_of(param, kept, PARAM_DTYPE, WEIGHTS)

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

    if WEIGHTS == SPLIT_MASTER:
        high, low = split(param)
        put_bits(param_at, rest, high, PARAM_DTYPE, FULL, BLOCK)
        put(master_at, rest, low, FULL, BLOCK)
    elif WEIGHTS == STOCHASTIC:
        step = tl.load(scalars + 10).to(tl.uint32) + tl.load(scalars + 11).to(tl.uint32) * 65536
        words = random_words(tl.load(rows + SEED), tl.load(rows + INDEX).to(tl.uint32), step, start, BLOCK)
        put_bits(param_at, rest, encode_by_chance(param, words, PARAM_DTYPE), PARAM_DTYPE, FULL, BLOCK)
    else:
        store(param_at, rest, param, PARAM_DTYPE, FULL, BLOCK)
        if WEIGHTS == FP32_MASTER:
            put(master_at, rest, param, FULL, BLOCK)
    store(exp_avg_at, rest, exp_avg, EXP_AVG_DTYPE, FULL, BLOCK)
    store(exp_avg_sq_at, rest, exp_avg_sq, EXP_AVG_SQ_DTYPE, FULL, BLOCK)
    if HAS_ACCUM:
        store(accum_at, rest, tl.full((BLOCK,), 0, WIDE), ACCUM_DTYPE, FULL, BLOCK)  # (6)


@triton.jit(do_not_specialize=["rows", "blocks", "scalars"])
def adamw_kernel(
    rows, blocks, scalars,
    WIDE: tl.constexpr, PARAM_DTYPE: tl.constexpr, GRAD_DTYPE: tl.constexpr, ACCUM_DTYPE: tl.constexpr,
    EXP_AVG_DTYPE: tl.constexpr, EXP_AVG_SQ_DTYPE: tl.constexpr, MAX_DTYPE: tl.constexpr,
    HAS_GRAD: tl.constexpr, HAS_ACCUM: tl.constexpr, AMSGRAD: tl.constexpr, WEIGHTS: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One AdamW update of every row, from its gradient, its buffer, or both, unless its scalars say that it is
    dropped; buffers become zero."""
    block = tl.program_id(0).to(tl.int64)
    rows += tl.load(blocks + block).to(tl.int64) * COLUMNS
    start = (block - tl.load(rows + FIRST_BLOCK)) * BLOCK
    rest = tl.load(rows + NUMEL) - start
    scalars += tl.load(rows + SCALARS) * STEP_SCALARS
    if tl.load(scalars + 12) != 0:
        if HAS_ACCUM:
            accum_at = place(rows, ACCUM, start, ACCUM_DTYPE, ALIGNED)
            store(accum_at, rest, tl.full((BLOCK,), 0, WIDE), ACCUM_DTYPE, False, BLOCK)
    elif rest >= BLOCK:
        adamw_block(
            rows, start, rest, scalars, WIDE, PARAM_DTYPE, GRAD_DTYPE, ACCUM_DTYPE, EXP_AVG_DTYPE,
            EXP_AVG_SQ_DTYPE, MAX_DTYPE, HAS_GRAD, HAS_ACCUM, AMSGRAD, WEIGHTS, ALIGNED, True, BLOCK,
        )  # fmt: skip
    else:
        adamw_block(
            rows, start, rest, scalars, WIDE, PARAM_DTYPE, GRAD_DTYPE, ACCUM_DTYPE, EXP_AVG_DTYPE,
            EXP_AVG_SQ_DTYPE, MAX_DTYPE, HAS_GRAD, HAS_ACCUM, AMSGRAD, WEIGHTS, ALIGNED, False, BLOCK,
        )  # fmt: skip
