"""Backward modes of an optimizer that is gone, and of copies: nothing of it stays, or hinders the next."""

import copy
import gc
import io
import weakref

import pytest
import torch
from layers import covered, exact_gradients, loss_of, tokens

pytestmark = pytest.mark.filterwarnings("error")

BEGIN = {
    "in-backward": lambda opt, model: opt.accumulate_in_backward(),
    "direct": lambda opt, model: opt.direct_wgrad(model),
    "main-grad": lambda opt, model: opt.attach_main_grad(),
}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = torch.nn.Embedding(23, 8), torch.nn.Linear(8, 23)

    def forward(self, index):
        return self.out(self.embed(index))


def executed_again(make, model, begin):
    """A notebook's cell, whose old optimizer lives until the name has the new one."""
    opt = make(model.parameters())
    begin(opt, model)
    loss_of(model, tokens(1)[0]).backward()
    opt = make(model.parameters())
    return model, opt


def in_a_cycle(make, model, begin):
    """As before, with a scheduler: both are garbage that has not been collected."""
    gc.disable()
    opt = make(model.parameters())
    torch.optim.lr_scheduler.ConstantLR(opt)
    begin(opt, model)
    return model, make(model.parameters())


def copied(make, model, begin):
    opt = make(model.parameters())
    begin(opt, model)
    return copy.deepcopy((model, opt))


def reloaded(make, model, begin):
    opt = make(model.parameters())
    begin(opt, model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    model = torch.load(file, weights_only=False)
    return model, make(model.parameters())


@pytest.fixture(autouse=True)
def _collected():
    yield
    gc.enable()


@pytest.mark.parametrize("begin", BEGIN.values(), ids=BEGIN)
@pytest.mark.parametrize("way", [executed_again, in_a_cycle, copied, reloaded], ids=lambda way: way.__name__)
def test_a_mode_begins_anew(make, device, way, begin):
    model, opt = way(make, Net().to(device), begin)
    opt.zero_grad()
    handle = begin(opt, model)
    if begin is BEGIN["direct"]:
        assert handle.direct == ["embed.weight", "out.weight", "out.bias"]
    for _ in range(2):
        exact = exact_gradients(model, batches := tokens(2, device=device))
        for batch in batches:
            loss_of(model, batch).backward()
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad.double(), exact[name], rtol=1e-5, atol=1e-6)
        opt.step()
    handle.remove()
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert not any(hasattr(p, "main_grad") or p._post_accumulate_grad_hooks for p in model.parameters())


@pytest.mark.parametrize("begin", BEGIN.values(), ids=BEGIN)
def test_a_forsaken_window_leaves_ordinary_gradients(make, device, begin):
    model = Net().to(device, torch.bfloat16)
    opt = make(model.parameters())
    handle = begin(opt, model)
    loss_of(model, tokens(1, device=device)[0]).backward()
    sums = [p.grad.clone() for p in model.parameters()]
    gone = weakref.ref(opt)
    del opt
    assert gone() is None
    for p, total in zip(model.parameters(), sums):
        assert (p.grad.dtype, p.grad_dtype) == (torch.bfloat16, torch.bfloat16)
        assert torch.equal(p.grad, total.bfloat16())
        assert not any((hasattr(p, "main_grad"), p._post_accumulate_grad_hooks, p._backward_hooks))
    assert not any("forward" in module.__dict__ for module in model.modules())
    loss_of(model, tokens(1, device=device)[0]).backward()
    torch.optim.AdamW(model.parameters(), foreach=True).step()
    del handle


def test_an_old_handle_leaves_the_layers_of_a_new_optimizer(make, device):
    model = Net().to(device)
    old = make(model.parameters()).direct_wgrad(model)
    opt, handle = covered(make, model)
    old.remove()
    assert all("forward" in module.__dict__ for module in (model.embed, model.out))
    handle.remove()
    assert not any("forward" in module.__dict__ for module in (model.embed, model.out))
    assert not opt.accumulates_in_backward


def test_one_that_is_alive_keeps_its_main_grad(make, device):
    model = Net().to(device)
    opt, other = make(model.parameters()), make(model.parameters())
    opt.attach_main_grad()
    objects = [p.main_grad for p in model.parameters()]
    with pytest.raises(RuntimeError, match="another FusedAccumAdamW"):
        other.attach_main_grad()
    assert all(p.main_grad is o for p, o in zip(model.parameters(), objects))


@pytest.mark.parametrize("begin", BEGIN.values(), ids=BEGIN)
def test_modes_that_ended_leave_nothing_to_be_done_later(make, device, begin):
    model = Net().to(device)
    opt = make(model.parameters())
    before = len(weakref.finalize._registry)
    for _ in range(3):
        with begin(opt, model):
            loss_of(model, tokens(1, device=device)[0]).backward()
            opt.step()
    assert len(weakref.finalize._registry) == before
