"""accumulate_in_backward(): hooks come and go with the parameters, which may freeze, move and be cast."""

import copy
import gc
import weakref

import pytest
import torch
from backwards import gradients, is_alias, loss_with, run_backwards, window
from harness import parameters
from oracle import Micro, Oracle

pytestmark = pytest.mark.filterwarnings("error")

LARGE = {"lr": 0.5, "weight_decay": 0.3}


def test_parameters_added_later(make, device):
    params = parameters((65,), (13, 17), device=device)
    opt = make(params[:1], **LARGE)
    oracle = Oracle(opt)
    opt.accumulate_in_backward()
    micros = gradients(params[:1], 1)
    run_backwards(params[:1], micros)
    opt.add_param_group({"params": params[1:], "weight_decay": 0.1})
    oracle.watch()
    more = gradients(params, 2)
    run_backwards(params, more)
    assert all(is_alias(opt, p) for p in params)
    oracle.window([Micro([*micros[0].grads, None]), *more])
    opt.step()
    oracle.check()
    window(opt, params, oracle)


def test_freezing_and_unfreezing(make, device):
    params = parameters((65,), (13, 17), device=device)
    params[1].requires_grad_(False)
    opt = make(params, **LARGE)
    oracle = Oracle(opt)
    opt.accumulate_in_backward()
    assert not params[1].requires_grad
    micros = gradients(params, 3, absent={(0, 1), (2, 0)})
    run_backwards(params, micros[:1])
    params[1].requires_grad_(True)
    run_backwards(params, micros[1:2])
    params[0].requires_grad_(False)  # in mid-window: it steps with what it has
    run_backwards(params, micros[2:])
    assert all(is_alias(opt, p) for p in params)
    oracle.window(micros)
    opt.step()
    oracle.check()


def test_parameters_replaced_in_the_groups(make, device):
    """As FSDP2 and accelerate do: the new ones get hooks at the next call, the old ones lose theirs."""
    old, new = parameters((65,), (65,), device=device)
    opt = make([old], **LARGE)
    opt.accumulate_in_backward()
    opt.param_groups[0]["params"][0] = new
    opt.step()
    assert not old._post_accumulate_grad_hooks
    run_backwards([new], gradients([new], 1))
    assert is_alias(opt, new)


@pytest.mark.parametrize("when", ["between", "in-mid-window"])
@pytest.mark.parametrize("to", [torch.bfloat16, torch.float64], ids=str)
def test_a_model_that_is_cast_later(make, device, when, to):
    model = torch.nn.Linear(5, 7).to(device)
    params = list(model.parameters())
    opt = make(params, lr=0.1)
    opt.accumulate_in_backward()
    micros = gradients(params, 2)
    run_backwards(params, micros[:1])
    if when == "between":
        opt.step()
    model.to(to)
    for p in params:
        opt.state.pop(p, None)
    run_backwards(params, micros[1:])
    wide = torch.float64 if to == torch.float64 else torch.float32
    for i, p in enumerate(params):
        first = micros[0].grads[i].to(to) if when == "in-mid-window" else 0
        torch.testing.assert_close(p.grad, (first + micros[1].grads[i].to(to)).to(wide), rtol=1e-2, atol=1e-2)
        assert is_alias(opt, p)
        assert p.grad.dtype == wide
    opt.step()
    assert all(p.grad is None and p.dtype == to for p in params)


def test_a_parameter_cast_under_its_window_is_refused(make, device):
    """Not its gradient with it, as module.to() does."""
    params = parameters((65,), device=device)
    opt = make(params)
    opt.accumulate_in_backward()
    run_backwards(params, gradients(params, 1))
    params[0].data = params[0].data.double()
    with pytest.raises(RuntimeError, match="must not be cast or moved in mid-window"):
        opt.step()


def test_a_second_owner_is_refused(make, device):
    shared, own, other = parameters((65,), (5,), (7,), device=device)
    first, second = make([shared, own]), make([("w", other), ("tied", shared)])
    handle = first.accumulate_in_backward()
    with pytest.raises(RuntimeError, match=r"'tied' is already accumulated in backward by another"):
        second.accumulate_in_backward()
    assert not other._post_accumulate_grad_hooks
    third = make([other])
    third.accumulate_in_backward()
    with pytest.raises(RuntimeError, match="another FusedAccumAdamW"):
        third.add_param_group({"params": [own]})
    assert len(third.param_groups) == 1
    run_backwards([shared], gradients([shared], 1))
    first.step()
    handle.remove()
    second = make([shared])
    second.accumulate_in_backward()


def test_an_owner_that_is_gone_does_not_count(make, device):
    params = parameters((65,), device=device)
    make(params).accumulate_in_backward()
    opt = make(params, **LARGE)
    opt.accumulate_in_backward()
    window(opt, params, Oracle(opt))


def test_installing_twice_and_with_explicit_micro_batches_pending(make, device):
    params = parameters((65,), device=device)
    opt = make(params)
    handle = opt.accumulate_in_backward()
    with pytest.raises(RuntimeError, match=r"remove\(\) the first"):
        opt.accumulate_in_backward()
    handle.remove()
    handle.remove()
    params[0].grad = torch.ones_like(params[0])
    opt.accumulate()
    with pytest.raises(RuntimeError, match=r"1 explicit micro-batch.*step\(\) or zero_grad\(\)"):
        opt.accumulate_in_backward()
    opt.step()
    opt.accumulate_in_backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_removal_restores_everything(make, device, dtype):
    params = parameters((65,), dtype=dtype, device=device)
    opt = make(params, **LARGE)
    oracle = Oracle(opt)
    for mid_window in (False, True):
        with opt.accumulate_in_backward():
            window(opt, params, oracle)
            micros = gradients(params, 2) if mid_window else []
            run_backwards(params, micros)
        assert not params[0]._post_accumulate_grad_hooks
        if mid_window:  # p.grad is still the window
            torch.nn.utils.clip_grad_norm_(params, 1e9)
            assert opt.pending.microbatches == 2
            oracle.window(micros)
            opt.step()
            oracle.check()
        assert params[0].grad_dtype == dtype
        (micro,) = gradients(params, 1)
        loss_with(params, micro.grads).backward()
        assert params[0].grad.dtype == dtype
        opt.accumulate(weight=3)  # explicit again
        oracle.window([micro])
        opt.step()
        oracle.check()


def test_installing_again_while_the_last_window_is_open(make, device):
    params = parameters((65,), dtype=torch.bfloat16, device=device)
    opt = make(params, **LARGE)
    oracle = Oracle(opt)
    micros = gradients(params, 2)
    with opt.accumulate_in_backward():
        run_backwards(params, micros[:1])
    with opt.accumulate_in_backward():
        run_backwards(params, micros[1:])
        assert opt.pending.microbatches == 2
        oracle.window(micros)
        opt.step()
        oracle.check()


@pytest.mark.parametrize("mid_window", [False, True])
def test_nothing_keeps_memory(make, device, mid_window):
    """Optimizer, parameters and buffers die without the garbage collector, whichever goes first."""
    gc.collect()
    gc.disable()
    try:
        for first in ("optimizer", "parameters"):
            params = parameters((512, 512), device=device)
            opt = make(params)
            handle = opt.accumulate_in_backward()
            run_backwards(params, gradients(params, 2))
            if not mid_window:
                opt.step()
            runs, tensors = weakref.ref(opt._run), weakref.ref(params[0])
            del handle
            if first == "optimizer":
                del opt
                assert runs() is None
                assert not params[0]._post_accumulate_grad_hooks
                del params
            else:
                del params, opt
            assert tensors() is None
            assert runs() is None
    finally:
        gc.enable()


BEGIN = {
    "in-backward": lambda opt, model: opt.accumulate_in_backward(),
    "direct": lambda opt, model: opt.direct_wgrad(model),
    "main-grad": lambda opt, model: opt.attach_main_grad(),
}


def frozen_base(dtype, device):
    if dtype == "inference":
        with torch.inference_mode():
            return torch.nn.Parameter(torch.ones(4, 4, device=device), requires_grad=False)
    return torch.nn.Parameter(torch.ones(4, 4, device=device).to(dtype), requires_grad=False)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, "inference"], ids=str)
@pytest.mark.parametrize("begin", BEGIN.values(), ids=BEGIN)
def test_a_frozen_parameter_that_cannot_require_grad(make, device, begin, dtype):
    """As quantized bases keep them in model.parameters(): they are left alone, as by torch's AdamW."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4)).to(device)
    model.register_parameter("base", frozen_base(dtype, device))
    params = list(model[0].parameters())
    opt = make([model.base, *params], **LARGE)
    handle = begin(opt, model)
    for _ in range(2):
        run_backwards(params, gradients(params, 2))
        assert all(is_alias(opt, p) for p in params)
        opt.step()
    assert model.base not in opt.state
    assert all(float(opt.state[p]["step"]) == 2 for p in params)
    handle.remove()
    assert not model.base.requires_grad


@pytest.mark.parametrize("begin", ["in-backward", "direct"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_lazy_layer_before_its_first_forward(make, device, begin, dtype):
    model = torch.nn.Sequential(torch.nn.LazyLinear(3, dtype=dtype), torch.nn.Linear(3, 2, dtype=dtype)).to(device)
    opt = make(model.parameters(), **LARGE)
    handle = BEGIN[begin](opt, model)
    if begin == "direct":
        assert handle.direct == ["1.weight", "1.bias"]
        assert "lazy" in handle.ordinary["0.weight"]
    batch = torch.randn(6, 5, device=device, dtype=dtype)
    for x in batch.chunk(2):
        opt.scale_loss(model(x).float().square().mean(), weight=len(x)).backward()
        assert all(is_alias(opt, p) for p in model.parameters())
    twin = copy.deepcopy(model)
    twin.zero_grad()
    twin(batch).float().square().mean().backward()
    opt.step()
    rtol = 1e-5 if dtype == torch.float32 else 5e-2
    for p, q in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(opt.state[p]["exp_avg"], 0.1 * q.grad.float(), rtol=rtol, atol=rtol)
    with pytest.raises(RuntimeError, match="lazy layer"):
        make(torch.nn.LazyLinear(3).parameters()).attach_main_grad()
