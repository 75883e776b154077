"""step(): equations (2) to (6) against the oracle, and torch.optim.AdamW's semantics around them."""

import warnings
from contextlib import nullcontext

import pytest
import torch
from cases import BEYOND_CACHE, HYPER, SHAPES, SMALL_SHAPES, WINDOWS
from harness import assert_same_run, live_storages, micro_batches, parameters, run_checked, run_window, values
from oracle import Micro, Oracle, same_bits

pytestmark = pytest.mark.filterwarnings("error")


@pytest.mark.parametrize("window", ["N=1-scaled", "mean-of-4", "tokens"])
@pytest.mark.parametrize("hyper", HYPER.values(), ids=HYPER)
@pytest.mark.parametrize("fold", [True, False], ids=["last-add-in-step", "last-add-before"])
def test_windows_follow_the_equations(make, device, hyper, window, fold):
    params = parameters(*(SHAPES[name] for name in SMALL_SHAPES), device=device)
    opt = make(params, **hyper)
    oracle = Oracle(opt)
    for _ in range(4):
        micros = micro_batches(params, WINDOWS[window])
        oracle.window(micros)
        run_window(opt, micros, fold=fold)
        oracle.check()
        assert opt.pending == (0, 0.0)


@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
def test_step_with_the_last_microbatch_equals_accumulate_then_step(make, device, window):
    """Bit for bit, with parameters that miss the last micro-batch, all others, or the whole window."""
    shapes = [SHAPES[name] for name in SMALL_SHAPES]
    runs = []
    for fold in (True, False):
        torch.manual_seed(3)
        params = parameters(*shapes, device=device)
        opt = make(params, lr=0.7, betas=(0.7, 0.9), weight_decay=0.3, amsgrad=True)
        last = len(window) - 1
        absent = {(last, 2)} | {(k, 4) for k in range(last)} | {(k, 5) for k in range(last + 1)}
        for _ in range(3):
            run_window(opt, micro_batches(params, window, absent=absent), fold=fold)
        runs.append(opt)
    assert_same_run(*runs)


@pytest.mark.parametrize("shape", [*SHAPES.values(), BEYOND_CACHE], ids=[*SHAPES, "beyond-cache"])
def test_every_size(make, device, shape):
    torch.set_num_threads(3)
    params = parameters(shape, device=device)
    opt = make(params, lr=0.5, weight_decay=0.3)
    oracle = Oracle(opt)
    for window in ("N=1", "sum"):
        micros = micro_batches(params, [(scale / len(WINDOWS[window]), w) for scale, w in WINDOWS[window]])
        run_checked(opt, oracle, micros)


def test_sizes_mixed_in_one_bucket(make, device):
    """Large and small tensors side by side: chunks must neither overlap nor leave gaps."""
    torch.set_num_threads(3)
    shapes = [SHAPES[name] for name in SHAPES] + [SHAPES[name] for name in reversed(SHAPES)]
    params = parameters(*shapes, device=device)
    opt = make(params, lr=0.5, weight_decay=0.3)
    oracle = Oracle(opt)
    for _ in range(2):
        micros = micro_batches(params, WINDOWS["uneven"])
        run_checked(opt, oracle, micros)


def test_many_small_parameters(make, device):
    params = parameters(*[(n % 7 + 1,) for n in range(500)], device=device)
    opt = make(params, lr=0.5, weight_decay=0.3)
    oracle = Oracle(opt)
    micros = micro_batches(params, WINDOWS["sum"], absent={(k, i) for k in (0, 1) for i in range(0, 500, 3)})
    run_checked(opt, oracle, micros)


@pytest.mark.parametrize("accum_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_buffers_read_exactly_zero_after_the_step(make, device, accum_dtype):
    """Whatever they held, NaN and inf too. Buffers are found as the storages that accumulate() brings to life."""
    params = parameters((64,), (64, 32), device=device)  # multiples of a cache line: no padding in between
    opt = make(params, lr=0.5, accum_dtype=accum_dtype)
    run_window(opt, micro_batches(params, [(1.0, None)]))
    micros = micro_batches(params, [(1.0, None)] * 3)
    micros[1].grads[1][3] = float("nan")
    micros[1].grads[1][5] = -float("inf")
    known = live_storages()
    for fold in (True, False):
        for micro in micros[:2]:
            for p, g in zip(params, micro.grads):
                p.grad = g
            opt.accumulate()
        new = {key: s for key, s in live_storages().items() if key not in known}
        held = [torch.empty(0, dtype=accum_dtype, device=device).set_(s) for s in new.values()]
        assert sum(x.numel() for x in held) == 64 + 64 * 32
        assert all(x.count_nonzero() > 0 for x in held)
        for p, g in zip(params, micros[2].grads if fold else [None, None]):
            p.grad = g
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # 3.0, then 2.0: not this test's business
            opt.step()
        assert all(x.count_nonzero() == 0 and not x.signbit().any() for x in held)


def test_step_per_parameter(make, device):
    """A parameter's bias correction counts its own updates; no gradient leaves it and its state untouched."""
    params = parameters((65,), (17,), (9,), device=device)
    opt = make(params, lr=0.5, weight_decay=0.5)
    oracle = Oracle(opt)
    for n in range(6):
        absent = {(k, 1) for k in range(2) if n % 2} | {(k, 2) for k in range(2)}
        micros = micro_batches(params, WINDOWS["sum"], absent=absent)
        run_checked(opt, oracle, micros)
    assert [float(opt.state[p]["step"]) for p in params[:2]] == [6, 3]
    assert params[2] not in opt.state


def test_zero_gradient_is_not_none(make, device):
    params = parameters((65,), (65,), device=device)
    opt = make(params, lr=0.5, weight_decay=0.5)
    oracle = Oracle(opt)
    for grads in ([values((65,), device=device)] * 2, [torch.zeros(65, device=device), None]):
        oracle.window([Micro(grads)])
        run_window(opt, [Micro(grads)])
        oracle.check()
    assert [float(opt.state[p]["step"]) for p in params] == [2, 1]


def test_second_step_does_nothing(make, device):
    params = parameters((65,), (), device=device)
    opt = make(params, lr=0.5, weight_decay=0.5)
    for window in ("N=1", "sum"):
        with pytest.warns(UserWarning, match="weight=") if window == "sum" else nullcontext():
            run_window(opt, micro_batches(params, WINDOWS[window]))
        before = [p.detach().clone() for p in params], [float(opt.state[p]["step"]) for p in params]
        opt.step()
        opt.step(scale=3.0)
        opt.step(weight=2.0)
        assert all(same_bits(p, x) for p, x in zip(params, before[0]))
        assert [float(opt.state[p]["step"]) for p in params] == before[1]


def test_step_without_gradients_makes_no_state(make, device):
    params = parameters((65,), device=device)
    opt = make(params)
    assert opt.step() is None
    assert len(opt.state) == 0
