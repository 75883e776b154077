"""Parameters that are frozen, removed, added, moved or replaced, between windows and within one."""

import warnings

import pytest
import torch
from cases import WINDOWS
from harness import (
    assert_same_run,
    copies,
    feed,
    micro_batches,
    mid_window_state,
    parameters,
    params_of,
    run_checked,
    run_window,
    values,
)
from oracle import Micro, Oracle, same_bits

pytestmark = pytest.mark.filterwarnings("error")


# ---- freezing, removing, adding ---------------------------------------------------------------------------


def test_freeze_and_unfreeze_between_windows(make, device):
    params = parameters((65,), (5,), device=device)
    opt = make(params, lr=0.5, weight_decay=0.3)
    oracle = Oracle(opt)
    for n in range(6):
        params[1].requires_grad_(n not in (2, 3))
        absent = {(k, 1) for k in range(3) if not params[1].requires_grad}
        micros = micro_batches(params, WINDOWS["uneven"], absent=absent)
        run_checked(opt, oracle, micros)
        opt.state_dict()
    assert float(opt.state[params[1]]["step"]) == 4


def test_removed_parameter_keeps_its_state_and_comes_back(make, device):
    params = parameters((65,), (5,), device=device)
    opt = make(params, lr=0.5, weight_decay=0.3)
    oracle = Oracle(opt)
    for n in range(6):
        if n == 2:
            popped = opt.param_groups[0]["params"].pop(1)
        if n == 4:
            opt.param_groups[0]["params"].append(popped)
        micros = micro_batches(params_of(opt), WINDOWS["uneven"])
        run_checked(opt, oracle, micros)
        state = opt.state_dict()  # torch raises KeyError here
        assert set(state["state"]) == set(range(len(params_of(opt))))
    assert [float(opt.state[p]["step"]) for p in params] == [6, 4]


def test_add_param_group_between_windows(make, device):
    params = parameters((65,), (5,), device=device)
    opt = make(params[:1], lr=0.5, weight_decay=0.3)
    oracle = Oracle(opt)
    for n in range(4):
        if n == 2:
            opt.add_param_group({"params": params[1:], "lr": 0.1, "betas": (0.5, 0.5)})
            oracle.watch()
        micros = micro_batches(params_of(opt), WINDOWS["uneven"])
        run_checked(opt, oracle, micros)


def test_parameters_replaced_in_a_group(make, device):
    """What accelerate's FSDP2 path does: other objects in group['params'] after construction."""
    opt = make(parameters((65,), (5,), device=device), lr=0.5)
    run_window(opt, micro_batches(params_of(opt), WINDOWS["uneven"]))
    opt.param_groups[0]["params"][:] = parameters((9,), (65,), device=device)
    oracle = Oracle(opt)
    for _ in range(2):
        micros = micro_batches(params_of(opt), WINDOWS["uneven"])
        run_checked(opt, oracle, micros)


def test_zero_redundancy_style_state_assignment(make, device):
    """ZeroRedundancyOptimizer assigns optimizer.state[param] itself."""
    params = parameters((65,), device=device)
    opt, other = make(params, lr=0.5), make(copies(params), lr=0.5)
    micro = Micro([values((65,), device=device)])
    run_window(opt, [micro])
    for p, q in zip(params, params_of(other)):
        q.data.copy_(p)
        other.state[q] = {name: value.clone() for name, value in opt.state[p].items()}
    for o in (opt, other):
        torch.manual_seed(1)
        run_window(o, micro_batches(params, WINDOWS["uneven"]))
    assert_same_run(opt, other)


def test_it_can_be_printed(make, device):
    opt = make(parameters((5,), device=device), lr=0.5)
    assert "FusedAccumAdamW" in repr(opt)
    assert "lr: 0.5" in repr(opt)


def test_backends_tells_what_runs(make, on, device):
    params = parameters((5,), (3,), device=device)
    opt = make(params)
    rows = opt.backends
    assert sum(row.parameters for row in rows) == 2
    assert {row.backend for row in rows} == {on[0]}
    assert all(isinstance(row.reason, str) and row.reason for row in rows)


# ---- groups that change in mid-window ---------------------------------------------------------------------


def test_frozen_in_mid_window_steps_with_what_it_has(make, device):
    params = parameters((65,), (5,), device=device)
    opt = make(params, lr=0.5, weight_decay=0.3)
    oracle = Oracle(opt)
    micros = micro_batches(params, WINDOWS["mean-of-4"], absent={(2, 1), (3, 1)})
    for k, micro in enumerate(micros):
        if k == 2:
            params[1].requires_grad_(False)
        feed(opt, micro, last=k == 3)
        if k < 3:
            mid_window_state(opt)
    oracle.window(micros)
    oracle.check()
    assert float(opt.state[params[1]]["step"]) == 1
    params[1].requires_grad_(True)
    with pytest.warns(UserWarning, match="weight="):
        run_window(opt, micros[:2])


def test_unfrozen_in_mid_window_joins(make, device):
    params = parameters((65,), (5,), device=device)
    params[1].requires_grad_(False)
    opt = make(params, lr=0.5)
    oracle = Oracle(opt)
    micros = micro_batches(params, WINDOWS["mean-of-4"], absent={(0, 1), (1, 1)})
    for k, micro in enumerate(micros):
        if k == 2:
            params[1].requires_grad_(True)
        feed(opt, micro, last=k == 3)
    oracle.window(micros)
    oracle.check()


def test_add_param_group_in_mid_window(make, device):
    params = parameters((65,), (5,), device=device)
    opt = make(params[:1], lr=0.5)
    micros = micro_batches(params, WINDOWS["mean-of-4"], absent={(0, 1), (1, 1)})
    for k, micro in enumerate(micros):
        if k == 2:
            opt.add_param_group({"params": params[1:], "lr": 0.1})
            oracle = Oracle(opt)
            assert opt.pending == (2, 0.0)
        feed(opt, micro, last=k == 3)
    oracle.window(micros)
    oracle.check()


def test_removed_in_mid_window_is_not_updated(make, device):
    """It has left the optimizer: no update, no crash, and never an old sum in a later window."""
    params = parameters((65,), (5,), device=device)
    opt = make(params, lr=0.5)
    run_window(opt, micro_batches(params, WINDOWS["mean-of-4"]))
    oracle = Oracle(opt)
    oracle.adopt()
    micros = micro_batches(params, WINDOWS["mean-of-4"])
    feed(opt, micros[0])
    popped = opt.param_groups[0]["params"].pop(1)
    left = popped.detach().clone()
    mid_window_state(opt)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it may say that a part of the window is dropped
        for k in (1, 2, 3):
            feed(opt, micros[k], last=k == 3)
    for micro in micros:
        micro.grads.pop(1)
    oracle.window(micros)
    oracle.check()
    assert same_bits(popped, left)
    opt.param_groups[0]["params"].append(popped)
    again = micro_batches(params, WINDOWS["mean-of-4"])
    oracle.window(again)
    run_window(opt, again)
    oracle.check()


def test_moved_between_groups_in_mid_window(make, device):
    """The sum goes with the parameter; hyper-parameters are those of the group at the step."""
    params = parameters((65,), (5,), device=device)
    opt = make([{"params": params[:1], "lr": 0.5}, {"params": params[1:], "lr": 0.1}])
    micros = micro_batches(params, WINDOWS["mean-of-4"])
    oracle = Oracle(opt)
    feed(opt, micros[0])
    opt.param_groups[1]["params"].append(opt.param_groups[0]["params"].pop())
    order = [1, 0]
    moved = [type(m)([m.grads[i] for i in order], m.scale, m.weight) for m in micros]
    oracle.window(moved)
    for k in (1, 2, 3):
        feed(opt, moved[k], last=k == 3)
    oracle.check()


@pytest.mark.parametrize("option", [{"max_grad_norm": 1.0}, {"master_weights": "fp32"}, {"backend": "cpu"}], ids=str)
def test_options_of_the_whole_optimizer_are_refused_in_a_group(make, option):
    params = parameters((3,), (4,))
    ((name, _),) = option.items()
    with pytest.raises(ValueError, match=rf"has {name}=.*pass {name}= to FusedAccumAdamW"):
        make([{"params": params, **option}])
    opt = make(params[:1])
    with pytest.raises(ValueError, match=rf"has {name}="):
        opt.add_param_group({"params": params[1:], **option})
    assert len(opt.param_groups) == 1


@pytest.mark.parametrize(("name", "value"), [("differentiable", True), ("decoupled_weight_decay", False)])
def test_a_group_that_asks_for_another_update_is_refused(make, name, value):
    """torch reads these from the group at every step. (foreach, fused and capturable change no bit.)"""
    (p,) = parameters((3,))
    opt = make([p])
    p.grad, before = torch.ones(3), p.detach().clone()
    opt.param_groups[0][name] = value
    with pytest.raises(ValueError, match=rf"param_groups\[0\] holds {name}={value}.*set it to {not value}"):
        opt.step()
    assert torch.equal(p, before)
    opt.param_groups[0][name] = not value
    opt.step()
    assert float(opt.state[p]["step"]) == 1


@pytest.mark.parametrize(("name", "value"), [("lr", None), ("betas", 0.9), ("weight_decay", "x"),
                                             ("lr", torch.ones(2))], ids=str)  # fmt: skip
def test_a_group_with_what_is_no_number_is_refused_by_name(make, name, value):
    (p,) = parameters((3,))
    opt = make([p])
    p.grad, before = torch.ones(3), p.detach().clone()
    opt.param_groups[0][name] = value
    with pytest.raises(ValueError, match=rf"param_groups\[0\] holds .*{name}=.*must be numbers"):
        opt.step()
    assert torch.equal(p, before)
    assert p.grad is not None
