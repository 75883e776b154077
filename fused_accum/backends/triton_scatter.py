"""Rows added into a buffer by index, in Triton: csrc/scatter.cpp, with its bits."""

# ruff: noqa: SIM300  (upper-case parameters are not constants)
import triton
import triton.language as tl

from .triton_access import decode_bf16, load, store

AT_ONCE: tl.constexpr = tl.constexpr(4)  # tokens of a row whose loads are under way together
WIDEST = 1024  # elements of a program


def block_of(width: int) -> int:
    """Elements of a program, for rows of ``width``."""
    return max(128, min(WIDEST, triton.next_power_of_2(width)))


@triton.jit
def element(pointer, offset, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointer to an element; bfloat16 is read and written as its bits."""
    if DTYPE == tl.bfloat16:
        pointer = pointer.to(tl.pointer_type(tl.uint16), bitcast=True)
    pointer += offset
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def load_if(pointer, inside, rest, DTYPE: tl.constexpr, WIDE: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr):
    """As ``load`` where ``inside`` holds; memory is not touched elsewhere."""
    offsets = tl.arange(0, BLOCK)
    mask = tl.full((BLOCK,), 1, tl.int1) & inside
    if not FULL:
        mask &= offsets < rest
    value = tl.load(pointer + offsets, mask=mask, other=0)
    if DTYPE == tl.bfloat16:
        value = decode_bf16(value)
    return value.to(WIDE)


@triton.jit
def add_run(
    accum, grad, order, place, end, start, width, row,
    WIDE: tl.constexpr, ACCUM_DTYPE: tl.constexpr, GRAD_DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One after the other the gradients of the tokens in ``order[place:end]``, to ``row`` from ``start`` on."""
    rest = width - start
    at = element(accum, row * width + start, ACCUM_DTYPE, ALIGNED)
    total = load(at, rest, ACCUM_DTYPE, WIDE, FULL, BLOCK)
    while place < end:
        for k in tl.static_range(AT_ONCE):
            inside = place + k < end
            token = tl.load(order + place + k, mask=inside, other=0)
            source = element(grad, token * width + start, GRAD_DTYPE, ALIGNED)
            more = load_if(source, inside, rest, GRAD_DTYPE, WIDE, FULL, BLOCK)
            total = tl.where(inside, total + more, total)  # adding 0 would change -0
        place += AT_ONCE
    store(at, rest, total, ACCUM_DTYPE, FULL, BLOCK)


@triton.jit(do_not_specialize=["accum", "grad", "rows", "order", "ends", "width", "parts", "skip"])
def scatter_kernel(
    accum, grad, rows, order, ends, width, parts, skip,
    WIDE: tl.constexpr, ACCUM_DTYPE: tl.constexpr, GRAD_DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``accum[row] += grad[t]`` for every token t of each row but ``skip``, in the order of t.

    rows: the tokens' rows, sorted; order: the tokens in that order; ends: for every place there, where the places of
    its row end. A program has a place and one of the ``parts`` of its row; it works if the place is its row's first.
    """
    program = tl.program_id(0).to(tl.int64)
    place = program // parts
    start = program % parts * BLOCK
    row = tl.load(rows + place)
    before = tl.load(rows + tl.maximum(place - 1, 0))
    if ((place == 0) | (before != row)) & (row != skip):
        end = tl.load(ends + place)
        if width - start >= BLOCK:
            add_run(
                accum, grad, order, place, end, start, width, row, WIDE, ACCUM_DTYPE, GRAD_DTYPE, ALIGNED, True,
                BLOCK,
            )  # fmt: skip
        else:
            add_run(
                accum, grad, order, place, end, start, width, row, WIDE, ACCUM_DTYPE, GRAD_DTYPE, ALIGNED, False,
                BLOCK,
            )  # fmt: skip
