"""direct_wgrad(): what raises, and what stays ordinary."""

import copy
import warnings

import pytest
import torch
from layers import LARGE, Net, assert_sums, covered, exact_gradients, loss_of, tokens
from torch import nn

pytestmark = pytest.mark.filterwarnings("error")


# -- what raises -----------------------------------------------------------------------------------------------


def test_autograd_grad_with_respect_to_a_direct_weight_raises(make, device):
    model = nn.Sequential(nn.Linear(8, 5)).to(device)
    opt, _ = covered(make, model)
    x = torch.randn(3, 8, device=device, requires_grad=True)
    for name in ("weight", "bias"):
        with pytest.raises(RuntimeError, match=rf"autograd.grad\(\) with respect to parameter '0.{name}'"):
            torch.autograd.grad(loss_of(model, x), getattr(model[0], name))
    assert model[0].weight.grad is None
    assert opt.pending == (0, 0.0)


def test_autograd_grad_of_an_input_leaves_the_buffer_alone(make, device):
    model = Net().to(device)
    opt, _ = covered(make, model)
    loss_of(model, tokens(1, device=device)[0]).backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    x = torch.randn(3, 8, device=device, requires_grad=True)
    (g,) = torch.autograd.grad(model.second(x).sum(), x)
    torch.testing.assert_close(g, model.second.weight.sum(0).expand(3, 8))
    model.second(x).sum().backward(inputs=[x])
    for name, p in model.named_parameters():
        assert torch.equal(p.grad, before[name])
    assert opt.pending.microbatches == 1


def test_double_backward_raises(make, device):
    model = nn.Sequential(nn.Linear(8, 5)).to(device)
    opt, _ = covered(make, model)
    x = torch.randn(3, 8, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(RuntimeError, match=r"create_graph=True reached parameter '0.weight'"):
            loss_of(model, x).backward(create_graph=True)
    assert model[0].weight.grad is None
    assert not opt.state


def test_the_gradient_penalty_of_an_input_works(make, device):
    """Double backward through the input only: the second one adds to the weight as autograd has it."""
    model = nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 1)).to(device).double()
    twin = copy.deepcopy(model)
    opt, _ = covered(make, model, check=False)
    x = torch.randn(3, 8, device=device, dtype=torch.float64)
    for net in (model, twin):
        inputs = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(net(inputs).sum(), inputs, create_graph=True)
        (net(inputs).sum() + g.square().sum()).backward()
    for p, q in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(p.grad, q.grad)
    assert opt.pending.microbatches == 1


def test_a_forward_from_before_the_handle_was_removed(make, device):
    model = nn.Sequential(nn.Linear(8, 5)).to(device)
    opt, handle = covered(make, model)
    loss = loss_of(model, torch.randn(3, 8, device=device))
    handle.remove()
    with pytest.raises(RuntimeError, match="repeat the forward"):
        loss.backward()
    assert opt.pending == (0, 0.0)


def test_compile_keeps_working_or_says_why(make, device):
    model = nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 3)).to(device)
    opt, _ = covered(make, model)
    x = torch.randn(3, 8, device=device)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="direct_wgrad"):
        torch.compile(model, backend="eager", fullgraph=True)(x)
    torch._dynamo.reset()
    exact = exact_gradients(model, [x] * 2)
    compiled = torch.compile(model, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        for _ in range(2):
            loss_of(compiled, x).backward()
    assert_sums(model, exact)
    assert opt.pending.microbatches == 2
    torch._dynamo.reset()


# -- what stays ordinary ---------------------------------------------------------------------------------------


class Doubling(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def hooked_module(layer):
    layer.register_forward_hook(lambda *_: None)
    return layer


def hooked_weight(layer):
    layer.weight.register_hook(lambda g: 2 * g)
    return layer


def replaced_forward(layer):
    layer.forward = lambda x: 3 * nn.functional.linear(x, layer.weight, layer.bias)
    return layer


def weight_normed(layer):
    with pytest.warns(FutureWarning):
        return nn.utils.weight_norm(layer)


ORDINARY = {
    "a subclass": lambda: Doubling(8, 5),
    "hooks": lambda: hooked_module(nn.Linear(8, 5)),
    "it or its weight has hooks": lambda: hooked_weight(nn.Linear(8, 5)),
    "its forward was replaced": lambda: replaced_forward(nn.Linear(8, 5)),
    "parametrized": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(8, 5)),
    "weight_norm": lambda: weight_normed(nn.Linear(8, 5)),
    "LayerNorm has no direct form": lambda: nn.LayerNorm(8),
    "Bilinear": lambda: Wrapped(nn.Bilinear(8, 8, 5)),
}


class Wrapped(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x, x)


@pytest.mark.parametrize("why", ORDINARY)
def test_what_stays_ordinary(make, device, why):
    model = nn.Sequential(ORDINARY[why]()).to(device)
    with pytest.warns(UserWarning, match="covers no parameter"):
        _opt, handle = covered(make, model)
    assert handle.direct == []
    assert set(handle.ordinary) == {name for name, _ in model.named_parameters()}
    reasons = [reason for name, reason in handle.ordinary.items() if "parametrizations." not in name]
    assert all(why in reason for reason in reasons), handle.ordinary
    x = torch.randn(3, 8, device=device)
    names = [name for name, _ in model.named_parameters()]
    expected = torch.autograd.grad(loss_of(model, x), list(model.parameters()))
    loss_of(model, x).backward()
    for name, g in zip(names, expected):
        p = model.get_parameter(name)
        torch.testing.assert_close(p.grad, g)


@pytest.mark.parametrize("option", [{"sparse": True}, {"scale_grad_by_freq": True}, {"max_norm": 1.0}], ids=str)
def test_embeddings_with_options(make, device, option):
    model = nn.Sequential(nn.Embedding(23, 8, **option)).to(device)
    with pytest.warns(UserWarning, match="covers no parameter"):
        _, handle = covered(make, model)
    (why,) = handle.ordinary.values()
    assert next(iter(option)) in why
    if "sparse" not in option:
        twin = copy.deepcopy(model)
        batch = torch.tensor([1, 1, 2, 5], device=device)
        for net in (model, twin):
            net(batch).square().sum().backward()
        torch.testing.assert_close(model[0].weight.grad, twin[0].weight.grad)


def test_parameters_of_nobody_and_of_another_optimizer(make, device):
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 5)).to(device)
    opt = make([("head", model[1].weight)], **LARGE)
    handle = opt.direct_wgrad(model)
    assert handle.direct == ["1.weight"]
    assert all("not among the optimizer's parameters" in why for why in handle.ordinary.values())
    x = torch.randn(3, 8, device=device)
    exact = exact_gradients(model, [x])
    loss_of(model, x).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad.double(), exact[name], rtol=1e-5, atol=1e-5)
