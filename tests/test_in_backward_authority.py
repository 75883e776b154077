"""accumulate_in_backward(): p.grad is the authority; whatever changes or clears it counts."""


import pytest
import torch
from backwards import buffers_read_zero, gradients, loss_with, run_backwards, window
from harness import copies, parameters
from oracle import Micro, Oracle

pytestmark = pytest.mark.filterwarnings("error")

LARGE = {"lr": 0.5, "weight_decay": 0.3}


def clip_norm(params):
    torch.nn.utils.clip_grad_norm_(params, 0.1)


def clip_value(params):
    torch.nn.utils.clip_grad_value_(params, 0.01)


def replace(params):
    for n, p in enumerate(params):
        p.grad = torch.full_like(p.grad, 0.25 * (n + 1))


def discard_one(params):
    params[0].grad = None


def multiply(params):
    params[0].grad.mul_(3)
    params[1].grad = params[1].grad * 5


def zero_in_place(params):
    for p in params:
        p.grad.zero_()


def swap_storage(params):
    for p in params:
        p.grad.data = p.grad.data.clone().mul_(2)


EDITS = [clip_norm, clip_value, replace, discard_one, multiply, zero_in_place, swap_storage]


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
@pytest.mark.parametrize("when", ["before-step", "in-mid-window"])
def test_edits_of_p_grad_count(make, device, edit, when):
    """Against torch.optim.AdamW, to which the same is done."""
    params = parameters((65,), (13, 17), device=device)
    twins = copies(params)
    opt, stock = make(params, lr=0.1, weight_decay=0.3), torch.optim.AdamW(twins, lr=0.1, weight_decay=0.3)
    opt.accumulate_in_backward()
    for _ in range(3):
        micros = gradients(params, 2)
        for own in (params, twins):
            for k, micro in enumerate(micros):
                loss_with(own, micro.grads).backward()
                if k == 1 or when == "in-mid-window":
                    edit(own)
        opt.step()
        stock.step()
        stock.zero_grad()
        for p, q in zip(params, twins):
            assert (p in opt.state) == (q in stock.state)
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)
            for name in opt.state.get(p, {}):
                torch.testing.assert_close(opt.state[p][name], stock.state[q][name], rtol=1e-5, atol=1e-6)
    assert buffers_read_zero(opt) or edit in (discard_one, replace, swap_storage, multiply)


@pytest.mark.parametrize("how", ["model", "model-zeros", "optimizer", "optimizer-zeros", "by hand"])
def test_discarding_the_window(make, device, how):
    model = torch.nn.Linear(5, 7).to(device)
    params = list(model.parameters())
    opt = make(params, **LARGE)
    oracle = Oracle(opt)
    opt.accumulate_in_backward()
    for _ in range(2):
        run_backwards(params, [Micro([torch.full_like(p, float("nan")) for p in params])])
        assert opt.pending.microbatches == 1
        if how == "by hand":
            for p in params:
                p.grad = None
        else:
            (model if "model" in how else opt).zero_grad(set_to_none="zeros" not in how)
        assert opt.pending.microbatches == (1 if how == "model-zeros" else 0)
        window(opt, params, oracle)


def test_nothing_happens_after_a_discard(make, device):
    params = parameters((65,), device=device)
    opt = make(params)
    opt.accumulate_in_backward()
    run_backwards(params, gradients(params, 2))
    params[0].grad = None
    opt.step()
    assert not opt.state
    assert opt.pending == (0, 0.0)


def test_pending_forgets_a_window_that_others_discarded(make, device):
    model = torch.nn.Linear(5, 7).to(device)
    params = list(model.parameters())
    opt = make(params)
    opt.accumulate_in_backward()
    run_backwards(params, gradients(params, 2))
    model.zero_grad()
    run_backwards(params, gradients(params, 1))
    assert opt.pending.microbatches == 1
    params[0].grad = None  # a part only
    run_backwards(params, gradients(params, 1))
    assert opt.pending.microbatches == 2


def test_a_gradient_kept_from_a_discarded_micro_batch_survives(make, device):
    """As methods do that combine the gradients of several losses: torch's are independent tensors, so are these."""
    params = parameters((65,), (13, 17), device=device)
    opt = make(params, **LARGE)
    oracle = Oracle(opt)
    opt.accumulate_in_backward()
    for _ in range(3):
        first, second = gradients(params, 2)
        kept = []
        for micro in (first, second):
            loss_with(params, micro.grads).backward()
            kept.append([p.grad for p in params])
            opt.zero_grad()
        for p, a, b in zip(params, *kept):
            p.grad = a + b
        oracle.window([first, second])
        opt.step()
        oracle.check()


@pytest.mark.parametrize("unscale", [False, True], ids=["plain", "unscale-and-clip"])
@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler(make, device, unscale, fused):
    params = parameters((65,), (5,), device=device)
    twins = copies(params)
    opt, stock = make(params, lr=0.1, fused=fused), torch.optim.AdamW(twins, lr=0.1, fused=fused)
    opt.accumulate_in_backward()
    scalers = [torch.amp.GradScaler(device, init_scale=2.0**12, growth_interval=2) for _ in range(2)]
    for n in range(6):
        micros = gradients(params, 3)
        for o, scaler, own in zip((opt, stock), scalers, (params, twins)):
            for micro in micros:
                scaler.scale(loss_with(own, micro.grads)).backward()
            if n == 3:
                own[1].grad[2] = float("inf")
            if unscale:
                scaler.unscale_(o)
                torch.nn.utils.clip_grad_norm_(own, 0.5)
            scaler.step(o)
            scaler.update()
            o.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale()
    for p, q in zip(params, twins):
        assert float(opt.state[p]["step"]) == 5
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
