"""scale_loss(): scales and token weights where backward accumulates, equal to the explicit ones."""

import contextlib
import warnings

import pytest
import torch
from backwards import Failure, gradients, loss_with, run_backwards
from cases import WINDOWS
from harness import buffers, copies, micro_batches, parameters
from oracle import Oracle, same_bits, within

from fused_accum import window

pytestmark = pytest.mark.filterwarnings("error")

LARGE = {"lr": 0.5, "weight_decay": 0.3}


@pytest.fixture
def opened(make, device):
    params = parameters((65,), (13, 17), device=device)
    opt = make([(f"p{i}", p) for i, p in enumerate(params)], **LARGE)
    opt.accumulate_in_backward()
    return params, opt


def run(opt, params, micros):
    for micro in micros:
        opt.scale_loss(loss_with(params, micro.grads), micro.scale, weight=micro.weight).backward()


@pytest.mark.parametrize("plan", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_windows(make, device, plan, dtype):
    params = parameters((65,), (13, 17), (), (0,), dtype=dtype, device=device)
    opt = make(params, **LARGE)
    oracle = Oracle(opt)
    opt.accumulate_in_backward()
    for _ in range(3):
        micros = micro_batches(params, plan)
        run(opt, params, micros)
        assert opt.pending == (len(plan), pytest.approx(sum(w or 0 for _, w in plan)))
        for got, want in zip(buffers(opt), oracle.accum(micros)):
            within("accum", got, want, got.dtype)
        oracle.window(micros)
        opt.step()
        oracle.check()


@pytest.mark.parametrize("kind", ["weight", "scale", "both"])
@pytest.mark.parametrize("inside", [False, True], ids=["step", "step-in-backward"])
def test_factors_in_device_memory(make, device, monkeypatch, kind, inside):
    """Tensors that are not read before the step; where there is no GPU these take their place."""
    if device == "cpu":
        monkeypatch.setattr(window, "on_device", lambda value: isinstance(value, torch.Tensor))
    params = parameters((65,), (13, 17), device=device)
    opt = make(params, **LARGE)
    oracle = Oracle(opt)
    opt.accumulate_in_backward()
    chosen = {"weight": [(1.0, 3), (1.0, 5)], "scale": [(0.5, None), (0.25, None)], "both": [(0.5, 3), (2.0, 5)]}
    for _ in range(2):
        micros = micro_batches(params, chosen[kind])
        factor = torch.ones((), device=device)
        for k, micro in enumerate(micros):
            loss = loss_with(params, micro.grads)
            given = {} if micro.weight is None else {"weight": factor * micro.weight}
            scaled = opt.scale_loss(loss, factor * micro.scale, **given)
            assert scaled.dtype == loss.dtype
            factor.fill_(1)  # what was given was taken as it was
            with opt.step_in_backward() if inside and k == 1 else contextlib.nullcontext():
                scaled.backward()
        if not inside:
            assert opt.pending == (2, pytest.approx(sum(w or 0 for _, w in chosen[kind])))
            opt.step()
        oracle.window(micros)
        oracle.check()


def test_a_window_of_weight_zero_in_device_memory_updates_nothing(opened, device, monkeypatch):
    if device == "cpu":
        monkeypatch.setattr(window, "on_device", lambda value: isinstance(value, torch.Tensor))
    params, opt = opened
    before = [p.detach().clone() for p in params]
    opt.scale_loss(loss_with(params, params), weight=torch.zeros((), device=device)).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # only a host that knows the sum can warn
        opt.step()
    assert all(same_bits(p, x) for p, x in zip(params, before))
    assert opt.pending == (0, 0.0)


@pytest.mark.parametrize("kind", ["weight", "scale"])
def test_a_factor_of_zero_sends_nothing_down(opened, kind):
    params, opt = opened
    oracle = Oracle(opt)
    micros = micro_batches(params, [(1.0, 3), (1.0, 5)] if kind == "weight" else [(0.5, None), (0.5, None)])
    run(opt, params, micros[:1])
    empty = loss_with(params, [torch.full_like(p, float("nan")) for p in params])
    if kind == "weight":
        opt.scale_loss(empty, weight=0).backward()
    else:
        opt.scale_loss(empty, 0.0).backward()
    assert opt.pending.microbatches == 2
    run(opt, params, micros[1:])
    oracle.window(micros)
    opt.step()
    oracle.check()


def test_a_window_of_weight_zero_updates_nothing(opened):
    params, opt = opened
    before = [p.detach().clone() for p in params]
    for _ in range(2):
        opt.scale_loss(loss_with(params, [torch.ones_like(p) for p in params]), weight=0).backward()
    with pytest.warns(UserWarning, match=r"2 micro-batch.*add up to 0"):
        opt.step()
    assert all(same_bits(p, x) for p, x in zip(params, before))
    assert opt.pending == (0, 0.0)


def test_a_loss_without_a_backward_adds_no_weight(opened):
    params, opt = opened
    oracle = Oracle(opt)
    micros = micro_batches(params, [(1.0, 3), (1.0, 7)])
    for micro in micros:
        opt.scale_loss(loss_with(params, micro.grads), weight=100)
        run(opt, params, [micro])
    oracle.window(micros)
    opt.step()
    oracle.check()


@pytest.mark.parametrize("how", ["optimizer", "by hand"])
def test_discarding_p_grad_discards_the_weights(opened, how):
    params, opt = opened
    oracle = Oracle(opt)
    run(opt, params, micro_batches(params, [(1.0, 1000)]))
    if how == "optimizer":
        opt.zero_grad()
    else:
        for p in params:
            p.grad = None
    micros = micro_batches(params, [(1.0, 3), (1.0, 7)])
    run(opt, params, micros)
    oracle.window(micros)
    opt.step()
    oracle.check()


def test_discarding_between_scale_loss_and_its_backward(opened):
    params, opt = opened
    oracle = Oracle(opt)
    run(opt, params, micro_batches(params, [(1.0, 1000)]))
    micros = micro_batches(params, [(1.0, 3)])
    loss = opt.scale_loss(loss_with(params, micros[0].grads), weight=3)
    for p in params:
        p.grad = None
    loss.backward()
    oracle.window(micros)
    opt.step()
    oracle.check()


def test_several_losses_in_one_backward(opened):
    """One micro-batch with the sum of their weights."""
    params, opt = opened
    oracle = Oracle(opt)
    micros = micro_batches(params, [(1.0, 3), (1.0, 7)])
    loss = sum(opt.scale_loss(loss_with(params, m.grads), weight=m.weight) for m in micros)
    loss.backward()
    assert opt.pending == (1, 10.0)
    oracle.window(micros)
    opt.step()
    oracle.check()


# -- an undivided p.grad must not be edited ------------------------------------------------------------------


def clip(params):
    torch.nn.utils.clip_grad_norm_(params, 0.1)


def multiply_one(params):
    params[1].grad.mul_(0.5)


def replace_one(params):
    params[1].grad = params[1].grad * 0.5


def add_to_one_twice(params):
    params[1].grad.add_(1).sub_(1)


@pytest.mark.parametrize("edit", [clip, multiply_one, replace_one, add_to_one_twice], ids=lambda f: f.__name__)
@pytest.mark.parametrize("when", ["at the end", "between", "after scale_loss"])
def test_an_edit_makes_step_raise(opened, edit, when):
    params, opt = opened
    micros = micro_batches(params, [(1.0, 3), (1.0, 7)])
    run(opt, params, micros[:1])
    if when == "between":
        edit(params)
    loss = opt.scale_loss(loss_with(params, micros[1].grads), weight=7)
    if when == "after scale_loss":
        edit(params)
    loss.backward()
    if when == "at the end":
        edit(params)
    before = [p.detach().clone() for p in params]
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"'p\d' was changed.*max_grad_norm.*docs/distributed.md"):
            opt.step()
    assert all(same_bits(p, x) for p, x in zip(params, before))
    opt.zero_grad()
    oracle = Oracle(opt)
    micros = micro_batches(params, [(1.0, 3), (1.0, 7)])
    run(opt, params, micros)
    oracle.window(micros)
    opt.step()
    oracle.check()


def test_edits_are_allowed_with_scales_alone(opened):
    params, opt = opened
    run(opt, params, micro_batches(params, [(0.5, None)] * 2))
    clip(params)
    opt.step()


def test_a_parameter_that_misses_a_micro_batch_is_no_edit(opened):
    params, opt = opened
    oracle = Oracle(opt)
    micros = micro_batches(params, [(1.0, 3), (1.0, 7), (1.0, 2)], absent={(0, 0), (1, 1)})
    run(opt, params, micros)
    oracle.window(micros)
    opt.step()
    oracle.check()


# -- mixing ------------------------------------------------------------------------------------------------------


def test_mixing_is_refused_before_the_backward(opened):
    params, opt = opened
    (a, b) = micro_batches(params, [(0.5, None)] * 2)
    run(opt, params, [a])
    with pytest.raises(ValueError, match="have no weight, this one has one"):
        opt.scale_loss(loss_with(params, b.grads), weight=3)
    opt.zero_grad()
    run(opt, params, micro_batches(params, [(1.0, 3)]))
    with pytest.raises(ValueError, match="have a weight, this one has none"):
        opt.scale_loss(loss_with(params, b.grads), 0.5)
    opt.step()


def test_a_plain_backward_in_a_weighted_window(opened):
    params, opt = opened
    run(opt, params, micro_batches(params, [(1.0, 3)]))
    with pytest.raises(ValueError, match="have a weight, this one has none"):
        run_backwards(params, gradients(params, 1))
    for _ in range(2):
        with pytest.raises(ValueError, match="this one has none"):
            opt.step()
    opt.zero_grad()
    oracle = Oracle(opt)
    micros = gradients(params, 2)
    run_backwards(params, micros)
    oracle.window(micros)
    opt.step()
    oracle.check()


def test_the_factors_of_explicit_calls_are_refused(opened):
    params, opt = opened
    run(opt, params, micro_batches(params, [(1.0, 3)]))
    for call in (opt.accumulate, opt.step):
        with pytest.raises(ValueError, match=r"scale_loss\(loss, weight=3\)"):
            call(weight=3)
    opt.step()


def test_only_where_backward_accumulates(make, device):
    params = parameters((65,), device=device)
    opt = make(params)
    with pytest.raises(RuntimeError, match=r"accumulate_in_backward\(\)"):
        opt.scale_loss(params[0].sum(), 0.5)
    opt.accumulate_in_backward()
    for bad in ({"scale": -1}, {"weight": float("nan")}):
        with pytest.raises(ValueError, match="finite"):
            opt.scale_loss(params[0].sum(), **bad)


# -- with the rest -----------------------------------------------------------------------------------------------


def test_a_short_window_of_plain_scales_is_warned_of(opened):
    params, opt = opened
    run(opt, params, micro_batches(params, [(0.25, None)] * 4))
    opt.step()
    run(opt, params, micro_batches(params, [(0.25, None)] * 2))
    with pytest.warns(UserWarning, match="weight="):
        opt.step()
    run_backwards(params, gradients(params, 2))  # scales unknown: none of our business
    opt.step()


def test_a_backward_that_fails_commits_no_weight(opened):
    params, opt = opened
    oracle = Oracle(opt)
    micros = micro_batches(params, [(1.0, 3), (1.0, 7)])
    with pytest.raises(Failure):
        opt.scale_loss(loss_with(params, micros[0].grads, fail_at=0), weight=3).backward()
    assert opt.pending == (0, 0.0)
    run(opt, params, micros)
    oracle.window(micros)
    opt.step()
    oracle.check()


def test_grad_scaler_divides_in_the_step(make, device):
    """It must not unscale the undivided p.grad in place: step takes its scale instead."""
    params = parameters((65,), device=device)
    twins = copies(params)
    opt, other = make(params, **LARGE), make(twins, **LARGE)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10)
    for o in (opt, other):
        o.accumulate_in_backward()
    for _ in range(2):
        micros = micro_batches(params, [(1.0, 3), (1.0, 7)])
        for micro in micros:
            scaler.scale(opt.scale_loss(loss_with(params, micro.grads), weight=micro.weight)).backward()
            other.scale_loss(loss_with(twins, micro.grads), weight=micro.weight).backward()
        scaler.step(opt)
        scaler.update()
        other.step()
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(opt.state[params[0]][name], other.state[twins[0]][name], rtol=1e-5, atol=1e-9)
