"""attach_main_grad(): layers that follow Megatron-Core's and TransformerEngine's protocol add to the buffer."""

import copy

import pytest
import torch
from backwards import Failure, buffers_read_zero
from harness import assert_same_run
from layers import exact_gradients, loss_of, tokens
from torch import nn

pytestmark = pytest.mark.filterwarnings("error")

LARGE = {"lr": 0.1, "weight_decay": 0.3}


class Fused(torch.autograd.Function):
    """As Megatron's LinearWithGradAccumulationAndAsyncCommunication: main_grad is taken in the forward."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.main_grad = weight, getattr(weight, "main_grad", None)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        left, right = g.reshape(-1, g.shape[-1]), x.reshape(-1, x.shape[-1])
        if ctx.main_grad is None:
            return g @ weight, left.t() @ right
        ctx.main_grad += (left.t() @ right).to(ctx.main_grad.dtype)
        if not hasattr(ctx.weight, "grad_added_to_main_grad"):
            return g @ weight, None
        ctx.weight.grad_added_to_main_grad = True
        dummy = torch.full_like(weight, 0.0 if getattr(ctx.weight, "zero_out_wgrad", False) else float("nan"))
        return g @ weight, dummy


class FusedLinear(nn.Linear):
    def forward(self, x):
        return Fused.apply(x, self.weight)


class Net(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.embedding = nn.Embedding(23, 8)
        self.first = FusedLinear(8, 8, bias=False)
        self.norm = nn.LayerNorm(8)
        self.head = FusedLinear(8, 23, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, index):
        return self.head(self.norm(torch.tanh(self.first(self.embedding(index)))))


def fused_weights(model):
    return {id(m.weight): m.weight for m in model.modules() if isinstance(m, FusedLinear)}.values()


@pytest.fixture(params=["returns None", "flag", "flag, zeros"])
def protocol(request):
    def follow(model, tied):
        for weight in fused_weights(model):
            if request.param != "returns None":
                weight.grad_added_to_main_grad = False
            if request.param == "flag, zeros":
                weight.zero_out_wgrad = True
        # A tied weight's dummy meets the embedding's gradient: it must be zeros, as Megatron sees to.
        if tied and request.param == "flag":
            model.embedding.weight.zero_out_wgrad = True

    return follow


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_windows(make, device, protocol, tied, dtype):
    model = Net(tied).to(device, dtype)
    opt = make(model.named_parameters(), **LARGE)
    protocol(model, tied)
    handle = opt.attach_main_grad()
    objects = [p.main_grad for p in model.parameters()]
    rtol = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    for _ in range(3):
        exact = exact_gradients(model, batches := tokens(3, device=device))
        for k, batch in enumerate(batches, 1):
            loss_of(model, batch).backward()
            assert opt.pending.microbatches == k
        for name, p in model.named_parameters():
            assert p.grad.data_ptr() == p.main_grad.data_ptr()
            torch.testing.assert_close(
                p.grad.double(), exact[name], rtol=rtol, atol=rtol * float(exact[name].abs().max())
            )
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        opt.step()
        assert buffers_read_zero(opt)
        assert all(p.main_grad is o for p, o in zip(model.parameters(), objects))
    handle.remove()
    assert not any(hasattr(p, "main_grad") or p._backward_hooks for p in model.parameters())
    assert opt._run.backward is None


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("count", [1, 3])
def test_step_in_backward(make, device, protocol, tied, count):
    model = Net(tied).to(device)
    twin = copy.deepcopy(model)
    opts = [make(net.named_parameters(), **LARGE) for net in (model, twin)]
    for net, opt in zip((model, twin), opts):
        protocol(net, tied)
        opt.attach_main_grad()
    for _ in range(3):
        for k, batch in enumerate(tokens(count, device=device)):
            loss_of(twin, batch).backward()
            if k < count - 1:
                loss_of(model, batch).backward()
            else:
                with opts[0].step_in_backward():
                    loss_of(model, batch).backward()
        opts[1].step()
        for p, q in zip(model.parameters(), twin.parameters()):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    if not tied:
        assert_same_run(*opts)


def test_token_weights(make, device, protocol):
    model = Net().to(device).double()
    opt = make(model.named_parameters(), **LARGE)
    protocol(model, False)
    opt.attach_main_grad()
    batches = tokens(2, device=device)
    twin = copy.deepcopy(model)
    for batch, weight in zip(batches, (3, 7)):
        opt.scale_loss(loss_of(model, batch), weight=weight).backward()
        (loss_of(twin, batch) * weight / 10).backward()
    opt.step()
    for p, q in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(opt.state[p]["exp_avg"], 0.1 * q.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("failed", [False, True])
def test_zero_grad_clears_main_grad(make, device, protocol, to_none, failed):
    model = Net().to(device)
    opt = make(model.named_parameters(), **LARGE)
    protocol(model, False)
    opt.attach_main_grad()
    loss_of(model, tokens(1, device=device)[0]).backward()
    if failed:

        def fail(_):
            raise Failure("half way")

        x = model.embedding(tokens(1, device=device)[0])
        x.register_hook(fail)
        with pytest.raises(Failure):
            model.head(model.first(x)).sum().backward()
        with pytest.raises(RuntimeError, match="did not finish"):
            opt.step()
    opt.zero_grad(set_to_none=to_none)
    assert not any(p.main_grad.any() for p in model.parameters())
    exact = exact_gradients(model, batches := tokens(2, device=device))
    for batch in batches:
        loss_of(model, batch).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad.double(), exact[name], rtol=1e-4, atol=1e-4)


def test_p_grad_cleared_by_others_is_noticed(make, device, protocol):
    model = Net().to(device)
    opt = make(model.named_parameters(), **LARGE)
    protocol(model, False)
    opt.attach_main_grad()
    loss_of(model, tokens(1, device=device)[0]).backward()
    model.zero_grad()
    with pytest.raises(RuntimeError, match=r"'head.weight' was cleared.*optimizer.zero_grad\(\)"):
        loss_of(model, tokens(1, device=device)[0]).backward()
    opt.zero_grad()
    loss_of(model, tokens(1, device=device)[0]).backward()
    opt.step()


def test_grad_scaler_finds_inf(make, device, protocol):
    model = Net().to(device)
    opt = make(model.named_parameters(), **LARGE)
    protocol(model, False)
    opt.attach_main_grad()
    scaler = torch.amp.GradScaler(device, init_scale=4.0)
    for spoiled in (True, False):
        scaler.scale(loss_of(model, tokens(1, device=device)[0])).backward()
        if spoiled:
            model.first.weight.main_grad[0, 0] = float("inf")
        before = model.first.weight.detach().clone()
        scaler.step(opt)
        scaler.update()
        assert torch.equal(model.first.weight, before) == spoiled
        opt.zero_grad()
    assert not any(p.main_grad.any() for p in model.parameters())


def test_a_main_grad_of_another_owner_is_refused(make, device):
    model = Net().to(device)
    opt = make(model.named_parameters())
    model.head.weight.main_grad = torch.zeros_like(model.head.weight)
    with pytest.raises(RuntimeError, match=r"'head.weight' has a main_grad that is not this optimizer's"):
        opt.attach_main_grad()
    del model.head.weight.main_grad
    opt.attach_main_grad()
    strided = nn.Parameter(torch.zeros(5, 3, device=device).t())
    with pytest.raises(RuntimeError, match="'strided' is not contiguous"):
        make([("strided", strided)]).attach_main_grad()


def test_with_the_other_modes(make, device):
    model = Net().to(device)
    opt = make(model.named_parameters())
    handle = opt.attach_main_grad()
    for install in (opt.attach_main_grad, opt.accumulate_in_backward, lambda: opt.direct_wgrad(model)):
        with pytest.raises(RuntimeError, match="already"):
            install()
    handle.remove()
    opt.accumulate_in_backward()
