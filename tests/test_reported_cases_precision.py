"""Failures that users reported in such software: precision, cases 9 to 12 of the project's list."""

import math
from functools import cache

import pytest
import torch
from harness import buffers, parameters, values
from oracle import same_bits

from fused_accum import FusedAccumAdamW
from fused_accum.backends import rounding

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture
def make(on):
    """FusedAccumAdamW on the backend under test."""
    return lambda params, **options: FusedAccumAdamW(params, backend=on[0], **options)


@pytest.mark.parametrize(("accum_dtype", "total"), [(torch.float32, 257.0), (torch.bfloat16, 256.0)])
def test_case_09_small_contributions_are_not_lost(make, accum_dtype, total):
    """bf16 gradients 256, then 1."""
    (p,) = parameters((5,), dtype=torch.bfloat16)
    opt = make([p], accum_dtype=accum_dtype)
    for g in (256.0, 1.0):
        p.grad = torch.full_like(p, g)
        opt.accumulate()
    assert buffers(opt)[0].tolist() == [total] * 5


def moved(make, n, steps=1000, **options):
    """A parameter of ones after steps of lr 1e-4, whose every update is lr."""
    p = torch.nn.Parameter(torch.ones(n, dtype=torch.bfloat16))
    opt = make([p], lr=1e-4, weight_decay=0.0, **options)
    for _ in range(steps):
        p.grad = torch.ones_like(p)
        opt.step()
    return p.detach(), opt


def test_case_10_bf16_parameters_move_at_small_lr(make, on, emulated):
    """They do not by themselves; by chance their mean does as in fp32, within 3 sigma."""
    steps = 100 if emulated else 1000
    stuck, _ = moved(make, 5, steps)
    assert stuck.tolist() == [1.0] * 5
    n = 100_000 if on[0] == "cpu" else 10_000
    p, _ = moved(make, n, steps, stochastic_rounding=True)
    mean, deviation = p.double().mean(), p.double().std()
    assert deviation > 0
    assert abs(float(mean) - (1 - 1e-4 * steps)) < 3 * float(deviation) / math.sqrt(n)


@pytest.mark.parametrize("master", ["fp32", "split"])
def test_case_10_with_masters(make, master):
    p, _ = moved(make, 5, master_weights=master)
    assert p.tolist() == [torch.tensor(0.9).bfloat16().item()] * 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_case_11_masters_are_there_and_used(make, dtype):
    """Not silently ignored: in the state, in fp32, and the parameter follows them."""
    (p,) = parameters((65,), dtype=dtype)
    opt = make([p], lr=1e-3, master_weights="fp32")
    for _ in range(20):
        p.grad = values((65,), dtype)
        opt.step()
    master = opt.state[p]["master"]
    assert master.dtype == torch.float32
    assert (master != p.float()).any()
    assert same_bits(p, master.to(dtype))


def test_case_12_master_from_its_halves():
    """Every low half, beside high halves at the edges; all 2^32 patterns: test_codec.py."""
    low = torch.arange(2**16, dtype=torch.int64)
    for high in (0x0000, 0x007F, 0x3F80, 0x7F7F, 0x8000, 0xBF80, 0xFF7F):
        bits = high << 16 | low
        x = rounding.floats(bits)
        assert torch.equal(rounding.patterns(rounding.joined(*rounding.split(x))), bits)


# ---- training --------------------------------------------------------------------------------------------------


def regression(dtype, optimizer, steps, **options):
    """A small network on a fixed task in ``dtype``; its final parameters and losses."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    for p in model.parameters():  # every run starts from what bf16 and fp16 can hold
        p.data = p.data.bfloat16().float()
    model = model.to(dtype)
    x = torch.randn(64, 16).bfloat16().float()
    y = torch.sin(x @ torch.randn(16, 4)).to(dtype)
    x = x.to(dtype)
    opt = optimizer(list(model.parameters()), lr=1e-3, weight_decay=0.1, **options)
    losses = []
    for _ in range(steps):
        loss = (model(x) - y).float().square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return [p.detach().double() for p in model.parameters()], losses


def distance(some, others):
    return math.sqrt(sum(float((a - b).square().sum()) for a, b in zip(some, others)))


def test_fp16_parameters_with_fp32_masters_train(make):
    _, losses = regression(torch.float16, make, 300, master_weights="fp32")
    assert math.isfinite(losses[-1])
    assert losses[-1] < 0.5 * losses[0]


@cache
def torchs(dtype):
    """Parameters after 1000 of its steps."""
    return regression(dtype, torch.optim.AdamW, 1000)[0]


@pytest.mark.parametrize("options", [{"master_weights": "fp32"}, {"master_weights": "split"}], ids=str)
def test_a_bf16_run_with_masters_stays_nearer_to_fp32_than_torchs(make, options):
    """1000 steps from one start."""
    exact, stock = torchs(torch.float32), torchs(torch.bfloat16)
    ours, _ = regression(torch.bfloat16, make, 1000, **options)
    assert distance(ours, exact) < distance(stock, exact)
