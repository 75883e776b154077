"""How native code reads tensors: each way there is, and whatever a user may have done to them since the last step."""

import copy
import sys

import pytest
import torch

from fused_accum import FusedAccumAdamW, _native
from tests import harness

C, _MISSING = _native.load()
pytestmark = pytest.mark.skipif(C is None, reason=_MISSING)

ATTRIBUTES, EXCHANGE, LIBTORCH = range(3)  # enum Way of csrc/exchange.h
WAYS = [ATTRIBUTES, EXCHANGE, LIBTORCH]
SHAPE = (3, 4)


@pytest.fixture(params=WAYS, ids=["attributes", "exchange", "libtorch"])
def way(request):
    C.set_tensor_class(torch.Tensor, request.param)
    yield request.param
    C.set_tensor_class(torch.Tensor)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = torch.nn.ParameterList(harness.parameters(SHAPE, SHAPE, (2, 3), dtype=torch.float64))


class Run:
    """One optimizer of a model, whose second parameter, its state and its gradient are what is changed."""

    def __init__(self, model, kind, **options):
        self.model, self.params = model, list(model.weights)
        self.opt = kind(self.params, lr=0.3, weight_decay=0.2, amsgrad=True, **options)

    @property
    def p(self):
        return self.params[1]

    @property
    def state(self):
        return self.opt.state[self.p]

    def step(self, seed, after_backward=lambda run: None):
        torch.manual_seed(seed)
        for p in self.params:
            harness.give(p, torch.randn(p.shape, dtype=p.dtype))
        after_backward(self)
        self.opt.step()
        for p in self.params:
            p.grad = None

    def result(self):
        return [t for p in self.params for t in (p.detach(), *self.opt.state[p].values())]


def other(t):
    """Another tensor like ``t``, with other values that all kinds of state may have."""
    return t.detach() * 3


def strided(t):
    return torch.stack((other(t), t.detach()), -1)[..., 0]


def swap_parameter(run):
    torch.utils.swap_tensors(run.p, torch.nn.Parameter(other(run.p)))


def move_storage(t):
    """The same tensor, with its values in other memory, as FSDP and offloading do it."""
    kept, storage = t.detach().clone(), t.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    held = torch.empty(size, dtype=torch.uint8)  # what was freed, most likely
    storage.resize_(size)
    del held
    with torch.no_grad():
        t.copy_(kept)


def reload(run):
    run.opt.load_state_dict(copy.deepcopy(run.opt.state_dict()))


def convert(run, swapping):
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(swapping)
    try:
        run.model._apply(lambda t: t * 3)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def set_(t, new):
    with torch.no_grad():
        t.set_(new)


BETWEEN_STEPS = {
    "parameter's data": lambda run: setattr(run.p, "data", other(run.p)),
    "parameter's data, strided": lambda run: setattr(run.p, "data", strided(run.p)),
    "parameter set_": lambda run: set_(run.p, other(run.p)),
    "parameter swapped": swap_parameter,
    "parameter's storage": lambda run: move_storage(run.p),
    "module converted": lambda run: convert(run, False),
    "module converted by swapping": lambda run: convert(run, True),
    "load_state_dict": reload,
    **{
        f"{name} {how}": lambda run, name=name, change=change: change(run.state, name)
        for name in ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
        for how, change in {
            "replaced": lambda state, name: state.__setitem__(name, other(state[name])),
            "data": lambda state, name: setattr(state[name], "data", other(state[name])),
            "set_": lambda state, name: set_(state[name], other(state[name])),
            "swapped": lambda state, name: torch.utils.swap_tensors(state[name], other(state[name])),
            "storage": lambda state, name: move_storage(state[name]),
            "in place": lambda state, name: state[name].mul_(3),
        }.items()
    },
    **{
        f"{name} strided": lambda run, name=name: setattr(run.state[name], "data", strided(run.state[name]))
        for name in ("exp_avg", "exp_avg_sq")
    },
}
AFTER_BACKWARD = {
    "gradient replaced": lambda run: setattr(run.p, "grad", other(run.p.grad)),
    "gradient's data": lambda run: setattr(run.p.grad, "data", other(run.p.grad)),
    "gradient strided": lambda run: setattr(run.p, "grad", strided(run.p.grad)),
    "no gradient": lambda run: setattr(run.p, "grad", None),
    "negated gradient": lambda run: setattr(run.p, "grad", torch.complex(run.p.grad, run.p.grad).conj().imag),
}
ACTIONS = {**{name: (action, None) for name, action in BETWEEN_STEPS.items()},
           **{name: (None, action) for name, action in AFTER_BACKWARD.items()}}  # fmt: skip


@pytest.mark.parametrize("action", ACTIONS)
def test_whatever_was_changed_is_what_the_next_step_works_on(way, action):
    """Against torch.optim.AdamW, to which the same is done."""
    between, after_backward = ACTIONS[action]
    torch.manual_seed(1)
    model = Model()
    runs = [Run(copy.deepcopy(model), torch.optim.AdamW, foreach=False),
            Run(model, FusedAccumAdamW, backend="cpu")]  # fmt: skip
    for run in runs:
        run.step(2)
        run.step(3)
        if between is not None:
            between(run)
        run.step(4, after_backward or (lambda run: None))
        run.step(5)
    for expected, found in zip(*(run.result() for run in runs)):
        assert found.dtype == expected.dtype or found.dim() == 0
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0, check_dtype=False)


def test_the_way_asked_for_is_taken(way):
    """Otherwise the tests here would compare one way with itself. A torch without libtorch's functions for it is
    slower, not wrong: then this test says that it is time to look for others."""
    Run(Model(), FusedAccumAdamW, backend="cpu").step(0)
    linux = sys.platform == "linux"
    assert C.way_taken() == (way if linux else min(way, EXCHANGE))
    assert C.counts_versions() == (linux and way == LIBTORCH)


def test_versions_count_what_was_written(way):
    run = Run(Model(), FusedAccumAdamW, backend="cpu")
    for seed in range(3):
        run.step(seed)
    names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    written = [t for p in run.params for t in (p, *(run.opt.state[p][name] for name in names))]
    grads = [torch.ones_like(p) for p in run.params]
    before = [t._version for t in written]
    for p, g in zip(run.params, grads):
        p.grad = g
    run.opt.step()
    assert [t._version - v for t, v in zip(written, before)] == [1] * len(written)
    assert [g._version for g in grads] == [0] * len(grads)


def test_inference_tensors_have_no_version_to_count(way):
    run, twin = (Run(Model(), FusedAccumAdamW, backend="cpu") for _ in range(2))
    for p, q in zip(run.params, twin.params):
        q.data.copy_(p.data)
    for one in (run, twin):
        one.step(0)
    with torch.inference_mode():
        run.state["exp_avg"] = run.state["exp_avg"].clone()
    for one in (run, twin):
        one.step(1)
    assert run.state["exp_avg"].is_inference()
    for found, expected in zip(run.result(), twin.result()):
        assert torch.equal(found, expected)


def test_a_swap_is_not_hindered(way):
    """Nothing of ours holds a reference to a tensor's inside, which torch.utils.swap_tensors refuses."""
    run = Run(Model(), FusedAccumAdamW, backend="cpu")
    run.step(0)
    for t in (run.p, *run.state.values()):
        count = t._use_count()
        assert count == 1, count
