"""What discards a window or a micro-batch, and what does not."""


import pytest
import torch
from cases import WINDOWS
from harness import buffers, micro_batches, parameters, put, run_window, values
from oracle import Micro, Oracle, same_bits

pytestmark = pytest.mark.filterwarnings("error")


# ---- discarding ------------------------------------------------------------------------------------------


def test_zero_grad_discards_the_window_and_warns_with_the_count(make, device):
    params = parameters((65,), (5,), device=device)
    opt = make(params, lr=0.5)
    oracle = Oracle(opt)
    for window in ("sum", "tokens-scaled"):
        for micro in micro_batches(params, WINDOWS[window]):
            put(params, micro)
            opt.accumulate(micro.scale, weight=micro.weight)
        put(params, micro)
        with pytest.warns(UserWarning, match=rf"\b{len(WINDOWS[window])}\b"):
            opt.zero_grad()
        assert all(p.grad is None for p in params)
        assert opt.pending == (0, 0.0)
        assert buffers(opt) == [None, None]
        opt.step()
        oracle.check()
    micros = micro_batches(params, WINDOWS["sum"])
    oracle.window(micros)
    run_window(opt, micros)
    oracle.check()


def test_zero_grad_set_to_none_false_leaves_zeros_that_count_as_in_torch(make, device):
    params = parameters((65,), (5,), device=device)
    opt = make(params, lr=0.5, weight_decay=0.5)
    oracle = Oracle(opt)
    warm = micro_batches(params, [(1.0, None)])
    oracle.window(warm)
    run_window(opt, warm)
    grad = params[0].grad = values((65,), device=device)
    opt.zero_grad(set_to_none=False)
    assert params[0].grad is grad
    assert not grad.any()
    assert params[1].grad is None
    oracle.window([Micro([torch.zeros(65), None])])
    opt.step()
    oracle.check()


def test_zero_grad_set_to_none_false_discards_the_window_too(make, device):
    params = parameters((65,), device=device)
    opt = make(params, lr=0.5)
    put(params, micro_batches(params, [(1.0, None)])[0])
    opt.accumulate()
    with pytest.warns(UserWarning, match="1 accumulated"):
        opt.zero_grad(set_to_none=False)
    before = params[0].detach().clone()
    opt.step()
    assert same_bits(params[0], before)


def test_zero_grad_does_not_warn_when_nothing_was_accumulated(make, device):
    params = parameters((65,), device=device)
    opt = make(params, lr=0.5)
    opt.zero_grad()
    put(params, micro_batches(params, [(1.0, None)])[0])
    opt.zero_grad()
    run_window(opt, micro_batches(params, WINDOWS["mean-of-4"]))
    opt.zero_grad()


def test_discard_microbatch_keeps_the_window(make, device):
    params = parameters((65,), (5,), device=device)
    opt = make(params, lr=0.5)
    oracle = Oracle(opt)
    micros = micro_batches(params, WINDOWS["tokens"])
    put(params, micros[0])
    opt.accumulate(weight=3)
    params[0].grad = torch.full_like(params[0], float("nan"))
    opt.discard_microbatch()
    assert all(p.grad is None for p in params)
    assert opt.pending == (1, 3.0)
    put(params, micros[1])
    oracle.window(micros)
    opt.step(weight=7)
    oracle.check()


def test_model_zero_grad_does_not_touch_the_window(make, device):
    """Explicit contributions live in the buffer: module.zero_grad() between micro-batches is harmless."""
    model = torch.nn.Linear(3, 2).to(device)
    opt = make(model.parameters(), lr=0.5)
    oracle = Oracle(opt)
    params = list(model.parameters())
    micros = micro_batches(params, WINDOWS["mean-of-4"])
    for micro in micros:
        model.zero_grad()
        put(params, micro)
        opt.accumulate(micro.scale)
        model.zero_grad()
    oracle.window(micros)
    opt.step()
    oracle.check()
