"""Products of the covered layers: weight gradients added straight into a buffer, and a forward over a wide weight."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Of the weight's size: what a temporary of a product may have where the GEMM cannot write the buffer itself.
SHARE = 8
# Rows of a weight that a thread takes at a time in a forward over a wide one (a language model's head), so that what
# MKL repacks of it stays in the cache. 32000 rows of 512 with two threads, against all at once: 1.5, 1.1 and 1.2
# times as fast at 64, 256 and 1024 tokens.
ROWS_OF_A_THREAD = 512


def add_product(buffer: Tensor, left: Tensor, right: Tensor, first: bool) -> None:
    """``buffer += left.T @ right``, or ``= `` when ``first`` (the buffer is not read then).

    Args:
        buffer: (m, n), floating, row- or column-major; mutated.
        left, right: (tokens, m) and (tokens, n), of one floating dtype.

    No temporary of the buffer's size: the GEMM accumulates in place where dtypes agree (on CUDA also from 16-bit to
    float32); else tokens are cast, or rows of the product added, block by block.
    """
    (m, n), tokens, wide = buffer.shape, left.shape[0], buffer.dtype
    if left.dtype == wide:
        buffer.addmm_(left.t(), right, beta=0 if first else 1)
    elif buffer.is_cuda and wide == torch.float32:
        torch.addmm(buffer, left.t(), right, beta=0 if first else 1, out_dtype=wide, out=buffer)
    elif wide.itemsize > left.dtype.itemsize:
        block = max(16, m * n // (SHARE * max(1, m + n)))
        for start in range(0, max(1, tokens), block):
            part = slice(start, start + block)
            buffer.addmm_(left[part].to(wide).t(), right[part].to(wide), beta=0 if first and start == 0 else 1)
    else:  # a bf16 buffer of an fp32 weight: products are rounded once, when they are added
        block = max(1, m // SHARE)
        for start in range(0, m, block):
            part = slice(start, start + block)
            product = left[:, part].t() @ right
            buffer[part].copy_(product) if first else buffer[part].add_(product)


def add_row_sum(buffer: Tensor, rows: Tensor, first: bool) -> None:
    """``buffer += rows.sum(0)``, or ``= `` when ``first``: buffer (n,), rows (tokens, n). For biases."""
    if first:
        torch.sum(rows, 0, dtype=buffer.dtype, out=buffer)
    else:
        buffer.add_(rows.sum(0, dtype=torch.promote_types(rows.dtype, torch.float32)))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear(x, weight, bias)``; on the CPU a float32 weight of very many rows goes block by block."""
    rows, columns = weight.shape
    block = ROWS_OF_A_THREAD * torch.get_num_threads()
    wide = rows >= 4 * block and x.numel() > 0
    if not wide or x.device.type != "cpu" or not x.dtype == weight.dtype == torch.float32:
        return F.linear(x, weight, bias)
    tokens = x.reshape(-1, columns)
    y = x.new_empty(*x.shape[:-1], rows)
    by_token = y.view(-1, rows)
    for start in range(0, rows, block):
        part = slice(start, start + block)
        if bias is None:
            torch.mm(tokens, weight[part].t(), out=by_token[:, part])
        else:
            torch.addmm(bias[part], tokens, weight[part].t(), out=by_token[:, part])
    return y
