"""Features of torch around an optimizer: averaged weights, torch.func, backwards in several threads, subclasses."""

import copy
import io
import threading

import pytest
import torch
from harness import assert_same_run, copies, micro_batches, parameters, params_of, run_window
from layers import tokens
from oracle import same_bits
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

from fused_accum import FusedAccumAdamW, checks

pytestmark = pytest.mark.filterwarnings("error")

MODES = pytest.mark.parametrize("mode", ["explicit", "in-backward", "direct"])


def small_model(device="cpu") -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)).to(device)


def enter(mode: str, opt, model) -> None:
    if mode == "direct":
        opt.direct_wgrad(model)
    elif mode == "in-backward":
        opt.accumulate_in_backward()


def loss_of(model, k: float, device="cpu"):
    return (model(torch.linspace(-1, 1, 12, device=device).view(3, 4) * k) - k).square().mean()


# ---- averaged weights ----------------------------------------------------------------------------------------------


@MODES
@pytest.mark.parametrize("average", [None, get_ema_multi_avg_fn(0.9)], ids=["mean", "ema"])
def test_averaged_model(make, device, mode, average):
    """torch.optim.swa_utils around windows: the average and the schedule are those beside torch.optim.AdamW."""
    runs = []
    for ours in (False, True):
        model = small_model(device)
        model.insert(0, nn.BatchNorm1d(4, device=device))
        maker = make if ours else torch.optim.AdamW
        opt = maker(model.parameters(), lr=0.1, weight_decay=0.3)
        if ours:
            enter(mode, opt, model)
        averaged = AveragedModel(model, multi_avg_fn=average)  # a deep copy: of the model under our hooks
        schedule = SWALR(opt, swa_lr=0.01, anneal_epochs=3)
        for n in range(5):
            for k in range(2):
                (loss_of(model, n + k + 1, device) / 2).backward()
                if ours and mode == "explicit":
                    opt.accumulate()
            opt.step()
            opt.zero_grad()
            averaged.update_parameters(model)
            schedule.step()
        update_bn([torch.linspace(-2, 3, 12, device=device).view(3, 4)], averaged)
        runs.append((averaged.state_dict(), opt.param_groups[0]["lr"]))
    assert runs[0][1] == runs[1][1]
    for name, value in runs[0][0].items():
        torch.testing.assert_close(runs[1][0][name], value, rtol=1e-4, atol=1e-5)


# ---- torch.func ----------------------------------------------------------------------------------------------------

TRANSFORMS = {
    "functional_call": lambda model, x, params: torch.func.functional_call(model, params, (x,)),
    "grad of parameters": lambda model, x, params: torch.func.grad(
        lambda p: torch.func.functional_call(model, p, (x,)).sum()
    )(params)["0.weight"],
    "grad of the input": lambda model, x, params: torch.func.grad(lambda z: model(z).sum())(x),
    "vmap": lambda model, x, params: torch.func.vmap(model)(x),
    "jacrev": lambda model, x, params: torch.func.jacrev(model)(x),
    "per-sample gradients": lambda model, x, params: torch.func.vmap(
        torch.func.grad(lambda p, z: torch.func.functional_call(model, p, (z,)).sum()), in_dims=(None, 0)
    )(params, x)["2.weight"],
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("mode", ["in-backward", "direct"])
def test_torch_func(make, device, mode, transform):
    """Transforms of a model whose backward accumulates: as of any model, and no window knows of them."""
    model, plain = small_model(device), small_model(device)
    opt = make(model.parameters(), lr=0.1)
    enter(mode, opt, model)
    loss_of(model, 1.0, device).backward()
    before = [p.grad.clone() for p in model.parameters()]
    x = torch.linspace(-1, 1, 12, device=device).view(3, 4)
    params = {name: p.detach() for name, p in plain.named_parameters()}
    torch.testing.assert_close(transform(model, x, params), transform(plain, x, params))
    assert opt.pending == (1, 0.0)
    assert all(same_bits(p.grad, g) for p, g in zip(model.parameters(), before))


def test_a_loss_that_went_through_vmap_counts(make, device):
    """In direct mode the layers are ordinary inside a transform: their gradients reach the buffer all the same."""
    model, plain = small_model(device), small_model(device)
    opt = make(model.parameters(), lr=0.1)
    opt.direct_wgrad(model)
    x = torch.linspace(-1, 1, 12, device=device).view(3, 4)
    for one in (model, plain):
        loss_of(one, 2.0, device).backward()
        torch.func.vmap(one)(x).square().sum().backward()
    assert opt.pending == (2, 0.0)
    for p, q in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(p.grad, q.grad)


# ---- several threads -----------------------------------------------------------------------------------------------


@MODES
def test_backwards_in_several_threads(make, device, mode):
    """At once, on the same parameters: torch locks its own sums, but not what hooks do. Explicit mode is right; where
    hooks accumulate the second backward is refused, and the window with it."""
    threads = 4
    model = nn.ModuleList([nn.Embedding(11, 16), *[nn.Linear(16, 16) for _ in range(3)]]).to(device)
    plain = copy.deepcopy(model)
    opt = make(model.parameters(), lr=0.1)
    enter(mode, opt, model)
    batches = [batch % 11 for batch in tokens(threads, device=device)]
    together, failures = threading.Barrier(threads), []

    class Meet(torch.autograd.Function):
        """The identity; its backward waits for that of all threads, when the last layer's hooks have run."""

        @staticmethod
        def forward(ctx, x, meet):
            ctx.meet = meet
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            ctx.meet()
            return g, None

    def backward(net, batch, meet):
        x = net[0](batch)
        for layer in net[1:]:
            x = layer(Meet.apply(x, meet))
        x.square().mean().backward()

    def work(batch):
        try:
            backward(model, batch, lambda: together.wait(60))
        except (RuntimeError, threading.BrokenBarrierError) as error:
            failures.append(error)
            together.abort()

    for batch in batches:
        backward(plain, batch, lambda: None)
    running = [threading.Thread(target=work, args=(batch,)) for batch in batches]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    if mode == "explicit":
        assert not failures
        for p, q in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)
        return
    assert any("two backward passes at once" in str(error) for error in failures)
    with pytest.raises(RuntimeError, match="did not finish"):
        opt.step()
    opt.zero_grad()
    before = [p.detach().clone() for p in model.parameters()]
    backward(model, batches[0], lambda: None)
    opt.step()
    assert not any(map(same_bits, model.parameters(), before))


# ---- subclasses ----------------------------------------------------------------------------------------------------


class Logging(FusedAccumAdamW):
    """A subclass as users write them: it does something around the step."""

    def step(self, closure=None, **factors):
        self.count = getattr(self, "count", 0) + 1
        return super().step(closure, **factors)


class Plain(FusedAccumAdamW):
    pass


@pytest.mark.parametrize("cls", [FusedAccumAdamW, Plain, Logging])
def test_subclasses_keep_the_protocol(cls):
    """Hooks run once a step, the profiler's name is the class's, schedulers and copies go on working."""
    (p,) = params = [nn.Parameter(torch.ones(5))]
    opt, calls = cls(params, lr=0.5), []
    opt.register_step_pre_hook(lambda *_: calls.append("pre"))
    opt.register_step_post_hook(lambda *_: calls.append("post"))
    schedule = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
    p.grad = torch.ones(5)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        opt.step(weight=3)
    schedule.step()
    assert calls == ["pre", "post"]
    names = [event.key for event in profile.key_averages() if event.key.startswith("Optimizer.step")]
    assert names == [f"Optimizer.step#{cls.__name__}.step"]
    assert repr(opt).startswith(f"{cls.__name__} (\nParameter Group 0\n    amsgrad: False\n")
    again = copy.deepcopy(opt)
    assert type(again) is cls
    (q,) = params_of(again)
    for one, param in ((opt, p), (again, q)):
        param.grad = torch.ones(5)
        one.step()
    assert same_bits(p, q)
    assert opt.param_groups[0]["lr"] == again.param_groups[0]["lr"] == 0.25


def test_setstate_of_an_older_version():
    """A pickle from before a group key, the defaults' newer flags and our own part were there."""
    opt = FusedAccumAdamW([nn.Parameter(torch.ones(5))], lr=0.5)
    params_of(opt)[0].grad = torch.ones(5)
    opt.step()
    state = copy.deepcopy({"defaults": opt.defaults, "state": opt.state, "param_groups": opt.param_groups})
    for flag in ("foreach", "capturable", "differentiable", "fused", "maximize", "amsgrad"):
        for group in state["param_groups"]:
            del group[flag]
        del state["defaults"][flag]
    (p,) = state["param_groups"][0]["params"]
    other = FusedAccumAdamW([nn.Parameter(torch.zeros(5))])
    other.__setstate__(state)
    for one, param in ((opt, params_of(opt)[0]), (other, p)):
        param.grad = torch.ones(5)
        one.zero_grad(set_to_none=False)
        param.grad.add_(1.0)
        one.step()
    assert same_bits(params_of(opt)[0], p)
    file = io.BytesIO()
    torch.save(other, file)
    file.seek(0)
    assert len(torch.load(file, weights_only=False).state) == 1


# ---- CUDA graphs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("capturing", [True, False])
def test_a_capture_needs_capturable(monkeypatch, flags, capturing):
    """As in torch. test_gpu.py captures; emulated_scalars.py shows that kernels read lr and steps when they run."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    groups = [{"capturable": flag} for flag in flags]
    if capturing and not all(flags):
        with pytest.raises(RuntimeError, match="capturable=True"):
            checks.check_capture(groups)
    else:
        checks.check_capture(groups)


@pytest.mark.parametrize(
    "options",
    [{}, {"max_grad_norm": 0.1}, {"skip_nonfinite": "step"}, {"skip_nonfinite": "microbatch"}],
    ids=lambda options: "".join(map(str, options.values())) or "plain",
)
def test_a_default_device_other_than_the_parameters(make, device, options):
    """``with torch.device(...)`` is where new tensors go that name no device: ours all name one."""
    params = parameters((65,), (13, 17), (3,), device=device)
    there, usual = (make(own, lr=0.5, **options) for own in (copies(params), copies(params)))
    windows = [micro_batches(params, [(0.5, 2.0), (1.0, 3.0)], absent={(k, 1), (0, 2)}) for k in range(2)]
    windows[0][0].grads[0][5] = float("inf") if "skip_nonfinite" in options else 1.0
    for window in windows:
        with torch.device("meta"):
            run_window(there, window)
        run_window(usual, window)
        assert there.nonfinite_parameter == usual.nonfinite_parameter
        assert there.grad_norm == usual.grad_norm
    assert_same_run(there, usual)
