"""Triton kernels in Triton's interpreter: indices, codecs, norms, the scatter. Run by test_triton.py."""

import pytest
import torch
from cases import DTYPES
from harness import feed, micro_batches, parameters, params_of, values
from oracle import same_bits

from fused_accum import FusedAccumAdamW, backends, skipping
from fused_accum.backends import rounding, triton_kernels

BACKEND = backends.registry()["triton"]


def begin(rows, row, block):
    """One program of accumulate_kernel, on ``row`` of ``rows``: accum = 2.5*grad."""
    f32, scale = triton_kernels.tl.float32, torch.tensor([2.5, 0.0])
    flags = {"HAS_GRAD": True, "HAS_ACCUM": False, "STORES": True, "SQUARED": False, "ALIGNED": True}
    triton_kernels.accumulate_kernel[(1,)](
        rows, torch.tensor([row], dtype=torch.int32), scale, scale, f32, f32, f32, **flags, BLOCK=block
    )


def test_element_offsets_beyond_31_bits():
    """A row whose first block is so far below program 0 that it works past element 2**31 (and byte 2**32)."""
    block, far = 1024, 1 << 31
    accum, grad = torch.zeros(block), torch.ones(block)
    pointers = [0, grad.data_ptr() - 4 * far, accum.data_ptr() - 4 * far, 0, 0, 0, 0]
    begin(torch.tensor([[*pointers, far + block, -(far // block), 0, 0, 0, 0]]), 0, block)
    assert (accum == 2.5).all()


def test_rows_beyond_31_bits_of_programs():
    """``first_block`` is 64 bits wide: two rows, the second at a block number no int32 holds."""
    block, far = 1024, 1 << 33
    accum, grad = torch.zeros(block), torch.ones(block)
    base = [0, grad.data_ptr() - 4 * block * far, accum.data_ptr() - 4 * block * far, 0, 0, 0, 0]
    begin(torch.tensor([[0] * 13, [*base, block * far + 5, -far, 0, 0, 0, 0]]), 1, block)
    assert accum.tolist() == [2.5] * 5 + [0.0] * (block - 5)


def test_every_kind_of_master_is_split_and_joined():
    """Upper halves at and beside the edges of exponents, with those of the lower half, through an update that changes
    nothing."""
    edges = torch.arange(-2, 3) + 2**7 * torch.arange(2**9)[:, None]
    bits = (edges % 2**16).flatten()[:, None] * 2**16 + torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    x = rounding.floats(bits.flatten())
    high, low = rounding.split(x)
    chosen = x.isfinite() & high.isfinite() & (x != 0)
    p = torch.nn.Parameter(high[chosen])
    opt = FusedAccumAdamW([p], lr=0.0, weight_decay=0.0, master_weights="split", backend="triton")
    opt.state[p]["master"] = low[chosen]
    p.grad = torch.zeros_like(p)
    opt.step()
    assert same_bits(rounding.joined(p.detach(), opt.state[p]["master"]), x[chosen])


# -- norms -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [[(0.3, None)], [(0.5, None), (0.3, None)]], ids=["N=1", "N=2"])
def test_the_last_sum_is_not_read_for_its_norm(monkeypatch, window):
    """Only what no pass has written: the gradient of a window of one."""
    measured = []
    measure = BACKEND.measure
    monkeypatch.setattr(
        BACKEND, "measure", lambda rows, scale, device: measured.extend(rows) or measure(rows, scale, device)
    )
    params = parameters((65,), (3000,))
    opt = FusedAccumAdamW(params, max_grad_norm=0.1, backend="triton")
    micros = micro_batches(params, window, absent={(1, 1)} if len(window) > 1 else ())
    for micro in micros[:-1]:
        feed(opt, micro)
    feed(opt, micros[-1], last=True)
    assert len(measured) == (2 if len(window) == 1 else 0)
    sums = [sum(m.scale * m.grads[i].double() for m in micros if m.grads[i] is not None) for i in range(2)]
    assert float(opt.grad_norm) == pytest.approx(float(torch.cat(sums).norm()), rel=1e-6)


@pytest.mark.parametrize("on_device", [False, True], ids=["on the host", "on the device"])
def test_clipped_updates_have_the_bits_of_the_cpu(monkeypatch, on_device):
    """The factor comes from device memory, or is known to the host."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)  # float64 shows the last bit of the factor
    start = [p for dtype in dtypes for p in parameters((65,), (1030,), dtype=dtype)]
    runs = []
    for backend in ("cpu", "triton"):
        monkeypatch.setattr(skipping, "on_host", lambda *_, known=backend == "cpu" or not on_device: known)
        torch.manual_seed(3)
        params = [torch.nn.Parameter(p.detach().clone()) for p in start]
        opt = FusedAccumAdamW(params, lr=0.3, max_grad_norm=0.7, master_weights="fp32", backend=backend)
        for absent in ((), {(0, 0), (1, 1)}):
            micros = micro_batches(params, [(1.0, 3), (0.5, 5)], absent=absent)
            feed(opt, micros[0])
            feed(opt, micros[1], last=True)
        runs.append(opt)
    torch.testing.assert_close(runs[1].grad_norm, runs[0].grad_norm, rtol=1e-14, atol=0)
    for p, q in zip(*map(params_of, runs)):
        assert same_bits(p, q)
        for name, value in runs[0].state[p].items():
            assert same_bits(value, runs[1].state[q][name]), name


# -- the scatter of an embedding -----------------------------------------------------------------------------------


@pytest.mark.parametrize("accum", ["fp32", "fp64", "bf16"])
@pytest.mark.parametrize("grad", DTYPES)
def test_scattered_rows_have_the_bits_of_the_cpu(accum, grad):
    for width, count, high, skip in ((1, 5, 3, None), (64, 40, 7, 2), (130, 9, 400, None), (1025, 7, 2, 1)):
        index = torch.randint(high, (count,))
        rows = values((count, width), DTYPES[grad])
        rows[0] = -0.0
        start = values((high, width), DTYPES[accum])
        ours, theirs = start.clone(), start.clone()
        BACKEND.scatter_rows(ours, index, rows, skip)
        backends.registry()["cpu"].scatter_rows(theirs, index, rows, skip)
        assert same_bits(ours, theirs)


def test_scatter_of_layouts_and_of_nothing():
    start = values((9, 70))
    index = torch.tensor([3, 3, 8, 0])
    for rows in (values((70, 4)).t(), values((4, 80))[:, 5:75], values((1, 1)).expand(4, 70), values((0, 70))):
        ours, theirs = start.clone(), start.clone()
        BACKEND.scatter_rows(ours, index[: len(rows)], rows, None)
        backends.registry()["reference"].scatter_rows(theirs, index[: len(rows)], rows, None)
        torch.testing.assert_close(ours, theirs)
    with pytest.raises(IndexError, match="an index of 0 to 9 is outside the 9 rows"):
        BACKEND.scatter_rows(start, torch.tensor([0, 9]), torch.ones(2, 70), None)
