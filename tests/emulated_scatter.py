"""Rows added by index, as of an embedding, by the CUDA kernels on the emulator. Run by test_cuda_emulated.py."""

import pytest
import torch
from oracle import same_bits

from fused_accum.backends import cuda, registry

ILLEGAL_ADDRESS = 700


@pytest.mark.parametrize(("width", "tokens", "rows", "offset"), [
    (512, 300, 40, 0), (512, 300, 1, 0), (516, 100, 7, 0), (513, 100, 1000, 0), (64, 9, 3, 1), (1, 5, 2, 0),
    (300, 500, 5, 0),
])  # fmt: skip
@pytest.mark.parametrize(("accum", "grad"), [
    ("float32", "float32"), ("float32", "bfloat16"), ("float32", "float64"), ("bfloat16", "float16"),
    ("float64", "float32"),
])  # fmt: skip
def test_scattered_rows_have_the_bits_of_the_cpu(emulation, width, tokens, rows, offset, accum, grad):
    """Rows that one token names and that all name; pieces that are wide, and single elements where rows are not
    aligned; a row that is left out; in any order of threads."""
    total = torch.randn(rows * width + offset)[offset:].view(rows, width).to(getattr(torch, accum))
    if offset:
        total = torch.cat([total.flatten()[:1], total.flatten()])[1:].view(rows, width)
    index, given = torch.randint(rows, (tokens,)), torch.randn(tokens, width).to(getattr(torch, grad))
    left_out = int(index[0]) if rows > 3 else None
    expected, before = total.clone(), total.clone()
    registry()["cpu"].scatter_rows(expected, index, given, left_out)
    emulation.check_races(True)
    for seed in (0, 7):
        emulation.seed(seed)
        total.copy_(before)
        cuda.BACKEND.scatter_rows(total, index, given, left_out)
        assert same_bits(total, expected)
    assert {launch.kind for launch in emulation.launches()} == {"ScatterJob"}


@pytest.mark.parametrize(("rows", "tokens"), [(3, 100), (30_000, 100), (3, 1000)])
def test_the_cost_of_scattered_rows_is_that_of_their_tokens(emulation, rows, tokens):
    """Elements read and written, and blocks: none for rows that no token names."""
    total, index, given = torch.zeros(rows, 8), torch.arange(tokens) % 3, torch.randn(tokens, 8)
    written, read = emulation.phantom(total), emulation.phantom(given)
    cuda.BACKEND.scatter_rows(total, index, given, None)
    (launch,) = emulation.launches()
    assert launch.grid == -(-tokens * 2 // launch.block)
    assert emulation.phantom_counts(written) == (24, 24, 0)
    assert emulation.phantom_counts(read) == (tokens * 8, 0, 0)


def test_scattered_rows_go_to_a_device_and_stream(emulation):
    emulation.set_device(1)
    total, grad, index = torch.zeros(2, 4), torch.ones(3, 4), torch.tensor([0, 0, 1])
    order = torch.arange(3)
    executor, place = cuda._CUDA.Cuda(2, emulation.stream(2)), cuda.place_of(total.device)
    cuda._C.scatter_rows(total, index.data_ptr(), order.data_ptr(), grad, -1, executor, place)
    (launch,) = emulation.launches()
    assert (launch.device, launch.stream != 0, emulation.device()) == (2, True, 1)
    assert total.tolist() == [[2.0] * 4, [1.0] * 4]
    emulation.fail("launch", ILLEGAL_ADDRESS)
    with pytest.raises(RuntimeError, match="cudaErrorIllegalAddress"):
        cuda._C.scatter_rows(total, index.data_ptr(), order.data_ptr(), grad, -1, executor, place)
    assert emulation.device() == 1


@pytest.mark.parametrize(("accum", "grad", "words"), [
    (torch.zeros(2, 4), torch.ones(3, 5), "rows of one length"),
    (torch.zeros(4, 2).t(), torch.ones(3, 4), "contiguous matrices"),
    (torch.zeros(2, 4), torch.ones(3, 4).double(), "both be float64"),
    (torch.zeros(2, 4), torch.ones(12), "contiguous matrices"),
])  # fmt: skip
def test_matrices_that_do_not_fit_are_refused(emulation, accum, grad, words):
    index = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match=words):
        cuda._C.scatter_rows(
            accum, index.data_ptr(), index.data_ptr(), grad, -1, cuda._CUDA.Cuda(0, 0), cuda.place_of(accum.device)
        )
    assert emulation.launches() == []


def test_indices_that_no_row_has_add_nothing(emulation):
    total = torch.zeros(2, 4)
    cuda.BACKEND.scatter_rows(total, torch.tensor([1, -1, 2, 1]), torch.ones(4, 4), None)
    assert total.tolist() == [[0.0] * 4, [2.0] * 4]
