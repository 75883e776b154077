"""Every refusal: its message names the parameter, the value, the rule and the way out, and nothing has changed."""

import warnings

import pytest
import torch
from harness import assert_names, assert_unchanged, open_window, parameters, params_of, snapshot, values

pytestmark = pytest.mark.filterwarnings("error")


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
