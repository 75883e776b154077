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
