"""Failures that users reported in such software, by their number in the project's list of reported cases.

Each states the report's own example; the kind of failure is tested more broadly in the file named after it.
"""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from harness import buffers, copies, mid_window_state, parameters, params_of, values
from oracle import Micro, Oracle, same_bits

pytestmark = pytest.mark.filterwarnings("error")


def tokens(device, counts=(3, 7)):
    """A linear layer, and per micro-batch its inputs and labels with `counts` valid tokens of 10."""
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 5).to(device)
    batches = []
    for count in counts:
        labels = torch.randint(5, (10,), device=device)
        labels[count:] = -100
        batches.append((torch.randn(10, 8, device=device), labels))
    return model, batches


def loss_of(model, x, labels):
    return F.cross_entropy(model(x), labels)


def grads_of_one_batch(model, batches):
    """Gradients of one cross-entropy mean over all valid tokens, in float64."""
    twin = copy.deepcopy(model).double()
    x = torch.cat([x for x, _ in batches]).double()
    loss_of(twin, x, torch.cat([labels for _, labels in batches])).backward()
    return [p.grad for p in twin.parameters()]


@pytest.mark.parametrize("how", ["scale", "weight"])
def test_case_01_uneven_token_counts(make, device, how):
    """The mean of means is not the mean over all tokens."""
    model, batches = tokens(device)
    opt = make(model.parameters(), lr=0.5)
    whole = grads_of_one_batch(model, batches)
    for (x, labels), count in zip(batches, (3, 7)):
        loss_of(model, x, labels).backward()
        opt.accumulate(scale=count / 10) if how == "scale" else opt.accumulate(weight=count)
    divisor = 1 if how == "scale" else 10
    for buffer, g in zip(buffers(opt), whole):
        torch.testing.assert_close(buffer.double() / divisor, g, rtol=1e-6, atol=1e-7)
    opt.step()
    for p, g in zip(model.parameters(), whole):
        torch.testing.assert_close(opt.state[p]["exp_avg"].double(), 0.1 * g, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(opt.state[p]["exp_avg_sq"].double(), 0.001 * g * g, rtol=1e-5, atol=1e-9)


def test_case_02_short_last_window(make, device):
    """K=4 and only 2 micro-batches: the mean over 2, never the sum over 4."""
    (p,) = parameters((65,), device=device)
    opt = make([p], lr=0.5)
    g = [values((65,), device=device) for _ in range(2)]
    for grad in g:
        p.grad = grad.clone()
        opt.accumulate(weight=1)
    opt.step()
    mean = (g[0].double() + g[1].double()) / 2
    torch.testing.assert_close(opt.state[p]["exp_avg"].double(), 0.1 * mean, rtol=1e-6, atol=1e-8)


def test_case_03_leftovers_at_the_end_of_an_epoch(make, device):
    """They are visible, step() applies them, and the next window starts from zero."""
    (p,) = parameters((65,), device=device)
    opt = make([p], lr=0.5)
    oracle = Oracle(opt)
    micros = [Micro([values((65,), device=device)], weight=1) for _ in range(5)]
    for micro in micros[:2]:
        p.grad = micro.grads[0].clone()
        opt.accumulate(weight=1)
    assert opt.pending == (2, 2.0)
    opt.step()
    oracle.window(micros[:2])
    oracle.check()
    assert opt.pending == (0, 0.0)
    for micro in micros[2:]:
        p.grad = micro.grads[0].clone()
        opt.accumulate(weight=1)
    opt.step()
    oracle.window(micros[2:])
    oracle.check()


def test_case_04_zero_grad_in_the_loop(make, device):
    """At the top of the body it discards the window and says so; after step (Accelerate's order) it is harmless."""
    (p,) = parameters((65,), device=device)
    opt = make([p], lr=0.5)
    oracle = Oracle(opt)
    p.grad = torch.ones_like(p)
    opt.accumulate()
    with pytest.warns(UserWarning, match=r"zero_grad\(\) dropped 1 accumulated"):
        opt.zero_grad()
    for _ in range(3):
        micro = Micro([values((65,), device=device)])
        p.grad = micro.grads[0].clone()
        oracle.window([micro])
        opt.step()
        opt.zero_grad()
        oracle.check()


def test_case_05_several_backwards_per_step(make, device):
    """Added, not copied: within p.grad and across accumulate()."""
    (p,) = parameters((65,), device=device)
    a, b = values((65,), device=device), values((65,), device=device)
    for pairs in (1, 2):
        opt = make([p], lr=0.5)
        for factor in (a, b):
            (p * factor).sum().backward()
            if pairs == 2:
                opt.accumulate()
        opt.accumulate()
        torch.testing.assert_close(buffers(opt)[0], a + b)
        assert opt.pending.microbatches == pairs


def test_case_07_save_and_resume_in_mid_window(make, device):
    """2 of 4 micro-batches, state_dict through a file into a fresh optimizer, 2 more: bit-equal to uninterrupted."""
    params = parameters((65,), (13, 17), device=device)
    straight, broken = make(copies(params), lr=0.5), make(copies(params), lr=0.5)
    grads = [[values(p.shape, device=device) for p in params] for _ in range(8)]
    for n, row in enumerate(grads):
        if n == 6:
            file = io.BytesIO()
            torch.save((mid_window_state(broken), [p.detach() for p in params_of(broken)]), file)
            file.seek(0)
            state, weights = torch.load(file, weights_only=True)
            broken = make([torch.nn.Parameter(w) for w in weights], lr=0.5)
            broken.load_state_dict(state)
        for opt in (straight, broken):
            for p, g in zip(params_of(opt), row):
                p.grad = g.clone()
            (opt.step if n % 4 == 3 else opt.accumulate)(scale=0.25)
    for p, q in zip(params_of(straight), params_of(broken)):
        assert same_bits(p, q)
        assert all(same_bits(straight.state[p][k], broken.state[q][k]) for k in straight.state[p])


def test_case_13_decay_uses_the_weight_before_its_update(make, device):
    params = parameters((65,), device=device)
    twin = copies(params)
    opt, stock = make(params, lr=0.5, weight_decay=0.5), torch.optim.AdamW(twin, lr=0.5, weight_decay=0.5)
    oracle = Oracle(opt)
    for _ in range(3):
        g = values((65,), device=device)
        params[0].grad, twin[0].grad = g.clone(), g.clone()
        oracle.window([Micro([g])])
        opt.step()
        stock.step()
        oracle.check()
    torch.testing.assert_close(params[0], twin[0], rtol=1e-5, atol=1e-6)


def test_case_14_step_is_counted_per_parameter(make, device):
    """p1 in every window, p2 in every second one."""
    params = parameters((65,), (65,), device=device)
    twin = copies(params)
    opt, stock = make(params, lr=0.5), torch.optim.AdamW(twin, lr=0.5)
    for n in range(6):
        for i in (0, 1) if n % 2 else (0,):
            g = values((65,), device=device)
            params[i].grad, twin[i].grad = g.clone(), g.clone()
        opt.step()
        stock.step()
        stock.zero_grad()
    assert [float(opt.state[p]["step"]) for p in params] == [6, 3]
    for p, q in zip(params, twin):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)


def test_case_15_no_gradient_means_no_update(make, device):
    """Neither decay nor momentum moves it, however many windows pass; an all-zero gradient does, as in torch."""
    params = parameters((65,), (65,), device=device)
    opt = make(params, lr=0.5, weight_decay=0.5)
    oracle = Oracle(opt)
    first = [values((65,), device=device) for _ in range(2)]
    for grads in (first, [first[0], None], [None, None], [torch.zeros(65, device=device), None]):
        for p, g in zip(params, grads):
            p.grad = None if g is None else g.clone()
        before = params[1].detach().clone(), {k: v.clone() for k, v in opt.state.get(params[1], {}).items()}
        oracle.window([Micro(grads)])
        opt.step()
        oracle.check()
        if grads[1] is None:
            assert same_bits(params[1], before[0])
            assert all(same_bits(opt.state[params[1]][k], v) for k, v in before[1].items())
    assert float(opt.state[params[0]]["step"]) == 3


def test_case_16_one_cycle_rewrites_betas(make, device):
    params = parameters((65,), device=device)
    twin = copies(params)
    opt, stock = make(params, lr=0.1, weight_decay=0.3), torch.optim.AdamW(twin, lr=0.1, weight_decay=0.3)
    schedulers = [torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.5, total_steps=25) for o in (opt, stock)]
    oracle = Oracle(opt)
    for _ in range(20):
        g = values((65,), device=device)
        params[0].grad, twin[0].grad = g.clone(), g.clone()
        oracle.window([Micro([g])])
        opt.step()
        stock.step()
        oracle.check()
        for scheduler in schedulers:
            scheduler.step()
        assert opt.param_groups[0]["betas"] == stock.param_groups[0]["betas"]
    torch.testing.assert_close(params[0], twin[0], rtol=1e-4, atol=1e-4)
