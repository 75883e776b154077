"""More than 2^31 elements (reported case 22) for the CUDA kernels on the emulator, with memory that is recorded and
not touched. Run by test_cuda_emulated.py."""

import pytest
import torch

from fused_accum.backends import cuda
from fused_accum.rows import Rows
from fused_accum.state import Hyper

LARGE = 2**31 + 4096
SAMPLE = 97  # one in so many blocks runs, besides the first and the last


def covered(launch):
    """Elements that belong to the blocks that ran, of as many for every block."""
    assert LARGE % launch.grid == 0
    ran = [b for b in range(launch.grid) if b < 64 or b + 64 >= launch.grid or b % SAMPLE == 0]
    return LARGE // launch.grid * len(ran)


@pytest.fixture
def large(emulation):
    """A tensor of LARGE elements, of which only addresses are used: nothing is touched, so no memory is taken."""
    tensors = []

    def make(dtype):
        tensors.append(torch.empty(LARGE, dtype=dtype))
        return tensors[-1], emulation.phantom(tensors[-1])

    emulation.sample_blocks(SAMPLE)
    return make


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("first", [True, False], ids=["write", "add"])
def test_accumulate_beyond_31_bits(emulation, large, dtype, first):
    (accum, to), (grad, source) = large(torch.float32), large(dtype)
    cuda.BACKEND.accumulate([accum], [grad], [first], 2.0)
    (launch,) = emulation.launches()
    count = covered(launch)
    assert emulation.phantom_counts(to) == (0 if first else count, count, 0)
    assert emulation.phantom_counts(source) == (count, 0, 0)
    assert_ends_were_written(emulation, to)


@pytest.mark.parametrize("way", ["gradient", "buffer", "both"])
def test_step_beyond_31_bits(emulation, large, way):
    (param, p), (exp_avg, m), (exp_avg_sq, v) = large(torch.bfloat16), large(torch.float32), large(torch.float32)
    grad, g = large(torch.bfloat16) if way != "buffer" else (None, None)
    accum, a = large(torch.float32) if way != "gradient" else (None, None)
    cuda.BACKEND.adamw(Rows(
        params=[param], grads=[grad], accums=[accum], present=[accum is not None], accum_dtypes=[torch.float32],
        exp_avgs=[exp_avg], exp_avg_sqs=[exp_avg_sq], max_exp_avg_sqs=[None], steps=[torch.zeros(())], groups=[0],
        hypers=[Hyper(0.1, 0.9, 0.999, 1e-8, 0.1, False, False)], scale=1.0, coefficient=1.0,
    ))  # fmt: skip
    _, launch = emulation.launches()
    count = covered(launch)
    for written in (p, m, v, *([a] if a is not None else [])):
        assert emulation.phantom_counts(written) == (count, count, 0)
        assert_ends_were_written(emulation, written)
    if g is not None:
        assert emulation.phantom_counts(g) == (count, 0, 0)


def test_strided_rows_beyond_31_bits(emulation, large):
    """A gradient of stride 2, in a row that has as many elements: places beyond 2^32, of which none wraps around."""
    n = LARGE // 2
    accum, to = large(torch.float32)
    grad, source = large(torch.bfloat16)
    cuda.BACKEND.accumulate([accum[:n]], [grad[::2]], [True], 1.0)
    emulation.launches()
    read, _, _ = emulation.phantom_counts(source)
    _, written, again = emulation.phantom_counts(to)
    assert read == written > n // SAMPLE
    assert again == 0
    assert_ends_were_written(emulation, to, n)


def test_scattered_rows_beyond_31_bits(emulation, large):
    """The last row of a buffer, and all of a gradient, of more than 2^31 elements."""
    (accum, to), (grad, source) = large(torch.float32), large(torch.bfloat16)
    width = LARGE // 8
    index = torch.tensor([7, 3, 0, 6, 5, 4, 1, 2])
    cuda.BACKEND.scatter_rows(accum.view(8, width), index, grad.view(8, width), None)
    emulation.launches()
    count, _, _ = emulation.phantom_counts(source)
    assert count > LARGE // (2 * SAMPLE)
    assert emulation.phantom_counts(to) == (count, count, 0)
    assert_ends_were_written(emulation, to)


def assert_ends_were_written(emulation, phantom, numel=LARGE):
    for element in (0, numel - 1):
        assert emulation.phantom_was_written(phantom, element)
