"""torch.amp.GradScaler: plain windows of one micro-batch work; explicit contributions pending are refused."""

import pytest
import torch
from harness import assert_unchanged, copies, parameters, params_of, snapshot, values
from oracle import Micro, Oracle, same_bits

pytestmark = pytest.mark.filterwarnings("error")

OPTIONS = [{}, {"fused": True}, {"foreach": True}]


def scaler_for(device, **options):
    return torch.amp.GradScaler(device, init_scale=2.0**12, growth_interval=2, **options)


def backward(scaler, params, targets):
    loss = sum(((p - t) ** 2).sum() for p, t in zip(params, targets))
    scaler.scale(loss).backward()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("unscale", [False, True], ids=["plain", "unscale-and-clip"])
def test_parity_with_torch(make, device, options, unscale):
    params = parameters((65,), (5,), device=device)
    targets = [values(p.shape, device=device) for p in params]
    twin = copies(params)
    opts = make(params, lr=0.1, **options), torch.optim.AdamW(twin, lr=0.1, **options)
    scalers = scaler_for(device), scaler_for(device)
    for n in range(6):
        for opt, scaler, own in zip(opts, scalers, (params, twin)):
            backward(scaler, own, targets)
            if n == 3:
                own[1].grad[2] = float("inf")
            if unscale:
                scaler.unscale_(opt)
                torch.nn.utils.clip_grad_norm_(own, 0.5)
            before = [p.detach().clone() for p in own]
            scaler.step(opt)
            assert all(same_bits(p, x) for p, x in zip(own, before)) == (n == 3)
            scaler.update()
            opt.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale()
    for p, q in zip(params, twin):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
        assert float(opts[0].state[p]["step"]) == 5


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_scale_is_divided_out_exactly_once(make, device, options):
    """Constant factors hide in Adam's update: look at the moments."""
    params = parameters((65,), device=device)
    targets = [values((65,), device=device)]
    opt = make(params, lr=0.1, **options)
    oracle = Oracle(opt)
    scaler = scaler_for(device)
    for unscale in (False, True, False):
        grad = 2 * (params[0].detach() - targets[0])
        backward(scaler, params, targets)
        oracle.window([Micro([params[0].grad.double() / scaler.get_scale()])])
        assert torch.allclose(params[0].grad / scaler.get_scale(), grad, rtol=1e-5, atol=1e-6)
        if unscale:
            scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        oracle.check()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_inf_leaves_everything_and_the_next_step_is_clean(make, device, options):
    params = parameters((65,), (5,), device=device)
    opt = make(params, lr=0.1, **options)
    scaler = scaler_for(device)
    targets = [values(p.shape, device=device) for p in params]
    for spoiled in (False, True, False):
        backward(scaler, params, targets)
        if spoiled:
            params[1].grad[0] = float("nan")
            before = [p.detach().clone() for p in params]
            state = {p: {k: v.clone() for k, v in opt.state[p].items()} for p in params}
        scaler.step(opt)
        scaler.update()
        if spoiled:
            for p, x in zip(params, before):
                assert same_bits(p, x)
                assert all(same_bits(opt.state[p][k], v) for k, v in state[p].items())
            assert opt.pending == (0, 0.0)
        opt.zero_grad()
    assert all(p.isfinite().all() for p in params)
    assert float(opt.state[params[0]]["step"]) == 2
    assert not hasattr(opt, "grad_scale")
    assert not hasattr(opt, "found_inf")


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("unscale", [False, True], ids=["plain", "unscaled"])
def test_refused_with_explicit_contributions_pending(make, device, options, unscale):
    params = parameters((65,), (5,), device=device)
    targets = [values(p.shape, device=device) for p in params]
    opt = make(params, lr=0.1, **options)
    scaler = scaler_for(device)
    backward(scaler, params, targets)
    opt.accumulate()
    assert opt._step_supports_amp_scaling
    backward(scaler, params, targets)
    if unscale:
        scaler.unscale_(opt)
    before = snapshot(opt)
    with pytest.raises(RuntimeError, match=r"accumulate_in_backward\(\)"):
        scaler.step(opt)
    assert_unchanged(before, snapshot(opt))
    opt.step()  # without the scaler it goes on
    assert opt.pending == (0, 0.0)


def test_refused_also_when_the_last_gradients_are_in_the_buffer(make, device):
    """accumulate() after every micro-batch, then scaler.step(): p.grad is None everywhere, so that torch's own
    assertion would come first were the optimizer not asked; whichever comes, it is an error and changes nothing."""
    params = parameters((65,), device=device)
    opt = make(params, lr=0.1)
    scaler = scaler_for(device)
    backward(scaler, params, [values((65,), device=device)])
    opt.accumulate()
    before = snapshot(opt)
    with pytest.raises((RuntimeError, AssertionError)):
        scaler.step(opt)
    assert_unchanged(before, snapshot(opt))


def test_the_flag_follows_the_window_and_fused(make, device):
    params = parameters((5,), device=device)
    assert make(copies(params), fused=True)._step_supports_amp_scaling is True
    opt = make(params)
    assert opt._step_supports_amp_scaling is False
    params[0].grad = torch.ones_like(params[0])
    opt.accumulate()
    assert opt._step_supports_amp_scaling is True
    opt.step()
    assert opt._step_supports_amp_scaling is False


def test_gradients_accumulated_in_p_grad_work_with_the_scaler(make, device):
    """The refusal's way out that needs no other mode: plain backward() calls into p.grad."""
    params = parameters((65,), device=device)
    opt = make(params, lr=0.1)
    oracle = Oracle(opt)
    scaler = scaler_for(device)
    for _ in range(2):
        for _ in range(3):
            backward(scaler, params, [values((65,), device=device)])
        oracle.window([Micro([params[0].grad.double() / scaler.get_scale()])])
        scaler.step(opt)
        scaler.update()
        oracle.check()


def test_closure_with_a_scaler_that_is_disabled(make, device):
    params = parameters((65,), device=device)
    opt = make(params, lr=0.1)
    oracle = Oracle(opt)
    scaler = scaler_for(device, enabled=False)
    target = values((65,), device=device)

    def closure():
        loss = ((params[0] - target) ** 2).sum()
        loss.backward()
        return loss

    oracle.window([Micro([2 * (params[0].detach() - target)])])
    assert scaler.step(opt, closure).requires_grad
    oracle.check()


def test_scale_argument_and_grad_scaler_combine(make, device):
    """scaler.step(opt, scale=...) passes keyword arguments on."""
    params = parameters((65,), device=device)
    opt = make(params, lr=0.1, fused=True)
    oracle = Oracle(opt)
    scaler = scaler_for(device)
    backward(scaler, params, [values((65,), device=device)])
    oracle.window([Micro([params[0].grad.double() / scaler.get_scale()], scale=0.25)])
    scaler.step(opt, scale=0.25)
    scaler.update()
    oracle.check()
    assert params_of(opt)[0].grad is None


CLEARING = {
    "nothing": lambda opt, model: None,
    "the optimizer's": lambda opt, model: opt.zero_grad(),
    "the model's": lambda opt, model: model.zero_grad(),
    "zeros": lambda opt, model: opt.zero_grad(set_to_none=False),
}


@pytest.mark.parametrize("clearing", CLEARING)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("mode", ["plain", "in-backward", "direct"])
def test_skipped_gradients_that_stay_are_told_of(make, device, mode, options, clearing, recwarn):
    """Nothing but zero_grad() clears what a scaler skips: step() is not called. With fused=True it is, and clears."""
    model = torch.nn.Linear(3, 2).to(device)
    opt = make(model.parameters(), lr=0.1, **options)
    if mode != "plain":
        opt.accumulate_in_backward() if mode == "in-backward" else opt.direct_wgrad(model)
    scaler = scaler_for(device)
    heard, x = [], torch.randn(4, 3, device=device)
    for overflow in (False, True, False, False):
        for part in range(2):
            loss = scaler.scale(model(x).square().mean() / 2)
            (loss * float("inf") if overflow and part == 0 else loss).backward()
        scaler.step(opt)
        scaler.update()
        CLEARING[clearing](opt, model)
        heard.append([str(w.message) for w in recwarn.list])
        recwarn.clear()
    stays = clearing == "nothing" and not options.get("fused")
    assert [bool(messages) for messages in heard] == [False, False, stays, False]
    assert all("zero_grad() after scaler.update()" in message for message in heard[2])
    assert float(opt.state[model.weight]["step"]) == (1 if stays else 3)
