"""accumulate_in_backward(): copies of the optimizer, and checkpoints in mid-window."""

import copy
import io
import pickle

import pytest
import torch
from backwards import gradients, loss_with, run_backwards, window
from harness import assert_same_run, copies, mid_window_state, parameters
from oracle import Oracle

pytestmark = pytest.mark.filterwarnings("error")

LARGE = {"lr": 0.5, "weight_decay": 0.3}


def through_pickle(opt):
    return pickle.loads(pickle.dumps(opt))


@pytest.mark.parametrize("copier", [copy.deepcopy, through_pickle], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("done", [0, 2], ids=["between", "in-mid-window"])
def test_a_copy_continues_once_its_hooks_are_installed(make, device, copier, done):
    params = parameters((65,), (13, 17), device=device)
    opt = make(params, **LARGE)
    opt.accumulate_in_backward()
    run_backwards(params, gradients(params, 2))
    opt.step()
    micros = gradients(params, 3)
    run_backwards(params, micros[:done])
    other = copier(opt)
    twins = other.param_groups[0]["params"]
    assert other.pending == opt.pending
    for call in (other.step, other.accumulate):
        with pytest.raises(RuntimeError, match=r"copy.*accumulate_in_backward\(\)"):
            call()
    other.accumulate_in_backward()
    for own in (params, twins):
        run_backwards(own, micros[done:])
    assert_same_run(opt, other)
    opt.step()
    other.step()
    assert_same_run(opt, other)


@pytest.mark.parametrize("into", ["in-backward", "explicit"])
@pytest.mark.parametrize("replaced", [False, True], ids=["alias", "replaced"])
def test_a_checkpoint_in_mid_window(make, device, into, replaced):
    params = parameters((65,), (13, 17), dtype=torch.bfloat16, device=device)
    opt = make(params, **LARGE)
    opt.accumulate_in_backward()
    micros = gradients(params, 4)
    run_backwards(params, micros[:2])
    if replaced:
        params[0].grad = params[0].grad.clone()
    file = io.BytesIO()
    torch.save(mid_window_state(opt), file)
    file.seek(0)
    twins = copies(params)
    other = make(twins, **LARGE)
    if into == "in-backward":
        other.accumulate_in_backward()
    other.load_state_dict(torch.load(file))
    assert other.pending == opt.pending == (2, 0.0)
    run_backwards(params, micros[2:])
    for micro in micros[2:]:
        loss_with(twins, micro.grads).backward()
        if into == "explicit":
            other.accumulate()
    opt.step()
    other.step()
    assert_same_run(opt, other)


MODES = {
    "explicit": lambda opt, model: None,
    "in-backward": lambda opt, model: opt.accumulate_in_backward(),
    "direct": lambda opt, model: opt.direct_wgrad(model),
    "main-grad": lambda opt, model: opt.attach_main_grad(),
}


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weights"])
@pytest.mark.parametrize("source", ["explicit", "same-mode"])
@pytest.mark.parametrize("mode", ["in-backward", "direct", "main-grad"])
def test_a_checkpoint_is_loaded_before_or_after_a_mode_begins(make, device, mode, source, weighted):
    """In either order the window goes on with the same bits, also those of the run that was saved in this mode."""

    def new_model():
        return torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 3)).to(device)

    model = new_model()
    opt = make(model.parameters(), **LARGE)
    MODES[mode if source == "same-mode" else source](opt, model)
    batches = torch.randn(9, 3, 5).to(device)

    def train(opt, model, some):
        for k in some:
            weight, loss = (k + 1 if weighted else None), model(batches[k]).square().mean()
            if opt.accumulates_in_backward:
                opt.scale_loss(loss, weight=weight).backward()
            else:
                loss.backward()
                opt.accumulate(weight=weight)

    train(opt, model, [0, 1, 2])
    opt.step()
    train(opt, model, [3, 4])
    saved = copy.deepcopy(mid_window_state(opt))
    runs = [(opt, model)] if source == "same-mode" else []
    for order in ("load first", "mode first"):
        twin = new_model()
        twin.load_state_dict(model.state_dict())
        other = make(twin.parameters(), **LARGE)
        if order == "mode first":
            MODES[mode](other, twin)
        other.load_state_dict(copy.deepcopy(saved))
        if order == "load first":
            MODES[mode](other, twin)
        assert other.accumulates_in_backward
        assert other.pending == (2, 9.0 if weighted else 0.0)
        assert_same_run(opt, other)
        runs.append((other, twin))
    for one, net in runs:
        train(one, net, [5])
    for one, net in runs:
        assert_same_run(runs[-1][0], one)
        one.step()
        train(one, net, [6, 7, 8])
        one.step()
    for one, _ in runs:
        assert_same_run(runs[-1][0], one)
        assert float(one.state[one.param_groups[0]["params"][0]]["step"]) == 3


def test_a_gradient_in_the_place_of_a_restored_sum_is_refused(make, device):
    (p,) = parameters((3,), device=device)
    opt = make([("weight", p)], lr=0.5)
    p.grad = torch.ones_like(p)
    opt.accumulate()
    fresh = make([("weight", q := copies([p])[0])], lr=0.5)
    fresh.load_state_dict(copy.deepcopy(mid_window_state(opt)))
    q.grad = torch.ones_like(q)
    with pytest.raises(RuntimeError, match=r"'weight'.*1 micro-batch.*discard_microbatch\(\)"):
        fresh.accumulate_in_backward()
    assert not fresh.accumulates_in_backward
    fresh.discard_microbatch()
    fresh.accumulate_in_backward()
    assert fresh.pending == (1, 0.0)
    assert_same_run(opt, fresh)


def test_what_is_accumulated_after_loading_is_explicit(make, device):
    (p,) = parameters((3,), device=device)
    opt = make([p], lr=0.5)
    p.grad = torch.ones_like(p)
    opt.accumulate()
    fresh = make(copies([p]), lr=0.5)
    fresh.load_state_dict(copy.deepcopy(mid_window_state(opt)))
    fresh.param_groups[0]["params"][0].grad = torch.ones_like(p)
    fresh.accumulate()
    with pytest.raises(RuntimeError, match="1 explicit micro-batch"):
        fresh.accumulate_in_backward()
    assert fresh.pending == (2, 0.0)


def test_a_copy_of_main_grad_keeps_its_window(make, device):
    params = parameters((65,), (13, 17), device=device)
    opt = make(params, **LARGE)
    opt.attach_main_grad()
    run_backwards(params, gradients(params, 2))
    other = copy.deepcopy(opt)
    other.attach_main_grad()
    assert_same_run(opt, other)


def test_loading_drops_the_open_window(make, device):
    params = parameters((65,), device=device)
    opt = make(params, **LARGE)
    oracle = Oracle(opt)
    opt.accumulate_in_backward()
    saved = copy.deepcopy(opt.state_dict())
    run_backwards(params, gradients(params, 2))
    with pytest.warns(UserWarning, match="dropped 2"):
        opt.load_state_dict(saved)
    assert params[0].grad is None
    window(opt, params, oracle)
