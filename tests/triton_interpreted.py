"""Index arithmetic of the Triton kernels, in Triton's interpreter. Run by test_triton.py."""

import torch

from fused_accum.backends import triton_kernels


def test_element_offsets_beyond_31_bits():
    """A row whose first block is so far below program 0 that it works past element 2**31 (and byte 2**32)."""
    block, far = 1024, 1 << 31
    accum, grad = torch.zeros(block), torch.ones(block)
    pointers = [0, grad.data_ptr() - 4 * far, accum.data_ptr() - 4 * far, 0, 0, 0]
    rows = torch.tensor([[*pointers, far + block, -(far // block), 0]])
    f32 = triton_kernels.tl.float32
    triton_kernels.accumulate_kernel[(1,)](
        rows, torch.zeros(1, dtype=torch.int32), torch.tensor([2.5]), f32, f32, f32, False, True, BLOCK=block
    )
    assert (accum == 2.5).all()


def test_rows_beyond_31_bits_of_programs():
    """``first_block`` is 64 bits wide: two rows, the second at a block number no int32 holds."""
    block, far = 1024, 1 << 33
    accum, grad = torch.zeros(block), torch.ones(block)
    base = [0, grad.data_ptr() - 4 * block * far, accum.data_ptr() - 4 * block * far, 0, 0, 0]
    rows = torch.tensor([[0] * 9, [*base, block * far + 5, -far, 0]])
    f32 = triton_kernels.tl.float32
    triton_kernels.accumulate_kernel[(1,)](
        rows, torch.ones(1, dtype=torch.int32), torch.tensor([2.5]), f32, f32, f32, False, True, BLOCK=block
    )
    assert accum.tolist() == [2.5] * 5 + [0.0] * (block - 5)
