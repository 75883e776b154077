"""The prologue of an update in Triton: it counts updates on the device and makes what they need that no element
changes, step_scalars of csrc/adamw_math.h with its bits, so that the host need not know of an update that is dropped.
"""

import triton
import triton.language as tl

# What there is for each row: values of struct StepScalars, in its order; the lower and the upper 16 bits of the
# update's number, which float32 holds too; whether it is dropped; whether the last micro-batch counts nothing.
STEP_SCALARS: tl.constexpr = tl.constexpr(14)

ROWS = 32  # of a program: a warp's threads
# Columns of the table: the address of a count, or the new count's bits as a float64; its kind; the group; flags.
STEP: tl.constexpr = tl.constexpr(0)
KIND: tl.constexpr = tl.constexpr(1)
GROUP: tl.constexpr = tl.constexpr(2)
FLAGS: tl.constexpr = tl.constexpr(3)
COLUMNS: tl.constexpr = tl.constexpr(4)
FLOAT32: tl.constexpr = tl.constexpr(0)
FLOAT64: tl.constexpr = tl.constexpr(1)
COUNTED: tl.constexpr = tl.constexpr(2)  # by the host
HAS_GRAD: tl.constexpr = tl.constexpr(1)
HAS_ACCUM: tl.constexpr = tl.constexpr(2)
# Numbers of a step, all float64: scale, coefficient, not 0 to drop it, whether the scale is one that only the device
# knows, whether there are counts of contributions; then for every group those of Hyper that count.
NUMBERS: tl.constexpr = tl.constexpr(5)
OF_A_GROUP: tl.constexpr = tl.constexpr(6)


@triton.jit
def product(x_high, x_low, y_high, y_low):
    """Of two unevaluated sums of two float64."""
    high = x_high * y_high
    low = tl.fma(x_high, y_high, -high) + (x_high * y_low + x_low * y_high)
    total = high + low
    return total, low - (total - high)


@triton.jit
def power(beta, t):
    """``beta**t`` for counts ``t``, to the nearest float64."""
    one = tl.full(t.shape, 1.0, tl.float64)
    zero = tl.zeros(t.shape, tl.float64)
    high, low, square, square_low = one, zero, beta, zero
    n = t.to(tl.int64)
    while tl.max(n, axis=0) > 0:
        more, more_low = product(high, low, square, square_low)
        odd = (n & 1) != 0
        high, low = tl.where(odd, more, high), tl.where(odd, more_low, low)
        square, square_low = product(square, square_low, square, square_low)
        n = n >> 1
    return high


@triton.jit
def put(narrow, wide, mask, value):
    tl.store(wide, value, mask=mask)
    tl.store(narrow, value.to(tl.float32), mask=mask)


@triton.jit(do_not_specialize=["table", "numbers", "counts", "narrow", "wide", "count"])
def count_kernel(table, numbers, counts, narrow, wide, count, ROWS: tl.constexpr):
    """Counts an update of every row that is not dropped; STEP_SCALARS of each in ``narrow``, float32, and ``wide``.

    counts: of contributions in each row's buffer, where ``numbers`` say that there are such.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = row < count
    table += row * COLUMNS
    step = tl.load(table + STEP, mask=mask, other=0)
    kind = tl.load(table + KIND, mask=mask, other=COUNTED)
    flags = tl.load(table + FLAGS, mask=mask, other=0)
    group = tl.load(table + GROUP, mask=mask, other=0)

    scale = tl.load(numbers)
    ignores_grad = tl.where(scale == 0, tl.load(numbers + 3), 0.0)
    held = tl.load(counts + row * tl.load(numbers + 4).to(tl.int64), mask=mask, other=1)
    held = tl.where(tl.load(numbers + 4) != 0, held, 1.0)
    from_grad = tl.where(ignores_grad != 0, 0, flags & HAS_GRAD)
    from_accum = tl.where(held == 0, 0, flags & HAS_ACCUM)
    dropped = tl.where(tl.load(numbers + 2) != 0, 1, tl.where((from_grad | from_accum) == 0, 1, 0))

    narrow_step = step.to(tl.pointer_type(tl.float32))
    wide_step = step.to(tl.pointer_type(tl.float64))
    t_narrow = tl.load(narrow_step, mask=kind == FLOAT32, other=0) + 1
    t_wide = tl.load(wide_step, mask=kind == FLOAT64, other=0) + 1
    tl.store(narrow_step, t_narrow, mask=(kind == FLOAT32) & (dropped == 0))
    tl.store(wide_step, t_wide, mask=(kind == FLOAT64) & (dropped == 0))
    t = tl.where(kind == FLOAT32, t_narrow.to(tl.float64), t_wide)
    t = tl.where(kind == COUNTED, step.to(tl.float64, bitcast=True), t)

    hyper = numbers + NUMBERS + group * OF_A_GROUP
    lr = tl.load(hyper)
    beta1 = tl.load(hyper + 1)
    beta2 = tl.load(hyper + 2)
    coefficient = tl.zeros((ROWS,), tl.float64) + tl.load(numbers + 1)
    narrow += row * STEP_SCALARS
    wide += row * STEP_SCALARS
    put(narrow, wide, mask, tl.zeros((ROWS,), tl.float64) + scale)
    put(narrow + 1, wide + 1, mask, tl.where(tl.load(hyper + 5) != 0, -coefficient, coefficient))
    put(narrow + 2, wide + 2, mask, 1 - lr * tl.load(hyper + 4))
    put(narrow + 3, wide + 3, mask, 1 - beta1)
    put(narrow + 4, wide + 4, mask, -beta1)
    put(narrow + 5, wide + 5, mask, beta2)
    put(narrow + 6, wide + 6, mask, 1 - beta2)
    put(narrow + 7, wide + 7, mask, -lr / (1 - power(beta1, t)))
    put(narrow + 8, wide + 8, mask, 1 / tl.math.sqrt(1 - power(beta2, t)))
    put(narrow + 9, wide + 9, mask, tl.load(hyper + 3))
    bits = t.to(tl.int64)
    put(narrow + 10, wide + 10, mask, (bits & 0xFFFF).to(tl.float64))
    put(narrow + 11, wide + 11, mask, ((bits >> 16) & 0xFFFF).to(tl.float64))
    put(narrow + 12, wide + 12, mask, dropped.to(tl.float64))
    put(narrow + 13, wide + 13, mask, tl.zeros((ROWS,), tl.float64) + ignores_grad)
