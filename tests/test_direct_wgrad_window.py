"""direct_wgrad(): what happens to a window, and to a covered model, its copies and its optimizer."""

import copy
import io
import pickle
import weakref

import pytest
import torch
from harness import assert_same_run, buffers
from layers import LARGE, Net, assert_sums, covered, exact_gradients, loss_of, tokens
from torch import nn

from fused_accum.direct_wgrad import LINK

pytestmark = pytest.mark.filterwarnings("error")


# -- p.grad is the authority here too --------------------------------------------------------------------------


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


# -- the life of a covered model -------------------------------------------------------------------------------


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
