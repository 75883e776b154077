"""What a newcomer does wrong is loud, once, with the way out; and what only looks like it stays silent."""

import copy
import pickle

import numpy
import pytest
import torch
from backwards import loss_with
from harness import (
    assert_names,
    assert_unchanged,
    copies,
    give_ones,
    heard,
    micro_batches,
    parameters,
    params_of,
    put,
    refused,
    snapshot,
    values,
)
from torch import nn

from fused_accum import window
from fused_accum.state import Options

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture
def opt(make, device):
    return make([(f"p{i}", p) for i, p in enumerate(parameters((65,), (3, 4), device=device))], lr=0.1)


# -- a count of tokens given as a scale --------------------------------------------------------------------------

COUNTS = [4096, 2, numpy.int64(7), torch.tensor(4096), torch.ones(5, dtype=torch.bool).sum()]
FACTORS = [1, 0, True, 1.0, 4096.0, 0.25, numpy.float32(3), numpy.int64(1), torch.tensor(7.0), torch.tensor(1)]


@pytest.mark.parametrize("count", COUNTS, ids=repr)
@pytest.mark.parametrize("call", ["accumulate", "step", "scale_loss"])
def test_a_count_as_scale_is_warned_of_once(opt, count, call):
    for expected in (1, 0):
        if call == "scale_loss":
            if not opt.accumulates_in_backward:
                opt.accumulate_in_backward()
            found = heard(opt.scale_loss, params_of(opt)[0].sum(), count)
        else:
            give_ones(opt)
            found = heard(getattr(opt, call), scale=count)
        assert len(found) == expected
        for message in found:
            assert_names(message, [str(int(count)), "weight=", "float"])


@pytest.mark.parametrize("factor", FACTORS, ids=repr)
def test_a_factor_is_not_taken_for_a_count(opt, factor):
    give_ones(opt)
    opt.accumulate(factor)
    opt.step()
    give_ones(opt)
    opt.step(scale=2, weight=3)  # the count is there


def test_of_a_scale_in_device_memory_only_the_dtype_is_looked_at(monkeypatch):
    monkeypatch.setattr(window, "on_device", lambda value: isinstance(value, torch.Tensor))
    assert "torch.int64" in window.count_as_scale(torch.tensor(1), None)
    assert window.count_as_scale(torch.tensor(4096.0), None) is None


# -- a scale forgotten on the last micro-batch -----------------------------------------------------------------

FORGOTTEN = [[0.25, 0.25, 0.25, 1.0], [0.5, 1.0], [1 / 3, 0.0, 1 / 3, 1.0]]
MEANT = [[0.25] * 4, [1.0] * 3, [0.3, 1.0], [0.3, 0.6, 1.0], [1.0, 0.25], [0.0, 0.0, 1.0], [0.5, 0.5, 2.0], [1.0]]


@pytest.mark.parametrize("way", ["step", "accumulate", "backward"])
def test_a_scale_forgotten_at_the_end_is_warned_of_once(opt, way):
    if way == "backward":
        opt.accumulate_in_backward()

    def run(scales, weight=None):
        params = params_of(opt)
        for k, scale in enumerate(scales):
            if way == "backward":
                loss = loss_with(params, [torch.ones_like(p) for p in params])
                bare = scale == 1 and weight is None
                (loss if bare else opt.scale_loss(loss, scale, weight=weight)).backward()
                continue
            give_ones(opt)
            (opt.step if way == "step" and k == len(scales) - 1 else opt.accumulate)(scale=scale, weight=weight)
        opt.step()
        opt._run.window.previous_scale_sum = None  # of sums there are other tests

    for scales in MEANT:
        assert heard(run, scales) == []
    assert heard(run, FORGOTTEN[0], weight=3) == []  # scales of weighted micro-batches are no 1/N
    for scales in FORGOTTEN:
        found = heard(run, scales)
        assert len(found) == (scales is FORGOTTEN[0])
        for message in found:
            assert_names(message, ["3 before it 0.25", "4 times", "step(scale=...)", "scale_loss(loss, scale=...)"])


def test_a_window_with_a_forgotten_scale_is_not_the_measure_of_others(opt):
    for scales, expected in ([0.25, 0.25, 1.0], 1), ([0.25, 0.25, 1.0], 0), ([0.25] * 4, 0), ([0.25] * 2, 1):
        micros = micro_batches(params_of(opt), [(s, None) for s in scales])
        for micro in micros:
            put(params_of(opt), micro)
            opt.accumulate(micro.scale)
        assert len(heard(opt.step)) == expected


def test_a_short_window_that_the_user_divided_is_said_to_be_well(opt):
    """All scales are 1: the loss may have been divided by the window's length, or by nothing."""
    for length, expected in (4, 0), (2, 1), (3, 0):
        for _ in range(length):
            give_ones(opt)
            opt.accumulate()
        found = heard(opt.step)
        assert len(found) == expected
        for message in found:
            assert_names(message, ["add up to 2", "to 4", "weight=", "divided each loss", "all is well"])


# -- options set too late ----------------------------------------------------------------------------------------

def test_options_can_be_read_and_not_set(make, device):
    opt = make(parameters((3,), device=device), max_grad_norm=1.5, rounding_seed=7, skip_nonfinite="step")
    assert (opt.max_grad_norm, opt.rounding_seed, opt.skip_nonfinite) == (1.5, 7, "step")
    assert opt.accum_dtype is torch.float32
    assert opt.master_weights is None
    for name in Options._fields:
        before = getattr(opt, name)
        refused(AttributeError, [name, "0.001", "construct", "load_state_dict"], setattr, opt, name, 1e-3)
        assert getattr(opt, name) == before


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_options_of_a_copy(make, device, way):
    opt = make(parameters((3,), device=device), max_grad_norm=1.5)
    other = copy.deepcopy(opt) if way == "deepcopy" else pickle.loads(pickle.dumps(opt))
    assert other.max_grad_norm == 1.5
    with pytest.raises(AttributeError, match="max_grad_norm"):
        other.max_grad_norm = 1.0


# -- hyper-parameters that no step can use -------------------------------------------------------------------------

BAD = {
    "lr-nan": ("lr", float("nan")),
    "lr-inf": ("lr", float("inf")),
    "lr-tensor": ("lr", torch.tensor(float("nan"))),
    "beta1": ("betas", (1.0, 0.9)),
    "beta2": ("betas", (0.9, 1.5)),
    "beta-negative": ("betas", (-0.1, 0.9)),
    "beta-nan": ("betas", (0.9, float("nan"))),
    "eps": ("eps", float("inf")),
    "eps-negative": ("eps", -1e-8),
    "weight-decay": ("weight_decay", float("nan")),
}


@pytest.mark.parametrize("way", ["p.grad", "window", "scale-0", "in-backward", "step-in-backward"])
@pytest.mark.parametrize(("name", "value"), BAD.values(), ids=BAD)
def test_an_unusable_hyperparameter_is_refused_by_group(make, device, name, value, way):
    a, b = parameters((65,), (3, 4), device=device)
    opt = make([{"params": [a]}, {"params": [b]}], lr=0.1)
    if "backward" in way:
        opt.accumulate_in_backward()
        loss_with([a, b], [values(p.shape, device=device) for p in (a, b)]).backward()
    elif way == "window":
        give_ones(opt)
        opt.accumulate()
    if "backward" not in way:
        give_ones(opt)
    good = opt.param_groups[1][name]
    opt.param_groups[1][name] = value
    before = snapshot(opt)
    call = opt.step_in_backward().__enter__ if way == "step-in-backward" else opt.step
    factors = {"scale": 0.0} if way == "scale-0" else {}
    refused(ValueError, ["param_groups[1]", f"{name}={value!r}", "finite", "[0, 1)"], call, **factors)
    opt.param_groups[1][name] = before["groups"][1][name] = good
    assert_unchanged(before, snapshot(opt))
    opt.step()
    assert all(p.isfinite().all() for p in (a, b))


@pytest.mark.parametrize("lr", [-1e-19, -0.1, 0.0])
def test_a_negative_lr_is_used_as_torch_does(make, device, lr):
    params = parameters((65,), device=device)
    twins = copies(params)
    opt, stock = make(params), torch.optim.AdamW(twins)
    for o in (opt, stock):
        o.param_groups[0]["lr"] = lr
        give_ones(o)
        o.step()
    torch.testing.assert_close(params[0], twins[0])


def test_an_lr_on_a_device_is_not_read():
    class Elsewhere(torch.Tensor):
        device = torch.device("cuda")

        def __float__(self):
            raise AssertionError("read")

    from fused_accum.state import Hyper

    group = {**torch.optim.AdamW(parameters((3,))).param_groups[0], "lr": torch.tensor(0.1).as_subclass(Elsewhere)}
    assert Hyper.of_all([group])[0].lr is group["lr"]


# -- what is no AdamW's state_dict ---------------------------------------------------------------------------------


def trained(cls, **options):
    opt = cls(parameters((65,), (3, 4)), lr=0.1, **options)
    give_ones(opt)
    opt.step()
    return opt.state_dict()


def without(state, name):
    for saved in state["state"].values():
        del saved[name]
    return state


FOREIGN = {
    "SGD": (lambda: trained(torch.optim.SGD, momentum=0.9), ["param_groups[0]", "'betas', 'eps'", "no Adam"]),
    "SGD-without-momentum": (lambda: trained(torch.optim.SGD), ["param_groups[0]", "'betas'"]),
    "RMSprop": (lambda: trained(torch.optim.RMSprop), ["param_groups[0]", "'betas'", "momentum"]),
    "Adamax": (lambda: trained(torch.optim.Adamax), ["state[0]", "'exp_avg_sq'", "exp_inf"]),
    "no-step": (lambda: without(trained(torch.optim.Adam), "step"), ["state[0]", "'step'", "add what is lacking"]),
    "model": (lambda: nn.Linear(2, 2).state_dict(), ["'weight', 'bias'", "'state'", "optimizer.state_dict()"]),
    "checkpoint": (lambda: {"model": {}, "optimizer": trained(torch.optim.Adam)}, ["'model', 'optimizer'"]),
}


@pytest.mark.parametrize(("made", "words"), FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_state_dict_is_refused_whole(opt, made, words):
    give_ones(opt)
    opt.step()
    give_ones(opt)
    opt.accumulate()
    give_ones(opt)
    before = snapshot(opt)
    refused(ValueError, [*words, "Nothing was loaded"], opt.load_state_dict, made())
    assert_unchanged(before, snapshot(opt))


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam])
def test_the_state_of_an_adam_is_taken(opt, cls):
    opt.load_state_dict(trained(cls))
    give_ones(opt)
    opt.step()
    assert float(opt.state[params_of(opt)[0]]["step"]) == 2


@pytest.mark.parametrize("name", ["lr", "betas", "eps", "weight_decay"])
def test_hyperparameters_are_set_in_groups(opt, name):
    refused(AttributeError, [name, f"param_groups[i]['{name}'] = 0.5", "change nothing"], setattr, opt, name, 0.5)
    assert not hasattr(opt, name)  # as torch's


# -- calls that find nothing -----------------------------------------------------------------------------------------


def test_accumulate_without_any_gradient_is_warned_of_once(opt):
    for expected in (1, 0):
        give_ones(opt)
        for p in params_of(opt):
            p.grad = None  # before it is taken
        found = heard(opt.accumulate)
        assert len(found) == expected
        for message in found:
            assert_names(message, ["accumulate() found no gradient", "cleared", "no_grad", "replaced"])


def test_a_second_accumulate_is_not_warned_of(opt):
    give_ones(opt)
    opt.accumulate()
    opt.accumulate()
    opt.step()
    opt.step()


def test_steps_that_never_find_a_gradient_are_warned_of_once(opt):
    """A parameter replaced after the optimizer was made trains nothing. One step for torch's schedulers is fine."""
    opt.step()
    opt.step()
    (message,) = heard(opt.step)
    assert_names(message, ["step(), 3 times in a row, found no gradient", "replaced"])
    for _ in range(5):
        opt.step()


@pytest.mark.parametrize("way", ["p.grad", "window", "in-backward"])
def test_steps_with_gradients_in_between_are_not_warned_of(opt, way):
    params = params_of(opt)
    if way == "in-backward":
        opt.accumulate_in_backward()
    for _ in range(4):
        if way == "in-backward":
            loss_with(params, [torch.ones_like(p) for p in params]).backward()
        else:
            give_ones(opt)
        if way == "window":
            opt.accumulate()
        opt.step()
        opt.step()
        opt.step()


@pytest.mark.parametrize("factor", [{"scale": 0.25}, {"weight": 3}], ids=str)
def test_a_factor_of_step_that_nothing_uses_is_warned_of_once(opt, factor):
    """accumulate() four times, and step(scale=1/4) that is to make a mean of it."""
    (name,) = factor
    for expected in (1, 0):
        for _ in range(4):
            give_ones(opt)
            opt.accumulate()
        found = heard(opt.step, **factor)
        assert len(found) == expected
        for message in found:
            assert_names(message, [f"{name} was not used", f"Pass {name}= to every accumulate()"])


@pytest.mark.parametrize("factor", [{"scale": 0.25}, {"weight": 3}], ids=str)
def test_a_factor_of_step_that_accumulate_had_too_is_not_warned_of(opt, factor):
    for _ in range(4):
        give_ones(opt)
        opt.accumulate(**factor)
    opt.step(**factor)


@pytest.mark.parametrize("name", ["scale", "weight"])
@pytest.mark.parametrize("call", ["accumulate", "step", "scale_loss"])
def test_a_loss_as_a_factor_is_refused(opt, call, name):
    if call == "scale_loss":
        opt.accumulate_in_backward()
    else:
        give_ones(opt)
    before, loss = snapshot(opt), params_of(opt)[0].sum()
    words = [f"{name} is a tensor that requires grad (the loss?)", f"{name}.detach()"]
    refused(TypeError, words, getattr(opt, call), *[loss] * (call == "scale_loss"), **{name: loss})
    assert_unchanged(before, snapshot(opt))
