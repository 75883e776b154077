"""Every refusal: its message names the parameter, the value, the rule and the way out, and nothing has changed."""

import copy
import math
import re
import warnings

import pytest
import torch
from harness import assert_unchanged, parameters, params_of, snapshot, values
from oracle import same_bits

from fused_accum import FusedAccumAdamW, backends

pytestmark = pytest.mark.filterwarnings("error")

# ---- constructor -----------------------------------------------------------------------------------------

CONSTRUCTOR = {
    # options, error, what the message must hold
    "accum-fp16": ({"accum_dtype": torch.float16}, ValueError, ["accum_dtype", "float16", "float32", "bfloat16"]),
    "accum-int": ({"accum_dtype": torch.int32}, ValueError, ["accum_dtype", "int32", "float32"]),
    "accum-none": ({"accum_dtype": None}, ValueError, ["accum_dtype", "None", "float32"]),
    "state-int": ({"state_dtype": torch.int8}, ValueError, ["state_dtype", "int8", "float32"]),
    "state-text": ({"state_dtype": "fp32"}, ValueError, ["state_dtype", "fp32", "float32"]),
    "differentiable": ({"differentiable": True}, ValueError, ["differentiable", "torch.optim.AdamW"]),
    "backend": ({"backend": "fastest"}, ValueError, ["backend", "fastest", "auto", "reference"]),
    "foreach-fused": ({"foreach": True, "fused": True}, RuntimeError, ["fused", "foreach"]),
    "lr": ({"lr": -1.0}, ValueError, ["learning rate", "-1.0"]),
    "betas": ({"betas": (1.0, 0.5)}, ValueError, ["beta", "1.0"]),
    "eps": ({"eps": -1.0}, ValueError, ["epsilon", "-1.0"]),
    "weight-decay": ({"weight_decay": -1.0}, ValueError, ["weight_decay", "-1.0"]),
}


@pytest.mark.parametrize(("options", "error", "words"), CONSTRUCTOR.values(), ids=CONSTRUCTOR)
def test_constructor_refuses(options, error, words):
    with pytest.raises(error) as caught:
        FusedAccumAdamW(parameters((3,)), **options)
    assert_names(caught.value, words)


@pytest.mark.parametrize("options", [{}, {"lr": -1.0}, {"eps": -1.0}, {"betas": (-0.1, 0.5)}], ids=str)
@pytest.mark.parametrize(
    "params",
    [[], [torch.zeros(3)], "text", [torch.zeros(3).requires_grad_() * 2], torch.zeros(3)],
    ids=["empty", "plain", "text", "not-a-leaf", "bare-tensor"],
)
def test_constructor_agrees_with_torch(params, options):
    """What torch.optim.AdamW refuses is refused with its error, what it takes is taken."""

    def outcome(cls):
        try:
            cls(copy.copy(params), **options)
        except Exception as error:
            return type(error), str(error)
        return None

    assert outcome(FusedAccumAdamW) == outcome(torch.optim.AdamW)


def test_backend_that_does_not_work_here_is_refused_with_its_reason():
    for name in backends.registry():
        reason = backends.registry()[name].why_not(torch.device("cpu"))
        if reason is None:
            assert backends.select(name, torch.device("cpu")).name == name
            continue
        with pytest.raises(RuntimeError) as caught:
            backends.select(name, torch.device("cpu"))
        assert reason in str(caught.value)
        opt = FusedAccumAdamW(parameters((3,)), backend=name)
        params_of(opt)[0].grad = torch.ones(3)
        with pytest.raises(RuntimeError, match=name):
            opt.step()


def test_unknown_backend():
    with pytest.raises((ValueError, RuntimeError)) as caught:
        backends.select("fastest", torch.device("cpu"))
    assert_names(caught.value, ["fastest", "reference"])


def assert_names(error, words):
    for word in words:
        assert re.search(re.escape(word), str(error)), f"{word!r} is not in: {error}"


# ---- scale and weight ------------------------------------------------------------------------------------

NUMBERS = {
    "negative": (-0.5, ValueError, ["-0.5", "negative"]),
    "nan": (math.nan, ValueError, ["nan", "finite"]),
    "inf": (math.inf, ValueError, ["inf", "finite"]),
    "negative-inf": (-math.inf, ValueError, ["inf", "finite"]),
    "text": ("1.0", TypeError, ["1.0", "number"]),
    "list": ([1.0], TypeError, ["1.0", "number"]),
    "complex": (1j, TypeError, ["1j", "number"]),
    "vector": (torch.ones(2), ValueError, ["(2,)", "0-dim"]),
    "one-element": (torch.ones(1), ValueError, ["(1,)", "0-dim"]),
    "negative-tensor": (torch.tensor(-2.0), ValueError, ["-2", "negative"]),
    "nan-tensor": (torch.tensor(math.nan), ValueError, ["nan", "finite"]),
}


@pytest.mark.parametrize("call", ["accumulate", "step"])
@pytest.mark.parametrize("argument", ["scale", "weight"])
@pytest.mark.parametrize(("value", "error", "words"), NUMBERS.values(), ids=NUMBERS)
def test_scale_and_weight_out_of_range(make, device, value, error, words, argument, call):
    opt = open_window(make, device, weight=2.0 if argument == "weight" else None)
    before = snapshot(opt)
    with pytest.raises(error) as caught:
        getattr(opt, call)(**{argument: value})
    assert_names(caught.value, [argument, *words])
    assert_unchanged(before, snapshot(opt))
    assert_usable(opt, weight=2.0 if argument == "weight" else None)


def open_window(make, device, weight=None, **options):
    """An optimizer with history, an open window and gradients in place."""
    named = [("first", p) for p in parameters((65,), device=device)]
    named += [("model.second", p) for p in parameters((4, 5), device=device)]
    opt = make(named, lr=0.1, **options)
    for call in (opt.step, opt.accumulate):
        for _, p in named:
            p.grad = values(p.shape, device=device)
        call(scale=0.5 if call == opt.accumulate else 1.0, weight=weight)  # sums of scales stay 1
    for _, p in named:
        p.grad = values(p.shape, device=device)
    return opt


def assert_usable(opt, weight=None):
    before = [p.detach().clone() for p in params_of(opt)]
    opt.step(scale=0.5, weight=weight)
    assert all(not same_bits(p, x) and p.isfinite().all() for p, x in zip(params_of(opt), before))
    assert opt.pending == (0, 0.0)


# ---- gradients and parameters ----------------------------------------------------------------------------


def sparse_grad(opt):
    p = params_of(opt)[1]
    p.grad = torch.eye(4, 5, device=p.device).to_sparse()


def grad_requiring_grad(opt):
    p = params_of(opt)[1]
    p.grad = values((4, 5), device=p.device).requires_grad_()


def grad_with_a_graph(opt):
    p = params_of(opt)[1]
    p.grad = values((4, 5), device=p.device).requires_grad_() * 2


def integer_grad(opt):
    p = params_of(opt)[1]
    p.grad_dtype = None
    p.grad = torch.ones((4, 5), device=p.device, dtype=torch.int32)


def fake_grad(opt):
    from torch._subclasses import FakeTensorMode

    p = params_of(opt)[1]
    with FakeTensorMode():
        p.grad = torch.ones((4, 5), device=p.device)


def cast_parameter(opt):
    p = params_of(opt)[1]
    p.grad = None
    p.data = p.data.double()


def cast_parameter_with_grad(opt):
    p = params_of(opt)[1]
    p.grad = None
    p.data = p.data.bfloat16()
    p.grad = values((4, 5), torch.bfloat16, p.device)


def reshaped_parameter(opt):
    p = params_of(opt)[1]
    p.grad = None
    p.data = p.data.reshape(20).clone()


def reshaped_parameter_with_grad(opt):
    reshaped_parameter(opt)
    p = params_of(opt)[1]
    p.grad = values((20,), device=p.device)


def shrunk_parameter_with_old_grad(opt):
    p = params_of(opt)[1]
    p.data = p.data[:2].clone()


def overlapping_parameter(opt):
    p = params_of(opt)[1]
    p.data = p.data[:, :1].expand(4, 5)


def moment_of_another_shape(opt):
    opt.state[params_of(opt)[1]]["exp_avg"] = torch.zeros(19)


def moment_of_another_dtype(opt):
    opt.state[params_of(opt)[1]]["exp_avg_sq"] = torch.zeros((4, 5), dtype=torch.int32)


INPUTS = {
    # what is done to the second parameter, the words its refusal must hold, calls that must refuse
    "sparse": (sparse_grad, ["gradient", "sparse", "SparseAdam"], ["accumulate", "step"]),
    "requires-grad": (grad_requiring_grad, ["gradient", "requires grad", "detach"], ["accumulate", "step"]),
    "has-a-graph": (grad_with_a_graph, ["gradient", "requires grad", "create_graph"], ["accumulate", "step"]),
    "integer": (integer_grad, ["gradient", "int32", "float32"], ["accumulate", "step"]),
    "fake": (fake_grad, ["gradient", "FakeTensor"], ["accumulate", "step"]),
    "cast": (cast_parameter, ["float64", "float32", "zero_grad"], ["step"]),
    "cast-with-grad": (cast_parameter_with_grad, ["bfloat16", "float32", "zero_grad"], ["accumulate", "step"]),
    "reshaped": (reshaped_parameter, ["(20,)", "(4, 5)", "zero_grad"], ["step"]),
    "reshaped-with-grad": (reshaped_parameter_with_grad, ["(20,)", "(4, 5)", "zero_grad"], ["accumulate", "step"]),
    "shrunk": (shrunk_parameter_with_old_grad, ["(4, 5)", "(2, 5)"], ["step"]),
    "overlapping": (overlapping_parameter, ["(5, 0)", "clone"], ["step"]),
    "moment-shape": (moment_of_another_shape, ["exp_avg", "(19,)", "(4, 5)"], ["step"]),
    "moment-dtype": (moment_of_another_dtype, ["exp_avg_sq", "int32"], ["step"]),
}
ROWS = [(name, call) for name, row in INPUTS.items() for call in row[2]]


@pytest.mark.parametrize(("name", "call"), ROWS, ids=["-".join(row) for row in ROWS])
def test_refused_input(make, device, name, call):
    """The bad one comes after a good one, which must not have been consumed or updated either."""
    spoil, words, _ = INPUTS[name]
    opt = open_window(make, device)
    spoil(opt)
    before = snapshot(opt)
    with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
        getattr(opt, call)()
    assert_names(caught.value, ["model.second", *words])
    assert_unchanged(before, snapshot(opt))
    with pytest.warns(UserWarning, match="zero_grad"):
        opt.zero_grad()  # the way out works


def test_refusal_in_a_later_bucket_changes_nothing(make, device):
    """Buckets are validated together: a bad gradient in the last one stops the first one too."""
    named = [(f"p{i}", p) for i, p in enumerate(parameters((5,), (3,), device=device))]
    named += [("half", p) for p in parameters((4, 5), dtype=torch.bfloat16, device=device)]
    opt = make(named, lr=0.1)
    for call in (opt.accumulate, opt.step):
        for _, p in named:
            p.grad = torch.ones_like(p)
        named[2][1].grad = torch.ones((4, 5), dtype=torch.bfloat16, device=device).to_sparse()
        before = snapshot(opt)
        with pytest.raises(TypeError, match="half"):
            call()
        assert_unchanged(before, snapshot(opt))


def test_parameters_without_names_are_named_by_their_place(make, device):
    a, b = parameters((5,), (3,), device=device)
    opt = make([{"params": [a]}, {"params": [b]}])
    b.grad = torch.ones(3, device=device).to_sparse()
    with pytest.raises(TypeError, match=r"param_groups\[1\]\['params'\]\[0\]"):
        opt.step()


def test_complex_parameters_are_refused_with_the_way_out(make, device):
    """Case 23: a clear TypeError, and view_as_real works."""
    z = torch.nn.Parameter(torch.randn(5, dtype=torch.complex64, device=device))
    opt = make([z])
    z.grad = torch.ones_like(z)
    for call in (opt.accumulate, opt.step):
        with pytest.raises(TypeError) as caught:
            call()
        assert_names(caught.value, ["complex64", "view_as_real"])
    opt = make([torch.nn.Parameter(torch.view_as_real(z.detach()))], lr=0.1)
    params_of(opt)[0].grad = torch.ones(5, 2, device=device)
    opt.step()


def test_meta_parameters_work_after_to_empty(make, device):
    with torch.device("meta"):
        model = torch.nn.Linear(3, 2)
    opt = make(model.parameters(), lr=0.1)
    for p in model.parameters():
        p.grad = torch.empty_like(p)
    with pytest.raises(RuntimeError, match="to_empty"):
        opt.step()
    assert len(opt.state) == 0
    model.zero_grad()
    model.to_empty(device=device)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(1.0)
    opt = make(model.parameters(), lr=0.1)
    model(torch.ones(1, 3, device=device)).sum().backward()
    opt.step()
    assert (model.weight < 1).all()


def test_tensor_subclass_with_dispatch_is_refused(make, device):
    """Its elements need not be at its data pointer (DTensor, quantized wrappers)."""

    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise AssertionError("must not be called")

    inner = torch.zeros(5, device=device)
    p = torch.Tensor._make_subclass(Wrapper, inner, True)
    opt = make([("wrapped", p)])
    p.grad = torch.ones(5, device=device)
    with pytest.raises(TypeError, match=r"wrapped.*Wrapper"):
        opt.step()


def test_nested_parameters_are_refused(make, device):
    warnings.simplefilter("ignore")  # torch calls them a prototype; pytest restores the filters
    p = torch.nn.Parameter(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], device=device))
    opt = make([("ragged", p)])
    p.backward(torch.ones_like(p))
    with pytest.raises(TypeError, match=r"ragged.*nested"):
        opt.step()


def test_distributed_tensors_are_refused_by_name(make, device):
    """Until they are supported: their elements are not the local tensor's."""
    from torch import distributed
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    backend = "gloo" if device == "cpu" else "nccl"
    distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh(device, (1,))
        p = torch.nn.Parameter(distribute_tensor(torch.ones(4, 2, device=device), mesh, [Shard(0)]))
        opt = make([("sharded", p)])
        p.grad = torch.ones_like(p)
        for call in (opt.accumulate, opt.step):
            with pytest.raises(TypeError, match=r"sharded.*DTensor"):
                call()
    finally:
        distributed.destroy_process_group()


def test_plain_subclasses_work(make, device):
    """Subclasses without __torch_dispatch__ are ordinary memory."""

    class Named(torch.nn.Parameter):
        pass

    p = Named(torch.ones(5, device=device))
    opt = make([p], lr=0.1)
    (p * 2).sum().backward()
    opt.accumulate()
    (p * 2).sum().backward()
    opt.step()
    assert (p < 1).all()


def test_shape_mismatch_of_state_dict_is_not_half_loaded(make, device):
    """A checkpoint of another model with as many parameters is refused at the step, by name, before any change."""
    opt = open_window(make, device)
    with pytest.warns(UserWarning, match="zero_grad"):
        opt.zero_grad()
    other = make(parameters((5,), (7,), device=device))
    for p in params_of(other):
        p.grad = torch.ones_like(p)
    other.step()
    opt.load_state_dict(other.state_dict())
    for p in params_of(opt):
        p.grad = torch.ones_like(p)
    before = snapshot(opt)
    with pytest.raises(RuntimeError, match="first"):
        opt.step()
    assert_unchanged(before, snapshot(opt))


def test_attributes_that_users_may_not_set(make, device):
    opt = make(parameters((3,), device=device))
    with pytest.raises(AttributeError):
        opt.backends = []
    with pytest.raises(TypeError):
        opt.accumulate(1.0, 3.0)  # weight is keyword-only
    with pytest.raises(TypeError):
        opt.step(None, 1.0)
