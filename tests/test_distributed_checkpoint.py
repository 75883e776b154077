"""torch.distributed.checkpoint and what torchtitan builds on it: nested and flattened state dicts, files, windows.

Both make the state of a fresh optimizer by a step of zero gradients with lr 0.
"""

import copy
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness import assert_same_run, mid_window_state, params_of
from oracle import same_bits
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from fused_accum import FusedAccumAdamW

pytestmark = pytest.mark.filterwarnings("error")

LARGE = {"lr": 0.1, "weight_decay": 0.3}
FORMS = pytest.mark.parametrize("flatten", [False, True], ids=["nested", "flattened"])


def model_on(device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2)).to(device)


def backward(model, k: int) -> None:
    x = torch.linspace(-1, 1, 20, device=next(model.parameters()).device).view(5, 4)
    (model(x * (k + 1)) - k).square().mean().backward()


def train(model, opt, windows: int) -> None:
    """Windows of one micro-batch, which torch.optim.AdamW has too."""
    for k in range(windows):
        backward(model, k)
        opt.step()
        opt.zero_grad()


def saved(model, opt, flatten: bool) -> dict:
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    return copy.deepcopy(get_optimizer_state_dict(model, opt, options=options))


def load(model, opt, state: dict, flatten: bool) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    set_optimizer_state_dict(model, opt, optim_state_dict=state, options=options)


def stock(params, **options):
    return torch.optim.AdamW(params, **LARGE, **options)


@FORMS
@pytest.mark.parametrize("windows", [0, 2])
@pytest.mark.parametrize(("into", "out_of"), [(False, True), (True, False), (False, False)],
                         ids=["from-torch", "into-torch", "ours"])  # fmt: skip
def test_with_and_without_torch(make, device, flatten, windows, into, out_of):
    """The copy trains as the original. Of an optimizer that never stepped torch saves the state after a step that
    moved nothing, which counts as one: ours, saved and loaded, is what torch's is."""
    makers = [stock if theirs else lambda params, **o: make(params, **LARGE, **o) for theirs in (out_of, into)]
    models = [model_on(device) for _ in range(2)]
    source, target = (maker(m.parameters(), amsgrad=True) for maker, m in zip(makers, models))
    train(models[0], source, windows)
    before = [p.detach().clone() for p in models[0].parameters()]
    state = saved(models[0], source, flatten)
    assert all(map(same_bits, before, models[0].parameters()))
    assert source.param_groups[0]["lr"] == LARGE["lr"]
    models[1].load_state_dict(models[0].state_dict())
    load(models[1], target, state, flatten)
    assert target.param_groups[0]["lr"] == LARGE["lr"]
    for p, q in zip(params_of(source), params_of(target)):
        assert source.state[p].keys() == target.state[q].keys()
        assert all(same_bits(source.state[p][key], value) for key, value in target.state[q].items())
        assert float(target.state[q]["step"]) == max(windows, 1)
    for model, opt in zip(models, (source, target)):
        train(model, opt, 2)
    for p, q in zip(params_of(source), params_of(target)):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("weight", [None, 3.0])
@pytest.mark.parametrize("windows", [0, 1])
def test_nested_in_mid_window(make, device, windows, weight):
    """The run that goes on from it has the same bits; also before the first step, when a step that makes the state
    would end the window."""
    model = model_on(device)
    opt = make(model.parameters(), **LARGE)
    train(model, opt, windows)
    backward(model, 7)
    scale = 0.5 if weight is None else 1.0
    opt.accumulate(scale, weight=weight)
    with pytest.warns(UserWarning, match="mid-window"):
        state = saved(model, opt, flatten=False)
    assert opt.pending == (1, weight or 0.0)
    twin = copy.deepcopy(model)
    other = make(twin.parameters(), **LARGE)
    load(twin, other, state, flatten=False)
    assert other.pending == opt.pending
    for net, one in ((model, opt), (twin, other)):
        backward(net, 8)
        one.step(scale=scale, weight=weight and weight + 2)
    assert_same_run(opt, other)


@pytest.mark.parametrize("windows", [0, 1])
@pytest.mark.parametrize("road", ["flattened", "file", "flattened-file"])
def test_roads_that_lose_the_window_say_so_when_saving(make, device, tmp_path, windows, road):
    """A flattened state_dict is taken apart by what the new optimizer has, and files are read by it: neither knows
    the window. Everything else arrives."""
    flatten = road != "file"
    model = model_on(device)
    opt = make(model.parameters(), **LARGE)
    train(model, opt, windows)
    moments = [opt.state[p]["exp_avg"].clone() if windows else torch.zeros_like(p) for p in params_of(opt)]
    backward(model, 7)
    opt.accumulate()
    with pytest.warns(UserWarning, match=r"mid-window.*flattened.*load\(\).*drop"):
        state = saved(model, opt, flatten)
    twin = copy.deepcopy(model)
    other = make(twin.parameters(), **LARGE)
    if road != "flattened":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, about running in one process
            dcp.save({"optimizer": state}, checkpoint_id=tmp_path)
            found = {"optimizer": saved(twin, other, flatten)}
            dcp.load(found, checkpoint_id=tmp_path)
        state = found["optimizer"]
    load(twin, other, state, flatten)
    assert other.pending == (0, 0.0)
    for p, expected in zip(params_of(other), moments):
        assert same_bits(other.state[p]["exp_avg"], expected)
        assert float(other.state[p]["step"]) == windows
        assert set(other.state[p]) == {"step", "exp_avg", "exp_avg_sq"}
    train(twin, other, 1)


@FORMS
def test_in_mid_window_of_a_backward_mode(make, device, flatten):
    """Where p.grad is the window nothing steps either; nested it is restored, into p.grad."""
    model = model_on(device)
    opt = make(model.parameters(), **LARGE)
    opt.accumulate_in_backward()
    backward(model, 7)
    with pytest.warns(UserWarning, match="mid-window"):
        state = saved(model, opt, flatten)
    assert opt.pending == (1, 0.0)
    twin = copy.deepcopy(model)
    for p in twin.parameters():
        p.grad = None
    other = make(twin.parameters(), **LARGE)
    other.accumulate_in_backward()
    load(twin, other, state, flatten)
    assert other.pending == (0 if flatten else 1, 0.0)
    for net, one in ((model, opt), (twin, other)):
        if not flatten:
            backward(net, 8)
        one.step()
    if not flatten:
        assert_same_run(opt, other)


@pytest.mark.parametrize("end", ["zero_grad", "step"])
def test_state_begun_by_a_window_goes_with_it(make, device, end):
    """An optimizer with an open window has state; one whose only window was discarded has none, as torch's."""
    model = model_on(device)
    opt = make(model.parameters(), **LARGE)
    for _ in range(2):
        backward(model, 1)
        opt.accumulate()
        assert opt.state
        assert {float(opt.state[p]["step"]) for p in params_of(opt)} == {0.0}
        if end == "step":
            break
        with pytest.warns(UserWarning, match="dropped 1"):
            opt.zero_grad()
        assert not any(opt.state.values())
        assert opt.state_dict()["state"] == {}
    else:
        return
    opt.step()
    backward(model, 1)
    opt.accumulate()
    with pytest.warns(UserWarning, match="dropped 1"):
        opt.zero_grad()
    assert {float(opt.state[p]["step"]) for p in params_of(opt)} == {1.0}


# -- torchtitan ------------------------------------------------------------------------------------------------------


class Container:
    """What torchtitan's OptimizersContainer does to the optimizers of its model parts, in short: state made by a step
    of zero gradients, flat state dicts by parameter name merged into one, steps and zero_grad passed on."""

    def __init__(self, parts, cls, **kwargs):
        self.parts = parts
        self.optimizers = [cls(part.named_parameters(), **kwargs) for part in parts]
        for opt in self.optimizers:
            self.init_state(opt)

    @staticmethod
    def init_state(opt):
        params = params_of(opt)
        if opt.state or any(p.grad is not None for p in params):
            return
        for p in params:
            p.grad = torch.zeros_like(p)
        rates = [group["lr"] for group in opt.param_groups]
        for group in opt.param_groups:
            group["lr"] = torch.tensor(0.0) if isinstance(group["lr"], torch.Tensor) else 0.0
        opt.step(closure=None)
        for group, lr in zip(opt.param_groups, rates):
            group["lr"] = lr
        opt.zero_grad(set_to_none=True)

    def step(self):
        for opt in self.optimizers:
            opt.step()

    def zero_grad(self, set_to_none):
        for opt in self.optimizers:
            opt.zero_grad(set_to_none=set_to_none)

    def state_dict(self):
        flat = {}
        for part, opt in zip(self.parts, self.optimizers):
            flat |= get_optimizer_state_dict(part, opt, options=StateDictOptions(flatten_optimizer_state_dict=True))
        return flat

    def load_state_dict(self, state):
        for part, opt in zip(self.parts, self.optimizers):
            load(part, opt, state, flatten=True)


@pytest.mark.parametrize(("lr", "set_to_none"), [(0.1, True), (torch.tensor(0.1), False)], ids=["float", "tensor"])
@pytest.mark.parametrize("mode", ["plain", "in-backward"])
def test_in_a_container_like_torchtitans(make, device, mode, set_to_none, lr):
    """Its loop: gradients of a window add up in p.grad (in the buffer, in a backward mode), then clip, step and
    zero_grad; a checkpoint of the flat state between windows. Parity with torch.optim.AdamW in the same container."""
    backend = make([torch.zeros(1, device=device)])._run.options.backend
    runs = []
    for cls in (torch.optim.AdamW, FusedAccumAdamW):
        ours = {"backend": backend} if cls is FusedAccumAdamW else {}
        torch.manual_seed(0)
        parts = [nn.ModuleDict({name: nn.Linear(4, 4)}).to(device) for name in ("first", "second")]
        container = Container(parts, cls, lr=copy.deepcopy(lr), weight_decay=0.3, foreach=False, fused=False, **ours)
        for n in range(4):
            if n == 2:  # resumed in a new process
                flat = copy.deepcopy(container.state_dict())
                container = Container(copy.deepcopy(parts), cls, lr=copy.deepcopy(lr), weight_decay=0.3, **ours)
                parts = container.parts
                container.load_state_dict(flat)
            if mode == "in-backward" and ours and n in (0, 2):
                for opt in container.optimizers:
                    opt.accumulate_in_backward()
            params = [p for part in parts for p in part.parameters()]
            for k in range(3):
                x = torch.linspace(-1, 1, 8, device=device).view(2, 4) * (k + n + 1)
                for part in parts:
                    (layer,) = part.values()
                    x = layer(x)
                (x.square().mean() / 3).backward()
            torch.nn.utils.clip_grad_norm_(params, 0.5)
            container.step()
            container.zero_grad(set_to_none=set_to_none)
        runs.append((params, container))
    for p, q in zip(runs[0][0], runs[1][0]):
        torch.testing.assert_close(p, q)
    theirs, ours = (container.state_dict() for _, container in runs)
    assert theirs.keys() == ours.keys()
    assert not mid_window_state(runs[1][1].optimizers[0])["param_groups"][0].get("accum_microbatches")
