"""step_in_backward(): what is refused, and what an exception inside leaves."""

import pytest
import torch
from backwards import Failing, Failure, gradients, loss_with, run_backwards
from harness import parameters, values
from oracle import Micro, Oracle, same_bits
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.filterwarnings("error")

LARGE = {"lr": 0.5, "weight_decay": 0.3}


@pytest.mark.parametrize("mode", ["explicit", "in-backward"])
def test_an_exception_inside_marks_it_half_applied(make, device, mode):
    params = parameters((65,), (13, 17), device=device)
    opt = make(params, **LARGE)
    if mode == "in-backward":
        opt.accumulate_in_backward()
    saved = opt.state_dict()
    weights = [p.detach().clone() for p in params]
    (micro,) = gradients(params, 1)
    with pytest.raises(Failure), opt.step_in_backward():
        loss_with(params, micro.grads, fail_at=1).backward()
    assert not same_bits(params[0], weights[0])
    assert same_bits(params[1], weights[1])
    calls = [opt.step, opt.accumulate, opt.zero_grad, opt.discard_microbatch, opt.state_dict]
    calls += [opt.accumulate_in_backward, lambda: opt.step_in_backward().__enter__()]
    calls += [lambda: opt.scale_loss(params[0].sum())]
    for call in calls:
        with pytest.raises(RuntimeError, match=r"step_in_backward\(\) \(Failure: half way\).*load_state_dict"):
            call()
    if mode == "in-backward":
        with pytest.raises(RuntimeError, match="step_in_backward"):
            run_backwards(params, [micro])
    with torch.no_grad():
        for p, x in zip(params, weights):
            p.copy_(x)
    opt.load_state_dict(saved)
    opt.zero_grad()
    oracle = Oracle(opt)
    micros = gradients(params, 1)
    with opt.step_in_backward():
        run_backwards(params, micros)
    oracle.window(micros)
    oracle.check()


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("mode", ["explicit", "weighted", "in-backward"])
def test_an_exception_before_any_update_changes_nothing(make, device, mode, where):
    """The window is as before: it can go on, and be stepped."""
    params = parameters((65,), (13, 17), device=device)
    opt = make(params, **LARGE)
    oracle = Oracle(opt)
    weight = 3.0 if mode == "weighted" else None
    micros = [Micro(micro.grads, 1.0, weight) for micro in gradients(params, 3)]

    def backward(micro):
        loss = loss_with(params, micro.grads)
        (opt.scale_loss(loss, weight=weight) if weight else loss).backward()
        if mode == "explicit":
            opt.accumulate()

    def fails():
        if where == "forward":
            raise Failure("a forward")
        Failing.apply(loss_with(params, micros[1].grads), Failure()).backward()

    if mode != "explicit":
        opt.accumulate_in_backward()
    backward(micros[0])
    pending = opt.pending
    with pytest.raises(Failure), opt.step_in_backward():
        fails()
    assert opt.pending == pending
    assert opt.accumulates_in_backward == (mode != "explicit")
    backward(micros[1])
    opt.step()
    oracle.window(micros[:2])
    oracle.check()
    with opt.step_in_backward():
        loss = loss_with(params, micros[2].grads)
        (opt.scale_loss(loss, weight=weight) if weight else loss).backward()
    oracle.window(micros[2:])
    oracle.check()


@pytest.mark.parametrize("known", [True, False], ids=["seen-before", "first-time"])
def test_reentrant_checkpointing_is_refused(make, device, known):
    params = parameters((5, 5), device=device)
    opt = make(params)
    opt.accumulate_in_backward()

    def loss():
        x = values((3, 5), device=device).requires_grad_()
        return checkpoint(lambda x: x @ params[0], x, use_reentrant=True).sum()

    if known:
        loss().backward()
    before = params[0].detach().clone()
    with pytest.raises(RuntimeError, match="reentrant"), opt.step_in_backward():
        loss().backward()
    assert same_bits(params[0], before)
    if known:  # refused on entry: nothing has happened
        opt.step()
    else:
        with pytest.raises(RuntimeError, match=r"did not finish.*zero_grad\(\)"):
            opt.step()
        opt.zero_grad()


def test_a_second_backward_inside_is_refused(make, device):
    params = parameters((65,), device=device)
    opt = make(params)
    with pytest.raises(RuntimeError, match="second backward"), opt.step_in_backward():
        run_backwards(params, gradients(params, 2))


def test_calls_inside_are_refused(make, device):
    params = parameters((65,), device=device)
    opt = make(params)
    with pytest.raises(RuntimeError, match=r"step\(\) was called inside step_in_backward"), opt.step_in_backward():
        opt.step()


def test_grad_scaler_is_refused(make, device):
    params = parameters((65,), device=device)
    opt = make(params)
    scaler = torch.amp.GradScaler(device)
    opt.accumulate_in_backward()
    with opt.step_in_backward():
        scaler.scale(loss_with(params, gradients(params, 1)[0].grads)).backward()
    with pytest.raises(RuntimeError, match=r"GradScaler.*step_in_backward"):
        scaler.step(opt)


def test_weights_of_zero(make, device):
    params = parameters((65,), device=device)
    opt = make(params)
    opt.accumulate_in_backward()
    before = params[0].detach().clone()
    with pytest.warns(UserWarning, match="add up to 0"), opt.step_in_backward():
        opt.scale_loss((params[0] * float("nan")).sum(), weight=0).backward()
    assert same_bits(params[0], before)


def test_a_window_that_mixes_weights_with_none(make, device):
    params = parameters((65,), device=device)
    opt = make(params)
    opt.accumulate_in_backward()
    opt.scale_loss(params[0].sum(), weight=3).backward()
    with pytest.raises(ValueError, match="this one has none"), opt.step_in_backward():
        params[0].sum().backward()


def test_an_unfinished_backward_is_refused_on_entry(make, device):
    params = parameters((65,), (5,), device=device)
    opt = make(params)
    opt.accumulate_in_backward()
    with pytest.raises(Failure):
        Failing.apply(loss_with(params, gradients(params, 1)[0].grads), Failure()).backward()
    with opt.step_in_backward():  # nothing had been added
        pass
    with pytest.raises(Failure):
        loss_with(params, gradients(params, 1)[0].grads, fail_at=1).backward()
    with pytest.raises(RuntimeError, match="did not finish"):
        opt.step_in_backward().__enter__()
    opt.zero_grad()
