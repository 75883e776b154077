"""What torch.optim promises around a step: closures, hooks, profiler, versions, inference mode."""

import copy

import pytest
import torch
from cases import WINDOWS
from harness import (
    copies,
    micro_batches,
    parameters,
    run_window,
    values,
)
from oracle import Micro, Oracle, same_bits

pytestmark = pytest.mark.filterwarnings("error")


# ---- closures --------------------------------------------------------------------------------------------


def test_closure_runs_first_with_grad_enabled_and_its_gradients_count(make, device):
    params = parameters((65,), device=device)
    opt = make(params, lr=0.5, weight_decay=0.3)
    oracle = Oracle(opt)
    target = values((65,), device=device)
    seen = []

    def closure():
        seen.append((torch.is_grad_enabled(), params[0].detach().clone()))
        opt.zero_grad()
        loss = ((params[0] - target) ** 2).sum()
        loss.backward()
        return loss

    before = params[0].detach().clone()
    oracle.window([Micro([2 * (before - target)])])
    with torch.no_grad():
        loss = opt.step(closure)
    assert seen[0][0]
    assert same_bits(seen[0][1], before)
    torch.testing.assert_close(loss.detach(), ((before - target) ** 2).sum())
    oracle.check()


def test_closure_may_accumulate(make, device):
    params = parameters((65,), (4,), device=device)
    opt = make(params, lr=0.5)
    oracle = Oracle(opt)
    micros = micro_batches(params, WINDOWS["tokens-scaled"], absent={(0, 1)})

    def closure():
        for micro in micros[:-1]:
            for p, g in zip(params, micro.grads):
                p.grad = g
            opt.accumulate(micro.scale, weight=micro.weight)
        for p, g in zip(params, micros[-1].grads):
            p.grad = g
        return "anything"

    oracle.window(micros)
    assert opt.step(closure, scale=micros[-1].scale, weight=micros[-1].weight) == "anything"
    oracle.check()


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_closure_that_raises_leaves_the_optimizer_usable(make, device, error):
    params = parameters((65,), device=device)
    opt = make(params, lr=0.5)
    oracle = Oracle(opt)
    micros = micro_batches(params, WINDOWS["sum"])
    params[0].grad = micros[0].grads[0]
    opt.accumulate()

    def closure():
        raise error

    with pytest.raises(error):
        opt.step(closure)
    assert opt.pending == (1, 0.0)
    params[0].grad = micros[1].grads[0]
    oracle.window(micros)
    opt.step()
    oracle.check()


# ---- around the step -------------------------------------------------------------------------------------


def test_hooks(make, device):
    params = parameters((5,), device=device)
    opt = make(params, lr=0.5)
    calls = []
    before = params[0].detach().clone()
    opt.register_step_pre_hook(lambda *a: calls.append(("pre", same_bits(params[0], before))))
    opt.register_step_post_hook(lambda *a: calls.append(("post", same_bits(params[0], before))))
    run_window(opt, micro_batches(params, WINDOWS["mean-of-4"]))
    assert calls == [("pre", True), ("post", False)]


def test_pre_hook_may_rewrite_the_arguments(make, device):
    params = parameters((65,), device=device)
    opt = make(params, lr=0.5)
    oracle = Oracle(opt)
    opt.register_step_pre_hook(lambda opt, args, kwargs: (args, {**kwargs, "scale": 0.25}))
    (micro,) = micro_batches(params, [(0.25, None)])
    params[0].grad = micro.grads[0]
    oracle.window([micro])
    opt.step(scale=1.0)
    oracle.check()


def test_profiler_shows_the_step(make, device):
    params = parameters((5,), device=device)
    opt = make(params)
    params[0].grad = torch.ones_like(params[0])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        opt.step()
    assert "Optimizer.step#FusedAccumAdamW.step" in {event.key for event in profile.key_averages()}


def test_versions_are_bumped(make, device):
    """autograd must notice that the parameters changed under a saved graph, as with any in-place update."""
    params = parameters((5,), device=device)
    opt = make(params)
    run_window(opt, micro_batches(params, [(0.5, None)] * 2))
    state = opt.state[params[0]]
    watched = [params[0], state["exp_avg"], state["exp_avg_sq"]]
    versions = [t._version for t in watched]
    loss = (params[0] ** 2).sum()
    run_window(opt, micro_batches(params, [(0.5, None)] * 2))
    assert all(t._version > v for t, v in zip(watched, versions))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_version_of_a_gradient_is_not_bumped(make, device):
    """Nothing writes into it; a graph that saved it stays valid."""
    params = parameters((5,), device=device)
    opt = make(params)
    grads = [torch.ones(5, device=device) for _ in range(2)]
    params[0].grad = grads[0]
    opt.accumulate(0.5)
    params[0].grad = grads[1]
    opt.step(scale=0.5)
    assert [g._version for g in grads] == [0, 0]


@pytest.mark.parametrize(("first", "second"), [(False, True), (True, True), (True, False)])
def test_inference_mode(make, device, first, second):
    """As torch: parameters made outside may be stepped inside. (Torch's state made inside cannot be stepped
    outside; ours is made outside inference mode and can.)"""
    params = parameters((65,), device=device)
    opt = make(params, lr=0.5)
    oracle = Oracle(opt)
    for mode in (first, second):
        micros = micro_batches(params, WINDOWS["mean-of-4"])
        oracle.window(micros)
        with torch.inference_mode(mode):
            run_window(opt, micros)
        oracle.check()


def test_parameter_made_in_inference_mode(make, device):
    with torch.inference_mode():
        p = torch.nn.Parameter(torch.ones(5, device=device))
        opt, stock = make([p], lr=0.5), torch.optim.AdamW([copies([p])[0]], lr=0.5)
        for o in (opt, stock):
            o.param_groups[0]["params"][0].grad = torch.full((5,), 2.0, device=device)
            o.step()
    torch.testing.assert_close(p.detach().clone(), stock.param_groups[0]["params"][0].detach().clone())


def test_gradients_from_real_backwards(make, device):
    """A small model with unused parameters in some micro-batches, against torch.optim.AdamW on the sum."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3)).to(device)
    extra = torch.nn.Linear(3, 3).to(device)
    params = [*model.parameters(), *extra.parameters()]
    opt = make(params, lr=0.1, weight_decay=0.2)
    oracle = Oracle(opt)
    for n in range(3):
        micros = []
        for k in range(4):
            x = values((5, 6), device=device)
            out = model(x)
            loss = (extra(out) if (n + k) % 3 == 0 else out).square().mean()
            loss.backward()
            micros.append(Micro([None if p.grad is None else p.grad.clone() for p in params], 0.25))
            if k < 3:
                opt.accumulate(0.25)
        oracle.window(micros)
        opt.step(scale=0.25)
        oracle.check()


def test_methods_called_on_a_wrapper(make, device):
    """Lightning wraps an optimizer in a class made on the fly that copies its __dict__ and calls its methods with
    another self: windows must be those of the optimizer itself."""
    params = parameters((65,), device=device)
    opt = make(params, lr=0.5)

    class Wrapper:
        def __init__(self, optimizer):
            self.__dict__ = dict(optimizer.__dict__)
            self.__class__ = type("Wrapped", (Wrapper, type(optimizer)), {})

    wrapper = Wrapper(opt)
    oracle = Oracle(opt)
    micros = micro_batches(params, WINDOWS["mean-of-4"])
    for k, micro in enumerate(micros[:3]):
        params[0].grad = micro.grads[0]
        (wrapper if k % 2 else opt).accumulate(0.25)
        assert opt.pending == wrapper.pending == (k + 1, 0.0)
    params[0].grad = micros[3].grads[0]
    oracle.window(micros)
    wrapper.step(scale=0.25)
    assert opt.pending == (0, 0.0)
    oracle.check()


def test_load_state_dict_on_a_wrapper_loads_the_optimizer(make, device):
    """torch's loading assigns ``state`` and ``param_groups``: on Lightning's wrapper they would stay there."""
    params = parameters((65,), device=device)
    opt = make(params, lr=0.5)

    class Wrapper:
        def __init__(self, optimizer):
            self.optimizer = optimizer
            self.__class__ = type("Wrapped", (Wrapper, type(optimizer)), {})

        def __getattr__(self, name):
            return getattr(self.optimizer, name)

    wrapper = Wrapper(opt)
    params[0].grad = values((65,), device=device)
    opt.step()
    saved = copy.deepcopy(wrapper.state_dict())
    params[0].grad = values((65,), device=device)
    opt.step()
    opt.param_groups[0]["lr"] = 0.1
    wrapper.load_state_dict(saved)
    assert vars(wrapper) == {"optimizer": opt}
    assert opt.param_groups[0]["lr"] == 0.5
    assert float(opt.state[params[0]]["step"]) == 1
    assert same_bits(opt.state[params[0]]["exp_avg"], saved["state"][0]["exp_avg"])
