"""State that cannot be what it says: named in the error, before anything is updated. Counts in any number type."""

import copy

import pytest
import torch
from harness import assert_names, parameters, params_of, refused

pytestmark = pytest.mark.filterwarnings("error")
LARGE = {"lr": 0.5, "weight_decay": 0.3, "betas": (0.9, 0.995)}


def stepped(make, device):
    torch.manual_seed(0)
    named = list(zip(("first", "second"), parameters((5,), (4, 5), device=device)))
    opt = make(named, **LARGE)
    give_gradients(opt)
    opt.step()
    return opt


def give_gradients(opt):
    for p in params_of(opt):
        p.grad = torch.linspace(-1, 2, p.numel(), device=p.device).view_as(p)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.int16], ids=str)
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_a_count_of_another_dtype_counts_on(make, device, dtype, shape):
    """In a state_dict cast as a whole; in bfloat16 it would stay at 256 for ever."""
    opt = stepped(make, device)
    saved = copy.deepcopy(opt.state_dict())
    for own in saved["state"].values():
        own["step"] = torch.tensor(256.0)
    runs = [opt, stepped(make, device)]
    runs[0].load_state_dict(copy.deepcopy(saved))
    for own in saved["state"].values():
        own["step"] = own["step"].to(dtype).reshape(shape)
    runs[1].load_state_dict(saved)
    for _ in range(3):
        for one in runs:
            give_gradients(one)
            one.step()
    for p, q in zip(*map(params_of, runs)):
        assert torch.equal(p, q)
        assert float(runs[1].state[q]["step"]) == 259
        assert runs[1].state[q]["step"].dtype == torch.float32


WRONG = {
    "three": (lambda p: {"step": torch.zeros(3)}, ["'step'", "(3,)", "one real number", "torch.tensor(updates"]),
    "complex": (lambda p: {"step": torch.zeros((), dtype=torch.complex64)}, ["'step'", "complex64", "one real"]),
    "meta": (lambda p: {"step": torch.zeros((), device="meta")}, ["'step'", "meta"]),
    "expanded": (lambda p: {"exp_avg": torch.zeros(1).to(p).expand(4, 5)}, ["'exp_avg'", "(0, 0)", "clone()"]),
    "row": (lambda p: {"exp_avg_sq": torch.zeros(5).to(p).expand(4, 5)}, ["'exp_avg_sq'", "(0, 1)", "clone()"]),
    "list": (lambda p: {"exp_avg": [0.0]}, ["'exp_avg'", "[0.0]", "tensor"]),
    "shape": (lambda p: {"exp_avg": torch.zeros(2).to(p)}, ["'exp_avg'", "(2,)", "(4, 5)"]),
}


@pytest.mark.parametrize("inside", [False, True], ids=["step", "step-in-backward"])
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_state_is_named(make, device, wrong, inside):
    """Also where the backward's first gradient is that of this parameter: no kernel reads such state."""
    opt = stepped(make, device)
    first, second = params_of(opt)
    right = dict(opt.state[second])
    change, words = WRONG[wrong]
    opt.state[second].update(change(second))
    before = [p.detach().clone() for p in (first, second)]
    words = ["second", *words, "anew" if wrong != "meta" else "materialize"]
    if inside:
        context = opt.step_in_backward()
        context.__enter__()
        with pytest.raises((RuntimeError, TypeError)) as caught:
            (second * 2).sum().backward()
        assert_names(caught.value, words)
        context.__exit__(RuntimeError, caught.value, None)
    else:
        give_gradients(opt)
        refused((RuntimeError, TypeError), words, opt.step)
        assert all(p.grad is not None for p in (first, second))
    assert all(torch.equal(p, x) for p, x in zip((first, second), before))
    assert [float(opt.state[first]["step"]), opt.pending] == [1, (0, 0.0)]
    if not inside:
        opt.state[second].update(right)
        opt.step()
        assert float(opt.state[second]["step"]) == 2
