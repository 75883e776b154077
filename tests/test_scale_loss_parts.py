"""scale_loss() where a loss does not go through one whole backward: its weight counts once, or something raises."""

import pytest
import torch

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture
def opened(make, device):
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)).to(device)
    opt = make(model.parameters(), lr=0.1)
    opt.accumulate_in_backward()
    return model, opt


def first(model, x):
    return model(x).square().mean()


def second(model, x):
    return model(x).abs().mean()


def both(model, x):
    return first(model, x) + second(model, x)


def batches(device):
    return [torch.randn(n, 4, device=device) for n in (8, 3)]


def steps_by(model, opt, loss, batches, times=1.0):
    """Step, and check that it was by the mean of all batches, by weights that are their sizes."""
    params = list(model.parameters())
    want = [torch.zeros_like(p) for p in params]
    for x in batches:
        for total, g in zip(want, torch.autograd.grad(loss(model, x), params)):
            total += times * g * len(x) / sum(map(len, batches))
    opt.step()
    for p, g in zip(params, want):
        torch.testing.assert_close(opt.state[p]["exp_avg"], 0.1 * g, rtol=1e-4, atol=1e-7)
    assert opt.pending == (0, 0.0)


def parts(model, opt, x):
    loss = opt.scale_loss(both(model, x), weight=len(x))
    loss.backward(inputs=list(model[1].parameters()), retain_graph=True)
    loss.backward(inputs=list(model[0].parameters()))


def looked_at_before(model, opt, x):
    loss = opt.scale_loss(both(model, x.requires_grad_()), weight=len(x))
    torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward()


def discarded_before(model, opt, x):
    loss = opt.scale_loss(both(model, x), weight=len(x))
    if not opt.pending.microbatches:
        loss.backward(retain_graph=True)
        opt.zero_grad()
    loss.backward()


def sum_of_two(model, opt, x):
    sum(opt.scale_loss(loss(model, x), weight=len(x) / 2) for loss in (first, second)).backward()


def scaled_again(model, opt, x):
    (opt.scale_loss(both(model, x), weight=len(x)) * 4 / 4).backward()


def beside_another_model(model, opt, x):
    other = torch.nn.Linear(4, 1, device=x.device)
    (opt.scale_loss(both(model, x), weight=len(x)) + other(x).sum()).backward()


@pytest.mark.parametrize(
    ("way", "times"),
    [(parts, 1), (looked_at_before, 1), (discarded_before, 1), (sum_of_two, 0.5), (scaled_again, 1),
     (beside_another_model, 1)],
    ids=lambda x: getattr(x, "__name__", None),
)  # fmt: skip
def test_the_weight_of_a_loss_counts_once(opened, device, way, times):
    model, opt = opened
    data = batches(device)
    for x in data:
        way(model, opt, x)
    assert opt.pending.weight == 11
    steps_by(model, opt, both, [x.detach() for x in data], times)


def test_a_loss_that_goes_backward_twice_counts_twice_as_in_explicit_mode(opened, device):
    model, opt = opened
    data = batches(device)
    for x in data:
        loss = opt.scale_loss(both(model, x), weight=len(x))
        loss.backward(retain_graph=True)
        loss.backward()
    steps_by(model, opt, both, data, 2)


def test_gradients_of_a_weighted_loss_put_into_p_grad_are_refused(opened, device):
    model, opt = opened
    x, params = batches(device)[0], list(model.parameters())
    for p, g in zip(params, torch.autograd.grad(opt.scale_loss(both(model, x), weight=8), params)):
        p.grad = g
    with pytest.raises(RuntimeError, match=r"torch.autograd.grad.*zero_grad\(\)"):
        opt.step()
    opt.zero_grad()
    for p, g in zip(params, torch.autograd.grad(both(model, x), params)):
        p.grad = g
    steps_by(model, opt, both, [x])


@pytest.mark.parametrize("product", [False, True], ids=["sum", "product"])
def test_a_sum_with_a_loss_that_is_not_scaled_is_refused(opened, device, product):
    if device != "cpu":
        pytest.skip("the backward runs in another thread")
    model, opt = opened
    x = batches(device)[0]
    loss = opt.scale_loss(first(model, x), weight=8) + second(model, x)
    with pytest.raises(RuntimeError, match=r"scale_loss\(a \+ b, weight=...\)"):
        (loss * 2 if product else loss).backward()
    opt.zero_grad()
    opt.scale_loss(both(model, x), weight=8).backward()
    steps_by(model, opt, both, [x])
