"""Backend.scatter_rows: rows added by index, deterministic, at the tokens' cost."""

import pytest
import torch
from cases import DTYPES
from oracle import same_bits

from fused_accum import backends


@pytest.fixture
def scatter(on):
    return backends.registry()[on[0]].scatter_rows


def exact(accum, index, grad, skip):
    kept = index != skip if skip is not None else torch.ones_like(index, dtype=torch.bool)
    return accum.double().index_add(0, index[kept], grad[kept].double())


@pytest.mark.parametrize("width", [1, 3, 64, 511, 512, 513, 1100])
@pytest.mark.parametrize("count", [0, 1, 5, 63, 64, 65, 300])
@pytest.mark.parametrize("skip", [None, 2])
def test_scattered_rows_against_float64(scatter, device, width, count, skip):
    accum = torch.randn(11, width, device=device)
    index = torch.randint(11, (count,), device=device)
    grad = torch.randn(count, width, device=device)
    want = exact(accum, index, grad, skip)
    scatter(accum, index, grad, skip)
    torch.testing.assert_close(accum.double(), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("accum", ["fp32", "fp64", "bf16"])
@pytest.mark.parametrize("grad", DTYPES)
@pytest.mark.parametrize("width", [10, 16])
def test_dtypes_of_scattered_rows(scatter, device, accum, grad, width):
    total = torch.randn(7, width, device=device).to(DTYPES[accum])
    index = torch.randint(7, (40,), device=device)
    rows = torch.randn(40, width, device=device).to(DTYPES[grad])
    want = exact(total, index, rows, None)
    scatter(total, index, rows, None)
    tolerance = {"fp32": 1e-5, "fp64": 1e-10 if grad == "fp64" else 1e-5, "bf16": 0.1}[accum]
    torch.testing.assert_close(total.double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("high", [1, 4, 1000])
def test_same_bits_for_any_number_of_threads(scatter, device, high):
    index = torch.randint(high, (700,), device=device)
    grad = torch.randn(700, 600, device=device)
    results = []
    for threads in (1, 2, 7):
        torch.set_num_threads(threads)
        accum = torch.zeros(1000, 600, device=device)
        scatter(accum, index, grad, None)
        results.append(accum)
    assert all(same_bits(results[0], other) for other in results[1:])


def test_rows_that_no_token_names_are_not_touched(scatter, device):
    accum = torch.full((9, 5), float("nan"), device=device)
    accum[3] = 1
    scatter(accum, torch.tensor([3, 3], device=device), torch.ones(2, 5, device=device), None)
    assert accum[3].tolist() == [3.0] * 5
    assert accum.isnan().sum() == 40


def test_an_index_out_of_range_changes_nothing(scatter, on):
    if on[0] not in ("cpu", "reference"):
        pytest.skip("on a GPU the forward of such an index ends the process")
    accum = torch.zeros(9, 5)
    with pytest.raises(IndexError):
        scatter(accum, torch.tensor([3, 9]), torch.ones(2, 5), None)
    assert not accum.any()
