"""direct_wgrad(): the same sums as ordinary backwards, without a gradient."""

import copy

import pytest
import torch
from backwards import buffers_read_zero, is_alias
from layers import LARGE, RTOL, Net, assert_sums, covered, exact_gradients, loss_of, tokens
from torch import nn
from torch.utils.checkpoint import checkpoint

from fused_accum import direct_ops

pytestmark = pytest.mark.filterwarnings("error")


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


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(6,), (3, 6), (2, 5, 6), (0, 6)], ids=str)
def test_a_wide_forward_goes_by_blocks_and_computes_the_same(make, monkeypatch, shape, bias):
    monkeypatch.setattr(direct_ops, "ROWS_OF_A_THREAD", 3)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    model = nn.Sequential(nn.Linear(6, 25, bias=bias))  # 4 blocks of 6 rows and one more
    x = torch.randn(shape)
    expected = model(x)
    _opt, handle = covered(make, model)
    assert not handle.ordinary
    seen = []

    def recorded(product):
        def call(*args, **kwargs):
            seen.append(kwargs["out"].shape)
            return product(*args, **kwargs)

        return call

    for name in ("mm", "addmm"):
        monkeypatch.setattr(torch, name, recorded(getattr(torch, name)))
    torch.testing.assert_close(model(x), expected, rtol=1e-6, atol=1e-6)
    rows = x.numel() // 6
    assert seen == ([(rows, n) for n in (6, 6, 6, 6, 1)] if rows else [])
