"""What a newcomer does wrong is loud where backward accumulates, too."""

import copy

import pytest
import torch
from harness import (
    assert_names,
    assert_unchanged,
    copies,
    give_ones,
    heard,
    parameters,
    params_of,
    refused,
    snapshot,
    values,
)
from oracle import same_bits
from torch import nn

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture
def opt(make, device):
    return make([(f"p{i}", p) for i, p in enumerate(parameters((65,), (3, 4), device=device))], lr=0.1)


# -- p.grad from before the hooks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["in-backward", "direct", "step-in-backward"])
def test_a_gradient_from_before_cannot_join_a_weighted_window(make, device, mode):
    model = nn.Linear(5, 3).to(device)
    opt = make(model.named_parameters(), lr=0.1)
    x = values((4, 5), device=device)

    def weighted():
        if mode == "step-in-backward":
            with opt.step_in_backward():
                opt.scale_loss(model(x).sum(), weight=4).backward()
        else:
            opt.scale_loss(model(x).sum(), weight=4).backward()
            opt.step()

    model(x).sum().backward()
    kept = [p.grad.clone() for p in model.parameters()]
    if mode == "in-backward":
        opt.accumulate_in_backward()
    elif mode == "direct":
        opt.direct_wgrad(model)
    if mode == "step-in-backward":
        with pytest.raises(RuntimeError, match=r"'weight'.*before.*zero_grad"):
            weighted()
        return  # half applied, as any exception in there
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"'weight'.*before.*zero_grad"):
            opt.scale_loss(model(x).sum(), weight=4)
    assert all(same_bits(p.grad, g) for p, g in zip(model.parameters(), kept))
    opt.step()  # a way out: it was a window of its own
    assert float(opt.state[model.weight]["step"]) == 1
    for _ in range(2):
        weighted()
    assert float(opt.state[model.weight]["step"]) == 3


@pytest.mark.parametrize("zeros", [True, False])
def test_a_gradient_from_before_that_is_none_or_zero_may(make, device, zeros):
    model = nn.Linear(5, 3).to(device)
    opt = make(model.named_parameters(), lr=0.1)
    model(values((4, 5), device=device)).sum().backward()
    opt.accumulate_in_backward()
    if zeros:
        for p in model.parameters():
            p.grad.zero_()
    else:
        model.zero_grad()
    opt.scale_loss(model(values((4, 5), device=device)).sum(), weight=4).backward()
    opt.step()


def test_a_gradient_from_before_joins_a_window_without_weights(make, device):
    model = nn.Linear(5, 3).to(device)
    opt = make(model.parameters(), lr=0.1)
    model(torch.ones(4, 5, device=device)).sum().backward()
    opt.accumulate_in_backward()
    opt.scale_loss(model(torch.ones(4, 5, device=device)).sum(), 0.5).backward()
    assert torch.equal(model.bias.grad, torch.full_like(model.bias, 6.0))
    opt.step()


# -- weights and scales beyond float32 -----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["accumulate", "step", "scale_loss"])
@pytest.mark.parametrize(
    "factors",
    [{"weight": 1e39}, {"weight": 1e-40}, {"scale": 1e39}, {"scale": 1e-40}, {"scale": 1e12, "weight": 1e12}],
    ids=str,
)
def test_a_factor_that_overflows_or_vanishes_is_refused(opt, mode, factors):
    if mode == "scale_loss":
        opt.accumulate_in_backward()
    else:
        give_ones(opt)
    before = snapshot(opt)
    words = [f"{next(iter(factors.values())):g}", "1e-18 to 1e+18", "in any unit"]
    refused(ValueError, words, getattr(opt, mode), *[params_of(opt)[0].sum()] * (mode == "scale_loss"), **factors)
    assert_unchanged(before, snapshot(opt))


@pytest.mark.parametrize("unit", [1e-18, 1e17])
def test_the_extremes_that_are_taken_are_exact(make, device, unit):
    params = parameters((65,), device=device)
    twins = copies(params)
    opt, other = make(params, lr=0.5), make(twins, lr=0.5)
    for weight in (1, 3, 7):
        g = values((65,), device=device)
        for o, u in ((opt, unit), (other, 1.0)):
            params_of(o)[0].grad = g.clone()
            o.accumulate(weight=weight * u)
    opt.step()
    other.step()
    torch.testing.assert_close(params, twins)


def test_a_weight_that_overflows_float16_gradients_is_refused(make, device):
    p = parameters((65,), dtype=torch.float16, device=device)[0]
    opt = make([("half", p)], lr=0.1)
    opt.accumulate_in_backward()
    refused(ValueError, ["65536", "float16", "65504", "divide all weights"], opt.scale_loss, p.sum(), weight=65536)
    for weight in (65536 / 4, 32768 / 4):  # the way out
        opt.scale_loss(p.float().sum(), weight=weight).backward()
    opt.step()
    assert p.isfinite().all()


# -- the wrong model -----------------------------------------------------------------------------------------------


def test_direct_wgrad_of_a_model_without_the_optimizers_parameters_is_refused(make, device):
    model = nn.Sequential(nn.Linear(5, 3)).to(device)
    opt = make(model.parameters(), lr=0.1)
    for other in (copy.deepcopy(model), nn.ReLU()):
        refused(ValueError, [type(other).__name__, "none is this optimizer's"], opt.direct_wgrad, other)
    assert not opt.accumulates_in_backward
    assert not model[0].weight._post_accumulate_grad_hooks


def test_direct_wgrad_that_covers_nothing_is_warned_of(make, device):
    model = nn.Sequential(nn.LayerNorm(3)).to(device)
    opt = make(model.parameters(), lr=0.1)
    (message,) = heard(opt.direct_wgrad, model)
    assert_names(message, ["covers no parameter of this Sequential", "0.weight: LayerNorm has no direct form"])
    assert opt.accumulates_in_backward


# -- a handle removed in mid-window --------------------------------------------------------------------------------


@pytest.fixture
def removed(make, device):
    """A model and its optimizer with a micro-batch of a window whose handle is removed."""

    def begin(**factors):
        model = nn.Linear(5, 3).to(device)
        opt = make(model.named_parameters(), lr=0.1)
        with opt.accumulate_in_backward():
            opt.scale_loss(model(torch.ones(4, 5, device=device)).sum(), **factors).backward()
        return model, opt, torch.ones(4, 5, device=device)

    return begin


def test_scale_loss_after_removal_in_mid_window(removed):
    model, opt, x = removed(weight=4)
    with pytest.raises(RuntimeError, match=r"handle was removed before its end.*step\(\).*zero_grad\(\).*again"):
        opt.scale_loss(model(x).sum(), weight=4)
    opt.step()
    assert torch.equal(opt.state[model.bias]["exp_avg"], torch.full_like(model.bias, 0.1 * 4))


@pytest.mark.parametrize("call", ["accumulate", "step"])
def test_a_factor_after_removal_in_mid_window(removed, call):
    model, opt, x = removed(scale=0.5)
    model(x).sum().backward()
    with pytest.raises(ValueError, match=r"handle was removed before its end.*p.grad still holds"):
        getattr(opt, call)(scale=0.5)
    opt.step()
    give_ones(opt)
    opt.accumulate(scale=0.5)  # explicit from here on
    assert not opt.accumulates_in_backward


def test_a_backward_after_removal_in_a_weighted_window(removed):
    model, opt, x = removed(weight=4)
    model(x).sum().backward()
    with pytest.raises(RuntimeError, match=r"changed p.grad of parameter .* after the handle was removed"):
        opt.step()
    opt.zero_grad()
    give_ones(opt)
    opt.step()


@pytest.mark.parametrize("pending", [True, False])
def test_the_backward_of_a_loss_scaled_before_removal(removed, pending):
    model, opt, x = removed(weight=4)
    if not pending:
        opt.step()
    with opt.accumulate_in_backward():
        loss = opt.scale_loss(model(x).sum(), weight=4)
    with pytest.raises(RuntimeError, match="handle was removed in between"):
        loss.backward()
    opt.step()


# -- what scale_loss() returns ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [{"scale": 0.25}, {"weight": 3}], ids=str)
def test_a_scaled_loss_that_is_dropped_for_the_plain_one_is_warned_of_once(opt, factor):
    opt.accumulate_in_backward()
    params = params_of(opt)

    def train():
        loss = params[0].sum()
        opt.scale_loss(loss, **factor)
        loss.backward()
        opt.step()

    (message,) = heard(train)
    assert "scale_loss() returned was dropped" in message
    train()


def test_a_scaled_loss_that_is_kept_or_not_needed_is_not_warned_of(opt):
    opt.accumulate_in_backward()
    params = params_of(opt)
    first = opt.scale_loss(params[0].sum(), 0.25)
    params[0].sum().backward()  # another loss, before it
    first.backward()
    opt.scale_loss(params[0].sum() * float("nan"), 0.25)  # seen to be NaN, and skipped
    opt.scale_loss(params[0].sum(), 0.25).backward()
    params[0].sum().backward()
    opt.step()


def test_a_loss_cannot_have_two_weights(opt):
    opt.accumulate_in_backward()
    scaled = opt.scale_loss(params_of(opt)[0].sum(), weight=3)
    refused(ValueError, ["has a weight already", "once"], opt.scale_loss, scaled, weight=3)
    (opt.scale_loss(scaled, 0.5) + opt.scale_loss(params_of(opt)[1].sum(), weight=4)).backward()
    assert opt.pending == (1, 7.0)
    opt.step()
