"""step(): equations (2) to (6) against the oracle, and torch.optim.AdamW's semantics around them."""

import warnings
from contextlib import nullcontext

import pytest
import torch
from cases import BEYOND_CACHE, HYPER, SHAPES, SMALL_SHAPES, WINDOWS
from harness import (
    assert_same_run,
    copies,
    live_storages,
    micro_batches,
    parameters,
    params_of,
    run_window,
    values,
)
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
        oracle.window(micros)
        run_window(opt, micros)
        oracle.check()


def test_sizes_mixed_in_one_bucket(make, device):
    """Large and small tensors side by side: chunks must neither overlap nor leave gaps."""
    torch.set_num_threads(3)
    shapes = [SHAPES[name] for name in SHAPES] + [SHAPES[name] for name in reversed(SHAPES)]
    params = parameters(*shapes, device=device)
    opt = make(params, lr=0.5, weight_decay=0.3)
    oracle = Oracle(opt)
    for _ in range(2):
        micros = micro_batches(params, WINDOWS["uneven"])
        oracle.window(micros)
        run_window(opt, micros)
        oracle.check()


def test_many_small_parameters(make, device):
    params = parameters(*[(n % 7 + 1,) for n in range(500)], device=device)
    opt = make(params, lr=0.5, weight_decay=0.3)
    oracle = Oracle(opt)
    micros = micro_batches(params, WINDOWS["sum"], absent={(k, i) for k in (0, 1) for i in range(0, 500, 3)})
    oracle.window(micros)
    run_window(opt, micros)
    oracle.check()


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
        oracle.window(micros)
        run_window(opt, micros)
        oracle.check()
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


# ---- groups and hyper-parameters -------------------------------------------------------------------------


def test_groups_have_their_own_hyperparameters(make, device):
    params = parameters((65,), (33,), (17,), (9,), device=device)
    opt = make(
        [
            {"params": params[:1], "lr": 0.9, "weight_decay": 0.0},
            {"params": params[1:2], "betas": (0.5, 0.6), "eps": 0.01},
            {"params": params[2:3], "amsgrad": True, "maximize": True},
            {"params": params[3:]},
        ],
        lr=0.3,
        weight_decay=0.4,
    )
    oracle = Oracle(opt)
    for n in range(4):
        opt.param_groups[0]["lr"] = 0.9 / (n + 1)  # read anew at every step
        opt.param_groups[1]["betas"] = (0.5 + 0.1 * n, 0.6 + 0.1 * n)
        opt.param_groups[3]["weight_decay"] = 0.1 * n
        opt.param_groups[3]["eps"] = 10.0 ** (-2 * n)
        micros = micro_batches(params, WINDOWS["uneven"])
        oracle.window(micros)
        run_window(opt, micros)
        oracle.check()


def test_defaults_are_those_of_torch():
    import inspect

    from fused_accum import FusedAccumAdamW

    ours = inspect.signature(FusedAccumAdamW.__init__).parameters
    theirs = inspect.signature(torch.optim.AdamW.__init__).parameters
    for name, parameter in theirs.items():
        assert ours[name].default == parameter.default, name
        assert ours[name].kind == parameter.kind, name
    assert issubclass(FusedAccumAdamW, torch.optim.AdamW)


def test_a_group_holds_what_was_given(make, device):
    given = {"lr": 0.3, "betas": (0.6, 0.7), "eps": 1e-3, "weight_decay": 0.2, "amsgrad": True, "maximize": True}
    opt = make(parameters((3,), device=device), **given)
    assert {key: opt.param_groups[0][key] for key in given} == given
    stock = torch.optim.AdamW(parameters((3,)), **given)
    assert opt.param_groups[0].keys() == stock.param_groups[0].keys()
    assert opt.defaults.keys() == stock.defaults.keys()


@pytest.mark.parametrize("lr_dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_tensor_lr_and_betas(make, device, lr_dtype):
    params = parameters((65,), device=device)
    lr = torch.tensor(0.5, dtype=lr_dtype, device=device)
    beta1, beta2 = torch.tensor(0.8, device=device), torch.tensor(0.9, device=device)
    # foreach=False: what torch asks for tensor betas
    opt = make(params, lr=lr, betas=(beta1, beta2), weight_decay=0.3, foreach=False)
    oracle = Oracle(opt)
    for n in range(3):
        lr.fill_(0.5 / (n + 1))
        beta1.fill_(0.8 - 0.2 * n)
        micros = micro_batches(params, WINDOWS["N=1"])
        oracle.window(micros)
        run_window(opt, micros)
        oracle.check()
    assert opt.param_groups[0]["lr"] is lr


def test_amsgrad_switched_on_and_off(make, device):
    """Switched on later the maximum starts from zero (torch raises KeyError); off, it is kept as it was."""
    params = parameters((300,), device=device)
    opt = make(params, lr=0.5, betas=(0.5, 0.5), weight_decay=0.3)
    oracle = Oracle(opt)
    for amsgrad in (False, False, True, True, False, True):
        opt.param_groups[0]["amsgrad"] = amsgrad
        micros = micro_batches(params, WINDOWS["sum"])
        oracle.window(micros)
        run_window(opt, micros)
        oracle.check()
    state = opt.state[params[0]]
    assert (state["max_exp_avg_sq"] > state["exp_avg_sq"]).any()


def test_maximize_can_be_switched(make, device):
    params = parameters((300,), device=device)
    opt = make(params, lr=0.5)
    oracle = Oracle(opt)
    for maximize in (False, True, False):
        opt.param_groups[0]["maximize"] = maximize
        micros = micro_batches(params, WINDOWS["sum"])
        oracle.window(micros)
        run_window(opt, micros)
        oracle.check()


@pytest.mark.parametrize(
    "options",
    [{"foreach": True}, {"foreach": False}, {"fused": True}, {"fused": False}, {"capturable": True}],
    ids=str,
)
def test_torch_switches_are_accepted_and_change_nothing(make, device, options):
    runs = []
    for extra in ({}, options):
        torch.manual_seed(5)
        params = parameters((65,), (9,), device=device)
        opt = make(params, lr=0.5, **extra)
        for _ in range(2):
            run_window(opt, micro_batches(params, WINDOWS["uneven"]))
        runs.append(opt)
    for p, q in zip(*map(params_of, runs)):
        assert same_bits(p, q)


# ---- closures --------------------------------------------------------------------------------------------


def test_closure_runs_first_with_grad_enabled_and_its_gradients_count(make, device):
    params = parameters((65,), device=device)
    opt = make(params, lr=0.5, weight_decay=0.3)
    oracle = Oracle(opt)
    target = values((65,), device=device)
    seen = []

    def closure():
        seen.append((torch.is_grad_enabled(), params[0].detach().clone()))
        opt.zero_grad()
        loss = ((params[0] - target) ** 2).sum()
        loss.backward()
        return loss

    before = params[0].detach().clone()
    oracle.window([Micro([2 * (before - target)])])
    with torch.no_grad():
        loss = opt.step(closure)
    assert seen[0][0]
    assert same_bits(seen[0][1], before)
    torch.testing.assert_close(loss.detach(), ((before - target) ** 2).sum())
    oracle.check()


def test_closure_may_accumulate(make, device):
    params = parameters((65,), (4,), device=device)
    opt = make(params, lr=0.5)
    oracle = Oracle(opt)
    micros = micro_batches(params, WINDOWS["tokens-scaled"], absent={(0, 1)})

    def closure():
        for micro in micros[:-1]:
            for p, g in zip(params, micro.grads):
                p.grad = g
            opt.accumulate(micro.scale, weight=micro.weight)
        for p, g in zip(params, micros[-1].grads):
            p.grad = g
        return "anything"

    oracle.window(micros)
    assert opt.step(closure, scale=micros[-1].scale, weight=micros[-1].weight) == "anything"
    oracle.check()


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_closure_that_raises_leaves_the_optimizer_usable(make, device, error):
    params = parameters((65,), device=device)
    opt = make(params, lr=0.5)
    oracle = Oracle(opt)
    micros = micro_batches(params, WINDOWS["sum"])
    params[0].grad = micros[0].grads[0]
    opt.accumulate()

    def closure():
        raise error

    with pytest.raises(error):
        opt.step(closure)
    assert opt.pending == (1, 0.0)
    params[0].grad = micros[1].grads[0]
    oracle.window(micros)
    opt.step()
    oracle.check()


# ---- around the step -------------------------------------------------------------------------------------


def test_hooks(make, device):
    params = parameters((5,), device=device)
    opt = make(params, lr=0.5)
    calls = []
    before = params[0].detach().clone()
    opt.register_step_pre_hook(lambda *a: calls.append(("pre", same_bits(params[0], before))))
    opt.register_step_post_hook(lambda *a: calls.append(("post", same_bits(params[0], before))))
    run_window(opt, micro_batches(params, WINDOWS["mean-of-4"]))
    assert calls == [("pre", True), ("post", False)]


def test_pre_hook_may_rewrite_the_arguments(make, device):
    params = parameters((65,), device=device)
    opt = make(params, lr=0.5)
    oracle = Oracle(opt)
    opt.register_step_pre_hook(lambda opt, args, kwargs: (args, {**kwargs, "scale": 0.25}))
    (micro,) = micro_batches(params, [(0.25, None)])
    params[0].grad = micro.grads[0]
    oracle.window([micro])
    opt.step(scale=1.0)
    oracle.check()


def test_profiler_shows_the_step(make, device):
    params = parameters((5,), device=device)
    opt = make(params)
    params[0].grad = torch.ones_like(params[0])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        opt.step()
    assert "Optimizer.step#FusedAccumAdamW.step" in {event.key for event in profile.key_averages()}


def test_versions_are_bumped(make, device):
    """autograd must notice that the parameters changed under a saved graph, as with any in-place update."""
    params = parameters((5,), device=device)
    opt = make(params)
    run_window(opt, micro_batches(params, [(0.5, None)] * 2))
    state = opt.state[params[0]]
    watched = [params[0], state["exp_avg"], state["exp_avg_sq"]]
    versions = [t._version for t in watched]
    loss = (params[0] ** 2).sum()
    run_window(opt, micro_batches(params, [(0.5, None)] * 2))
    assert all(t._version > v for t, v in zip(watched, versions))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_version_of_a_gradient_is_not_bumped(make, device):
    """Nothing writes into it; a graph that saved it stays valid."""
    params = parameters((5,), device=device)
    opt = make(params)
    grads = [torch.ones(5, device=device) for _ in range(2)]
    params[0].grad = grads[0]
    opt.accumulate(0.5)
    params[0].grad = grads[1]
    opt.step(scale=0.5)
    assert [g._version for g in grads] == [0, 0]


@pytest.mark.parametrize(("first", "second"), [(False, True), (True, True), (True, False)])
def test_inference_mode(make, device, first, second):
    """As torch: parameters made outside may be stepped inside. (Torch's state made inside cannot be stepped
    outside; ours is made outside inference mode and can.)"""
    params = parameters((65,), device=device)
    opt = make(params, lr=0.5)
    oracle = Oracle(opt)
    for mode in (first, second):
        micros = micro_batches(params, WINDOWS["mean-of-4"])
        oracle.window(micros)
        with torch.inference_mode(mode):
            run_window(opt, micros)
        oracle.check()


def test_parameter_made_in_inference_mode(make, device):
    with torch.inference_mode():
        p = torch.nn.Parameter(torch.ones(5, device=device))
        opt, stock = make([p], lr=0.5), torch.optim.AdamW([copies([p])[0]], lr=0.5)
        for o in (opt, stock):
            o.param_groups[0]["params"][0].grad = torch.full((5,), 2.0, device=device)
            o.step()
    torch.testing.assert_close(p.detach().clone(), stock.param_groups[0]["params"][0].detach().clone())


def test_gradients_from_real_backwards(make, device):
    """A small model with unused parameters in some micro-batches, against torch.optim.AdamW on the sum."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3)).to(device)
    extra = torch.nn.Linear(3, 3).to(device)
    params = [*model.parameters(), *extra.parameters()]
    opt = make(params, lr=0.1, weight_decay=0.2)
    oracle = Oracle(opt)
    for n in range(3):
        micros = []
        for k in range(4):
            x = values((5, 6), device=device)
            out = model(x)
            loss = (extra(out) if (n + k) % 3 == 0 else out).square().mean()
            loss.backward()
            micros.append(Micro([None if p.grad is None else p.grad.clone() for p in params], 0.25))
            if k < 3:
                opt.accumulate(0.25)
        oracle.window(micros)
        opt.step(scale=0.25)
        oracle.check()
