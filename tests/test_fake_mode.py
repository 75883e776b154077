"""Calls inside a FakeTensorMode are refused before anything is allocated: afterwards all is as it was."""

import pytest
import torch
from harness import assert_same_run, assert_unchanged, copies, open_window, parameters, params_of, refused, snapshot
from torch._subclasses.fake_tensor import FakeTensorMode

pytestmark = pytest.mark.filterwarnings("error")

OPTIONS = {"plain": {}, "clipped": {"max_grad_norm": 1.0}, "bf16": {"accum_dtype": torch.bfloat16}}
CALLS = {
    "accumulate": lambda opt: opt.accumulate(),
    "step": lambda opt: opt.step(),
    "zero_grad": lambda opt: opt.zero_grad(),
    "discard_microbatch": lambda opt: opt.discard_microbatch(),
    "accumulate_in_backward": lambda opt: opt.accumulate_in_backward(),
    "step_in_backward": lambda opt: opt.step_in_backward().__enter__(),
}


def fake():
    return FakeTensorMode(allow_non_fake_inputs=True)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("call", CALLS)
def test_the_first_call_of_all(make, device, call, options):
    """When there is neither state nor a buffer nor a bucket."""
    params = parameters((5,), (4, 5), device=device)
    runs = [make(copies(params), lr=0.5, **OPTIONS[options]) for _ in range(2)]
    for opt in runs:
        for p in params_of(opt):
            p.grad = torch.ones_like(p)
    with fake():
        refused(RuntimeError, [call, "FakeTensorMode", "leave the mode", "Nothing was changed"], CALLS[call], runs[0])
    assert not runs[0].state
    for opt in runs:
        for scale in (0.25, 0.75):
            for p in params_of(opt):
                p.grad = torch.ones_like(p)
            opt.accumulate(scale)
        opt.step()
        assert {type(value) for own in opt.state.values() for value in own.values()} == {torch.Tensor}
    assert_same_run(*runs)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("call", [*CALLS, "state_dict"])
def test_a_call_in_mid_window(make, device, call, options):
    opt = open_window(make, device, **OPTIONS[options])
    before = snapshot(opt)
    with fake():
        refused(RuntimeError, [call, "FakeTensorMode"], CALLS.get(call, lambda opt: opt.state_dict()), opt)
    assert_unchanged(before, snapshot(opt))
    opt.step(scale=0.5)


def test_a_look_at_the_backends(make, device):
    opt = make(parameters((5,), device=device), max_grad_norm=1.0)
    with fake():
        refused(RuntimeError, ["FakeTensorMode"], lambda: opt.backends)
    (p,) = params_of(opt)
    p.grad = torch.ones_like(p)
    opt.step()
    assert float(opt.grad_norm) == pytest.approx(5**0.5)


@pytest.mark.parametrize("stepped", [False, True], ids=["no-buffer", "buffer"])
@pytest.mark.parametrize("mode", ["accumulate_in_backward", "direct_wgrad"])
def test_a_backward(make, device, mode, stepped):
    """While accumulating in backward; real data through the same model then trains it as ever."""
    runs = []
    for faked in (False, True):
        torch.manual_seed(0)
        model, x = torch.nn.Linear(4, 3).to(device), torch.randn(2, 4).to(device)
        opt = make(model.parameters(), lr=0.5)
        getattr(opt, mode)(*([model] if mode == "direct_wgrad" else []))
        if stepped:
            model(x).sum().backward()
            opt.step()
        if faked:
            with fake():
                loss = model(x).sum()
                refused(RuntimeError, ["backward", "FakeTensorMode"], loss.backward)
            assert opt.pending == (0, 0.0)
            opt.zero_grad()
        for _ in range(2):
            model(x).sum().backward()
        opt.step()
        runs.append(opt)
    assert_same_run(*runs)
