"""direct_wgrad(): the same sums as ordinary backwards, without a gradient; what is refused, what stays ordinary."""

import copy
import io
import pickle
import warnings
import weakref

import pytest
import torch
from backwards import buffers_read_zero, is_alias
from harness import assert_same_run, buffers
from layers import Net, exact_gradients, loss_of, tokens
from torch import nn
from torch.utils.checkpoint import checkpoint

from fused_accum.direct_wgrad import LINK

pytestmark = pytest.mark.filterwarnings("error")

LARGE = {"lr": 0.1, "weight_decay": 0.3}
RTOL = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def covered(make, model, check=True, **options):
    opt = make(model.named_parameters(), **LARGE, **options)
    return opt, opt.direct_wgrad(model, check=check)


def assert_sums(model, exact, dtype=None):
    """p.grad, the window's sum, against float64."""
    for name, p in model.named_parameters():
        if name not in exact:
            assert p.grad is None, name
            continue
        rtol = RTOL[dtype or p.dtype]
        atol = rtol * float(exact[name].abs().max())
        torch.testing.assert_close(p.grad.double(), exact[name], rtol=rtol, atol=atol)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("dtype", RTOL, ids=str)
def test_windows(make, device, tied, padding, dtype):
    model = Net(tied, padding).to(device, dtype)
    opt, handle = covered(make, model)
    assert set(handle.ordinary) == {"norm.weight", "norm.bias"}
    for _ in range(3):
        exact = exact_gradients(model, batches := tokens(3, device=device))
        for k, batch in enumerate(batches, 1):
            loss_of(model, batch).backward()
            assert opt.pending.microbatches == k
        assert all(is_alias(opt, p) for p in model.parameters())
        assert_sums(model, exact)
        opt.step()
        assert buffers_read_zero(opt)
        assert all(p.grad is None for p in model.parameters())
    assert all(float(opt.state[p]["step"]) == 3 for p in model.parameters())


def test_steps_like_torch(make, device):
    """Several windows of updates, against torch.optim.AdamW on ordinary backwards in float64."""
    model = Net(tied=True).to(device).double()
    twin = copy.deepcopy(model)
    opt, _ = covered(make, model)
    stock = torch.optim.AdamW(twin.parameters(), **LARGE)
    for _ in range(4):
        for batch in tokens(3, device=device):
            for each in (model, twin):
                loss_of(each, batch).backward()
        opt.step()
        stock.step()
        stock.zero_grad()
    for p, q in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("shape", [(8,), (3, 8), (2, 3, 8), (2, 1, 3, 8), (0, 8)], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "expanded"])
def test_shapes_of_the_input(make, device, shape, layout):
    if layout == "transposed" and len(shape) < 3:
        return
    model = nn.Sequential(nn.Linear(8, 5)).to(device)
    opt, _ = covered(make, model)
    for first in (True, False):
        x = torch.randn(shape, device=device)
        if layout == "transposed":
            x = x.transpose(0, -2)
        elif layout == "expanded":
            x = x[..., :1].expand(shape)
        exact = exact_gradients(model, [x] * (1 if first else 2))
        opt.zero_grad()
        for _ in range(1 if first else 2):
            loss_of(model, x).backward()
        assert_sums(model, exact)


@pytest.mark.parametrize("accum_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_buffer_dtypes(make, device, dtype, accum_dtype):
    model = Net().to(device, dtype)
    opt, _ = covered(make, model, accum_dtype=accum_dtype)
    exact = exact_gradients(model, batches := tokens(3, device=device))
    for batch in batches:
        loss_of(model, batch).backward()
    assert all(p.grad.dtype == accum_dtype for p in model.parameters())
    assert_sums(model, exact, torch.bfloat16)
    opt.step()


def test_many_tokens_in_16_bit(make, device):
    """More than one block of tokens; the sum is kept in fp32 between them."""
    model = nn.Sequential(nn.Linear(40, 24)).to(device, torch.bfloat16)
    _opt, _ = covered(make, model)
    x = torch.randn(1000, 40, device=device, dtype=torch.bfloat16)
    for _ in range(2):
        model(x).sum().backward()
    expected = 2 * x.double().sum(0).expand(24, 40)
    torch.testing.assert_close(model[0].weight.grad.double(), expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(model[0].bias.grad, torch.full((24,), 2000.0, device=device))


@pytest.mark.parametrize("trains", ["both", "weight", "bias", "neither"])
@pytest.mark.parametrize("input_grad", [True, False])
def test_frozen_parts(make, device, trains, input_grad):
    model = nn.Sequential(nn.Linear(8, 5)).to(device)
    model[0].weight.requires_grad_(trains in ("both", "weight"))
    model[0].bias.requires_grad_(trains in ("both", "bias"))
    _opt, _ = covered(make, model)
    x = torch.randn(3, 8, device=device, requires_grad=input_grad)
    if trains == "neither":
        assert loss_of(model, x).requires_grad == input_grad
        return
    exact = exact_gradients(model, [x.detach()])
    loss_of(model, x).backward()
    assert_sums(model, exact)
    assert (x.grad is not None) == input_grad


def test_freezing_and_unfreezing_in_mid_window(make, device):
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 5)).to(device)
    _opt, _ = covered(make, model, check=False)
    xs = [torch.randn(3, 8, device=device) for _ in range(3)]
    expected = {}
    for k, x in enumerate(xs):
        model[0].weight.requires_grad_(k != 1)
        for name, g in exact_gradients(model, [x]).items():
            if not (k == 1 and name == "0.weight"):
                expected[name] = expected.get(name, 0) + g
        loss_of(model, x).backward()
    assert_sums(model, expected)


@pytest.mark.parametrize("how", ["reentrant", "non-reentrant"])
def test_checkpoints(make, device, how):
    model = Net(tied=True).to(device)
    layers = [model.first, nn.Tanh(), model.conv, model.second]
    opt, _ = covered(make, model)

    def run(net, segment):
        def forward(batch):
            x = net.embedding(batch)
            for layer in (net.first, net.conv, net.second):
                x = segment(layer, x)
            return net.head(net.norm(x))

        return forward

    assert layers
    batches = tokens(3, device=device)
    twin = copy.deepcopy(model).double()
    for batch in batches:
        run(twin, lambda f, x: f(x))(batch).square().sum().backward()
        run(model, lambda f, x: checkpoint(f, x, use_reentrant=how == "reentrant"))(batch).square().sum().backward()
    assert opt.pending.microbatches == 3
    assert_sums(model, {name: p.grad for name, p in twin.named_parameters()})


def test_used_twice_in_one_backward(make, device):
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).to(device)
    model[2].weight = model[0].weight
    _opt, handle = covered(make, model)
    assert handle.direct.count("0.weight") == 1
    xs = [torch.randn(3, 8, device=device) for _ in range(2)]
    exact = exact_gradients(model, xs)
    for x in xs:
        loss_of(model, x).backward()
    assert_sums(model, exact)


def test_a_weight_that_is_also_used_outside_its_layer(make, device):
    """Direct and ordinary contributions meet in one buffer."""
    model = nn.Sequential(nn.Linear(8, 8)).to(device)
    _opt, _ = covered(make, model)
    x = torch.randn(3, 8, device=device)
    twin = copy.deepcopy(model).double()
    for net, inputs in ((model, x), (twin, x.double())):
        for _ in range(2):
            (loss_of(net, inputs) + (net[0].weight ** 2).sum()).backward()
    assert_sums(model, {name: p.grad for name, p in twin.named_parameters()})


def test_several_backwards_and_retain_graph(make, device):
    model = Net().to(device)
    _opt, _ = covered(make, model)
    (batch,) = tokens(1, device=device)
    exact = exact_gradients(model, [batch] * 2)
    loss = loss_of(model, batch)
    loss.backward(retain_graph=True)
    loss.backward()
    assert_sums(model, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast(make, device, dtype):
    """Activations and the cast weight are bf16; the sum is fp32, without a bf16 gradient between."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 5)).to(device, dtype)
    twin = copy.deepcopy(model)
    _opt, _ = covered(make, model)
    x = torch.randn(64, 8, device=device, dtype=dtype)
    for net in (model, twin):
        for _ in range(2):
            with torch.autocast(device, dtype=torch.bfloat16):
                y = net(x)
            assert y.dtype == torch.bfloat16
            y.float().square().sum().backward()
    for p, q in zip(model.parameters(), twin.parameters()):
        assert p.grad.dtype == torch.float32
        torch.testing.assert_close(p.grad, q.grad.float(), rtol=3e-2, atol=3e-2 * float(q.grad.abs().max()))


# -- p.grad is the authority here too ----------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["optimizer", "model", "poisoned"])
def test_a_discarded_window_is_not_read_again(make, device, how):
    """Neither by a GEMM (beta=0) nor by the embedding, whose buffer is cleared once."""
    model = Net().to(device)
    opt, _ = covered(make, model)
    for _ in range(2):
        if how == "poisoned":
            bad = loss_of(model, tokens(1, device=device)[0]) * float("nan")
            bad.backward()
            assert model.embedding.weight.grad.isnan().any()
        else:
            loss_of(model, tokens(1, device=device)[0]).backward()
        (opt if how == "optimizer" else model).zero_grad()
        exact = exact_gradients(model, batches := tokens(2, device=device))
        for batch in batches:
            loss_of(model, batch).backward()
        assert_sums(model, exact)
        opt.step()


def test_clipping_and_replacing(make, device):
    model = Net().to(device).double()
    twin = copy.deepcopy(model)
    opt, _ = covered(make, model, check=False)
    stock = torch.optim.AdamW(twin.parameters(), **LARGE)
    for n in range(3):
        for k, batch in enumerate(tokens(3, device=device)):
            for net in (model, twin):
                loss_of(net, batch).backward()
                if k == 1 and n == 1:
                    net.first.weight.grad = net.first.weight.grad * 3
                    net.embedding.weight.grad = None
                    net.second.weight.grad.mul_(2)
        for net in (model, twin):
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        opt.step()
        stock.step()
        stock.zero_grad()
    for p, q in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("weights", [[3, 7], [0, 2, 5]], ids=str)
def test_token_weights(make, device, weights):
    model = Net(tied=True).to(device).double()
    opt, _ = covered(make, model)
    for _ in range(2):
        batches = tokens(len(weights), device=device)
        twin = copy.deepcopy(model)
        for batch, weight in zip(batches, weights):
            opt.scale_loss(loss_of(model, batch), weight=weight).backward()
            (loss_of(twin, batch) * weight / sum(weights)).backward()
        before = {p: s["exp_avg"].clone() for p, s in opt.state.items()}
        opt.step()
        for p, q in zip(model.parameters(), twin.parameters()):
            old = before.get(p, torch.zeros_like(p))
            torch.testing.assert_close(opt.state[p]["exp_avg"], 0.9 * old + 0.1 * q.grad, rtol=1e-9, atol=1e-12)


def test_an_edit_under_weights_is_noticed(make, device):
    model = Net().to(device)
    opt, _ = covered(make, model)
    for k, batch in enumerate(tokens(2, device=device)):
        loss = opt.scale_loss(loss_of(model, batch), weight=3)
        if k:
            model.first.weight.grad.mul_(2)
        loss.backward()
    with pytest.raises(RuntimeError, match=r"'first.weight' was changed.*max_grad_norm"):
        opt.step()


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_step_in_backward(make, device, count, tied):
    """Bit-equal to a step after the backward."""
    model = Net(tied).to(device)
    twin = copy.deepcopy(model)
    (opt, _), (other, _) = covered(make, model), covered(make, twin)
    for _ in range(3):
        for k, batch in enumerate(tokens(count, device=device)):
            loss_of(twin, batch).backward()
            if k < count - 1:
                loss_of(model, batch).backward()
            else:
                with opt.step_in_backward():
                    loss_of(model, batch).backward()
        other.step()
        assert_same_run(opt, other)


def test_a_failed_backward_is_noticed(make, device):
    model = Net().to(device)
    opt, _ = covered(make, model)

    def fail(*_):
        raise torch.OutOfMemoryError("simulated")

    loss_of(model, tokens(1, device=device)[0]).backward()
    y = model.embedding(tokens(1, device=device)[0])
    y.register_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        model.head(model.second(y)).sum().backward()
    with pytest.raises(RuntimeError, match="did not finish"):
        opt.step()
    opt.zero_grad()
    exact = exact_gradients(model, batches := tokens(2, device=device))
    for batch in batches:
        loss_of(model, batch).backward()
    assert_sums(model, exact)


# -- what raises -------------------------------------------------------------------------------------------------


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


# -- what stays ordinary -----------------------------------------------------------------------------------------


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


# -- the life of a covered model ---------------------------------------------------------------------------------


def test_removal_and_copies(make, device):
    model = nn.Sequential(nn.Embedding(23, 8), nn.Linear(8, 5)).to(device)
    opt, handle = covered(make, model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    others = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)]
    (batch,) = tokens(1, device=device)
    for other in others:
        loss_of(other, batch).backward()
        assert other[1].weight.grad is not None
    assert all(p.grad is None for p in model.parameters())
    assert opt.pending == (0, 0.0)
    handle.remove()
    handle.remove()
    assert not {"forward", LINK} & model[1].__dict__.keys()
    assert opt._run.backward is None
    exact = exact_gradients(model, [batch])
    loss_of(model, batch).backward()
    opt.accumulate()  # explicit again
    for sum_, want in zip(buffers(opt), exact.values()):
        torch.testing.assert_close(sum_.double(), want, rtol=1e-5, atol=1e-5)


def test_on_top_of_accumulate_in_backward(make, device):
    model = Net().to(device)
    opt = make(model.named_parameters(), **LARGE)
    with opt.accumulate_in_backward():
        with opt.direct_wgrad(model):
            with pytest.raises(RuntimeError, match="installed already"):
                opt.direct_wgrad(model)
            loss_of(model, tokens(1, device=device)[0]).backward()
        loss_of(model, tokens(1, device=device)[0]).backward()
        assert opt.pending.microbatches == 2
        opt.step()


def test_nothing_keeps_memory(make, device):
    model = Net().to(device)
    opt, handle = covered(make, model)
    loss_of(model, tokens(1, device=device)[0]).backward()
    run, weight = weakref.ref(opt._run), weakref.ref(model.first.weight)
    handle.remove()
    del opt, handle
    assert run() is None
    model.first.weight = nn.Parameter(torch.zeros(12, 8, device=device))
    assert weight() is None


def test_the_model_works_on_without_its_optimizer(make, device):
    model = Net().to(device)
    opt, handle = covered(make, model)
    del opt, handle
    loss_of(model, tokens(1, device=device)[0]).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_the_self_check_names_the_parameter(make, device):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(device)
    opt, _ = covered(make, model)
    x = torch.randn(3, 8, device=device)
    model(x).sum().backward()
    model[1](x).sum().backward()
    with pytest.raises(RuntimeError, match=r"'0.weight' got 1 direct contributions in 2 backwards"):
        opt.step()
    opt.zero_grad()
    for _ in range(2):
        model(x).sum().backward()
    opt.step()
