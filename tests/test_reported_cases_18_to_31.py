"""Failures that users reported in such software, by their number in the project's list of reported cases.

Each states the report's own example; the kind of failure is tested more broadly in the file named after it.
"""

import copy

import pytest
import torch
from harness import buffers, copies, in_layout, mid_window_state, parameters, params_of, values
from oracle import Micro, Oracle, same_bits

pytestmark = pytest.mark.filterwarnings("error")


def test_case_18_load_keeps_fp32_moments_of_bf16_parameters(make, device):
    """torch casts state to the parameter's dtype on load."""
    params = parameters((1000,), dtype=torch.bfloat16, device=device)
    opt = make(params, lr=0.1)
    for _ in range(3):
        params[0].grad = values((1000,), torch.bfloat16, device)
        opt.step()
    params[0].grad = values((1000,), torch.bfloat16, device)
    opt.accumulate()
    fresh = make(copies(params), lr=0.1)
    fresh.load_state_dict(copy.deepcopy(mid_window_state(opt)))
    for name, value in opt.state[params[0]].items():
        loaded = fresh.state[params_of(fresh)[0]][name]
        assert loaded.dtype == torch.float32
        assert same_bits(loaded, value)
    assert not same_bits(value.bfloat16().float(), value)  # it would have been lossy
    assert same_bits(buffers(fresh)[0], buffers(opt)[0])


def test_case_19_checkpoints_go_both_ways_with_adamw(make, device):
    """5 steps of torch, 5 of ours, 5 of torch: as 15 of torch."""
    params = parameters((65,), (5,), device=device)
    straight = torch.optim.AdamW(copies(params), lr=0.1, weight_decay=0.3)
    current = torch.optim.AdamW(params, lr=0.1, weight_decay=0.3)
    for n in range(15):
        if n in (5, 10):
            cls = make if n == 5 else torch.optim.AdamW
            following = cls(copies(params_of(current)), lr=9.0)
            following.load_state_dict(copy.deepcopy(current.state_dict()))
            current = following
        grads = [values(p.shape, device=device) for p in params]
        for opt in (straight, current):
            for p, g in zip(params_of(opt), grads):
                p.grad = g.clone()
            opt.step()
    assert current.param_groups[0].keys() == straight.param_groups[0].keys()
    for p, q in zip(params_of(straight), params_of(current)):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
        assert float(current.state[q]["step"]) == 15


def test_case_20_freezing_and_removing_in_mid_window(make, device):
    """No KeyError in state_dict, no state dropped; what is unfrozen or put back goes on with its own state."""
    params = parameters((65,), (5,), (9,), device=device)
    opt = make(params, lr=0.5)
    oracle = Oracle(opt)

    def window(n, spoil=lambda: None):
        micros = [Micro([values(p.shape, device=device) for p in params_of(opt)], 0.5) for _ in range(n)]
        for micro in micros:
            for p, g in zip(params_of(opt), micro.grads):
                p.grad = g.clone()
            opt.accumulate(0.5)
        oracle.window(micros)
        spoil()
        mid_window_state(opt)
        opt.step()
        oracle.check()

    window(2)
    window(2, lambda: params[1].requires_grad_(False))  # steps with what it has
    assert float(opt.state[params[1]]["step"]) == 2
    params[1].requires_grad_(True)
    popped = opt.param_groups[0]["params"].pop()
    window(2)
    assert set(opt.state_dict()["state"]) == {0, 1}
    opt.param_groups[0]["params"].append(popped)
    window(2)
    assert [float(opt.state[p]["step"]) for p in params] == [4, 4, 3]


@pytest.mark.parametrize("kind", ["transposed", "channels_last", "chunk"])
def test_case_21_gradient_of_other_strides(make, device, kind):
    """Read linearly it would be silently wrong."""
    shape = (8, 4, 3, 3) if kind == "channels_last" else (64, 32)
    (p,) = parameters(shape, device=device)
    opt = make([p], lr=0.5)
    oracle = Oracle(opt)
    if kind == "transposed":
        g = torch.randn(32, 64, device=device).t()
    elif kind == "channels_last":
        g = in_layout(torch.randn(shape, device=device), "channels_last")
    else:
        g = torch.randn(64, 96, device=device).chunk(3, dim=1)[1]
    assert not g.is_contiguous()
    micros = [Micro([g], 0.5), Micro([g], 0.5)]
    oracle.window(micros)
    for call in (opt.accumulate, opt.step):
        p.grad = g
        call(scale=0.5)
    oracle.check()


def test_case_23_complex_parameters(make, device):
    """A clear TypeError that names view_as_real, and nothing touched."""
    z = torch.nn.Parameter(torch.randn(5, dtype=torch.complex64, device=device))
    before = z.detach().clone()
    opt = make([z], lr=0.5, weight_decay=0.5)
    z.grad = torch.ones_like(z)
    with pytest.raises(TypeError, match=r"complex64.*view_as_real"):
        opt.step()
    assert torch.equal(z, before)
    assert z.grad is not None
    assert len(opt.state) == 0


def test_case_24_mixed_dtypes_and_unused_parameters(make, device):
    """bf16 and fp32 parameters in one group, fp32 gradients of bf16 parameters, some unused in some micro-batches."""
    params = [*parameters((65,), (5,), device=device), *parameters((65,), (5,), dtype=torch.bfloat16, device=device)]
    params[2].grad_dtype = None
    opt = make(params, lr=0.3)
    oracle = Oracle(opt)
    for n in range(3):
        micros = []
        for k in range(3):
            dtypes = [torch.float32, torch.float32, torch.float32, torch.bfloat16]
            grads = [values(p.shape, dtype, device) for p, dtype in zip(params, dtypes)]
            grads = [None if (n + k + i) % 3 == 0 else g for i, g in enumerate(grads)]
            micros.append(Micro(grads, 1 / 3))
        oracle.window(micros)
        for k, micro in enumerate(micros):
            for p, g in zip(params, micro.grads):
                p.grad = g
            opt.step(scale=1 / 3) if k == 2 else opt.accumulate(1 / 3)
        oracle.check()
        oracle.adopt()


@pytest.mark.parametrize("how", ["data", "to", "free-and-realloc"])
def test_case_25_memory_that_moves_between_steps(make, device, how):
    """Pointers remembered from an earlier call would be stale."""
    model = torch.nn.Linear(40, 30).to(device)
    opt = make(model.parameters(), lr=0.1)
    oracle = Oracle(opt)
    params = list(model.parameters())
    for _ in range(4):
        micros = [Micro([values(p.shape, device=device) for p in params], 0.5) for _ in range(2)]
        oracle.window(micros)
        for call, micro in zip((opt.accumulate, opt.step), micros):
            for p, g in zip(params, micro.grads):
                p.grad = g
            call(scale=0.5)
        oracle.check()
        if how == "data":
            for p in params:
                old, p.data = p.data, p.data.clone()
                old.fill_(float("nan"))
        elif how == "to":
            model.double()
            model.float()
        else:
            kept = [p.detach().clone() for p in params]
            for p in params:
                p.data = torch.empty(0, device=device)
            filler = [torch.full_like(x, float("nan")) for x in kept]  # takes the freed addresses
            for p, x in zip(params, kept):
                p.data = x
            del filler


def test_case_30_tied_weights(make, device):
    """emb.weight is head.weight: one state, its total gradient counted once, torch's warning about the duplicate."""
    emb = torch.nn.Embedding(7, 4).to(device)
    head = torch.nn.Linear(4, 7, bias=False).to(device)
    head.weight = emb.weight
    with pytest.warns(UserWarning, match="duplicate"):
        opt = make([emb.weight, head.weight], lr=0.5)
    oracle = Oracle(opt)
    x = torch.tensor([1, 2, 2, 6], device=device)
    for _ in range(2):
        head(emb(x)).square().sum().backward()
        g = emb.weight.grad.clone()
        opt.accumulate(0.5)
        torch.testing.assert_close(buffers(opt)[0], 0.5 * g)
        head(emb(x)).square().sum().backward()
        oracle.window([Micro([g], 0.5), Micro([emb.weight.grad.clone()], 0.5)])
        opt.step(scale=0.5)
        oracle.check()
    assert len(opt.state) == 1
    assert float(opt.state[emb.weight]["step"]) == 2


def test_case_31_forward_and_backward_inside_the_closure(make, device):
    """Lightning's order: zero_grad, forward, backward in the closure of the step; earlier micro-batches outside."""
    model = torch.nn.Linear(4, 3).to(device)
    opt = make(model.parameters(), lr=0.1)
    oracle = Oracle(opt)
    params = list(model.parameters())
    x = values((5, 4), device=device)

    def loss():
        return model(x).square().mean()

    for window in (1, 3):
        with torch.enable_grad():
            grads = [g.clone() for g in torch.autograd.grad(loss(), params)]
        oracle.window([Micro(grads, 1 / window)] * window)
        for _ in range(window - 1):
            loss().backward()
            opt.accumulate(1 / window)

        def closure(window=window):
            if window == 1:
                opt.zero_grad()
            assert torch.is_grad_enabled()
            result = loss()
            result.backward()
            return result

        with torch.no_grad():
            returned = opt.step(closure, scale=1 / window)
        assert returned.requires_grad
        assert all(p.grad is None for p in params)
        oracle.check()
