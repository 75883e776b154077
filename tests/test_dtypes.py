"""Dtypes of parameters, gradients, buffers and moments, alone and mixed."""

import pytest
import torch
from cases import DTYPES, HYPER, LOW_PRECISION, SHAPES, SMALL_SHAPES, WINDOWS
from harness import buffers, copies, give, micro_batches, parameters, run_checked, run_window, values
from oracle import Oracle, rms, same_bits, within

pytestmark = pytest.mark.filterwarnings("error")


@pytest.mark.parametrize("accum_dtype", [torch.float32, torch.bfloat16], ids=["accum-fp32", "accum-bf16"])
@pytest.mark.parametrize("state_dtype", [torch.float32, None], ids=["state-fp32", "state-param"])
@pytest.mark.parametrize("grad", DTYPES.values(), ids=[f"grad-{name}" for name in DTYPES])
@pytest.mark.parametrize("param", DTYPES.values(), ids=[f"param-{name}" for name in DTYPES])
def test_every_combination(make, device, param, grad, state_dtype, accum_dtype):
    """Arithmetic is fp32 (fp64 for fp64 parameters) whatever is stored: errors stay below half a unit of storage."""
    shapes = [SHAPES[name] for name in SMALL_SHAPES]
    params = parameters(*shapes, dtype=param, device=device)
    opt = make(params, lr=0.3, weight_decay=0.3, eps=1e-3, accum_dtype=accum_dtype, state_dtype=state_dtype)
    oracle = Oracle(opt, accum_dtype=accum_dtype, state_dtype=state_dtype)
    for window in ("uneven", "uneven", "N=1"):
        micros = micro_batches(params, WINDOWS[window], dtype=grad)
        run_checked(opt, oracle, micros)
        oracle.adopt()


@pytest.mark.parametrize("hyper", HYPER.values(), ids=HYPER)
@pytest.mark.parametrize("dtype", LOW_PRECISION)
def test_hyperparameters_are_not_rounded_to_the_parameters_dtype(make, device, dtype, hyper):
    params = parameters((1000,), dtype=DTYPES[dtype], device=device)
    opt = make(params, **{"lr": 1.003e-1, **hyper})
    oracle = Oracle(opt)
    for _ in range(3):
        micros = micro_batches(params, WINDOWS["tokens-scaled"])
        run_checked(opt, oracle, micros)
        oracle.adopt()


@pytest.mark.parametrize("accum_dtype", [torch.float32, torch.bfloat16], ids=["accum-fp32", "accum-bf16"])
@pytest.mark.parametrize("param", DTYPES.values(), ids=[f"param-{name}" for name in DTYPES])
@pytest.mark.parametrize("window", ["N=1-scaled", "uneven", "tokens-scaled"])
def test_folding_the_last_add_keeps_the_bits(make, device, param, accum_dtype, window):
    """step(scale) == accumulate(scale); step() also where the buffer rounds: the fused sum is rounded alike."""
    runs = []
    for fold in (True, False):
        torch.manual_seed(7)
        params = parameters((65,), (13, 17), (1,), dtype=param, device=device)
        opt = make(params, lr=0.5, accum_dtype=accum_dtype)
        for _ in range(3):
            run_window(opt, micro_batches(params, WINDOWS[window], absent={(0, 1)}), fold=fold)
        runs.append((opt, params))
    for p, q in zip(runs[0][1], runs[1][1]):
        assert same_bits(p, q)
        for name, value in runs[0][0].state[p].items():
            assert same_bits(value, runs[1][0].state[q][name]), name


def test_mixed_dtypes_in_one_group(make, device):
    params = [p for dtype in DTYPES.values() for p in parameters((65,), (), (0,), dtype=dtype, device=device)]
    params += parameters((7,), (9,), device=device)
    opt = make(params, lr=0.5, weight_decay=0.3)
    oracle = Oracle(opt)
    for n in range(3):
        micros = micro_batches(params, WINDOWS["uneven"], absent={(n, i) for i in range(0, len(params), 2)})
        run_checked(opt, oracle, micros)
        oracle.adopt()


def test_gradient_dtype_may_change_within_a_window(make, device):
    """An autocast region switched on for some micro-batches."""
    params = parameters((65,), device=device)
    params[0].grad_dtype = None
    opt = make(params, lr=0.5)
    oracle = Oracle(opt)
    micros = micro_batches(params, WINDOWS["mean-of-4"])
    for micro, dtype in zip(micros, DTYPES.values()):
        micro.grads[0] = micro.grads[0].to(dtype)
    run_checked(opt, oracle, micros)


@pytest.mark.parametrize("dtype", LOW_PRECISION)
def test_fp32_buffer_keeps_what_the_parameters_dtype_loses(make, device, dtype):
    """256 + 1 is 257 in fp32, 256 in bf16 (2048 + 1 in fp16)."""
    big = 256.0 if dtype == "bf16" else 2048.0
    p = torch.nn.Parameter(torch.zeros(65, dtype=DTYPES[dtype], device=device))
    opt = make([p])
    for value in (big, 1.0):
        p.grad = torch.full_like(p, value)
        opt.accumulate()
    assert (buffers(opt)[0] == big + 1).all()
    assert buffers(opt)[0].dtype == torch.float32


def test_bf16_buffer_rounds_to_nearest_even_at_every_add(make, device):
    p = torch.nn.Parameter(torch.zeros(4, device=device))
    opt = make([p], accum_dtype=torch.bfloat16)
    # one unit in the last place at 256 is 2: halves go to the even neighbour
    for value in ([256.0, 256.0, 258.0, 256.0], [1.0, 1.0 + 2**-10, 1.0, 3.0]):
        p.grad = torch.tensor(value, device=device)
        opt.accumulate()
    assert buffers(opt)[0].tolist() == [256.0, 258.0, 260.0, 260.0]
    assert buffers(opt)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", LOW_PRECISION)
def test_conversions_at_the_edges(make, device, dtype):
    """Subnormals, largest values, halves to round, NaN with a payload: through p.grad and through the parameter."""
    kind = DTYPES[dtype]
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    every = bits.view(kind).to(device)
    p = torch.nn.Parameter(torch.zeros_like(every))
    opt = make([p])
    p.grad = every
    opt.accumulate()
    assert_same_numbers(buffers(opt)[0], every.float())
    # lr=0 without a gradient's influence: every parameter value must come back as it was
    q = torch.nn.Parameter(every.clone())
    opt = make([q], lr=0.0, weight_decay=0.5)
    q.grad = torch.ones_like(q)
    opt.step()
    assert_same_numbers(q, every)


def assert_same_numbers(got, want):
    got, want = got.detach().cpu(), want.cpu()
    assert torch.equal(got.isnan(), want.isnan())
    assert same_bits(got[~want.isnan()], want[~want.isnan()])


@pytest.mark.parametrize("dtype", LOW_PRECISION)
def test_storing_rounds_to_nearest_even(make, device, dtype):
    """Every fp32 value near a tie of the storage dtype rounds as torch rounds it, on a parameter of its own."""
    kind = DTYPES[dtype]
    ties = torch.linspace(1, 2, 4099, dtype=torch.float64).float()
    p = torch.nn.Parameter(torch.zeros(ties.shape, dtype=kind, device=device))
    # beta1=0, beta2=0, eps so large that the update is lr * G / eps: a plain way to write an fp32 value
    opt = make([p], lr=1.0, betas=(0.0, 0.0), eps=2.0**60, weight_decay=0.0)
    p.grad_dtype = None
    p.grad = -(ties * 2.0**60).to(device)
    opt.step()
    expected = -(opt.state[p]["exp_avg"] / (opt.state[p]["exp_avg_sq"].sqrt() + 2.0**60))
    assert rms(p, expected.to(kind).double()) == 0


def test_fp64_parameters_use_fp64_throughout(make, device):
    params = parameters((1000,), dtype=torch.float64, device=device)
    opt = make(params, lr=0.3, weight_decay=0.3)
    twin = copies(params)
    stock = torch.optim.AdamW(twin, lr=0.3, weight_decay=0.3)
    for _ in range(4):
        micros = micro_batches(params, WINDOWS["mean-of-4"])
        twin[0].grad = sum(0.25 * m.grads[0] for m in micros)
        stock.step()
        run_window(opt, micros)
    torch.testing.assert_close(params[0].detach(), twin[0].detach(), rtol=1e-13, atol=1e-13)
    state = opt.state[params[0]]
    assert {state[name].dtype for name in ("exp_avg", "exp_avg_sq")} == {torch.float64}


def test_default_dtype_float64_changes_nothing_but_step(make, device):
    params = parameters((65,), device=device)
    torch.set_default_dtype(torch.float64)
    try:
        opt = make(params, lr=0.5)
        oracle = Oracle(opt)
        for _ in range(2):
            micros = micro_batches(params, WINDOWS["mean-of-4"])
            run_checked(opt, oracle, micros)
    finally:
        torch.set_default_dtype(torch.float32)


def test_buffer_after_a_cast_between_windows(make, device):
    """model.bfloat16() between windows: the next window accumulates for the new dtype."""
    p = torch.nn.Parameter(values((65,), device=device))
    opt = make([p], lr=0.1)
    run_window(opt, micro_batches([p], WINDOWS["mean-of-4"]))
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        p.data = p.data.to(dtype)
        (micro,) = micro_batches([p], [(1.0, None)])
        give(p, micro.grads[0])
        opt.accumulate()
        within("accum", buffers(opt)[0], Oracle(opt).accum([micro])[0], expected)
        with pytest.warns(UserWarning, match="zero_grad"):
            opt.zero_grad()


