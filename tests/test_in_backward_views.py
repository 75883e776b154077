"""Backward modes, where p.grad is replaced by a view of itself: it begins where the buffer does, and is another
gradient."""

import contextlib

import pytest
import torch

pytestmark = [
    pytest.mark.filterwarnings("error"),
    pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract"),
]


def transposed(p):
    p.grad = p.grad.t()


def transposed_in_place(p):
    p.grad.t_()


def through_data(p):
    p.grad.data = p.grad.data.t()


def first_row(p):
    p.grad = p.grad[:1].expand_as(p.grad)


def first_element(p):
    p.grad = p.grad.flatten()[:1].expand_as(p.grad)


def nothing(opt, model):
    return contextlib.nullcontext()


VIEWS = [transposed, transposed_in_place, through_data, first_row, first_element]
KINDS = {  # what is passed to the optimizer, what begins the mode, and what is around the last backward
    "in-backward": ({}, lambda opt, model: opt.accumulate_in_backward(), nothing),
    "clipped": ({"max_grad_norm": 1e9}, lambda opt, model: opt.accumulate_in_backward(), nothing),
    "direct": ({}, lambda opt, model: opt.direct_wgrad(model), nothing),
    "stepping": ({}, lambda opt, model: opt.accumulate_in_backward(), lambda opt, model: opt.step_in_backward()),
    "direct, stepping": ({}, lambda opt, model: opt.direct_wgrad(model), lambda opt, model: opt.step_in_backward()),
}
# After the first of two backwards, or after both. Nothing adds to expanded gradients, torch neither.
CASES = [(kind, 0, edit) for kind in KINDS for edit in VIEWS if edit not in (first_row, first_element)]
CASES += [(kind, 1, edit) for kind in KINDS for edit in VIEWS if "stepping" not in kind]


@pytest.mark.parametrize(("kind", "after", "edit"), CASES, ids=lambda x: getattr(x, "__name__", str(x)))
def test_a_view_of_itself_as_p_grad_counts(make, device, kind, after, edit):
    """Against torch.optim.AdamW, to which the same is done."""
    options, begin, around = KINDS[kind]
    model = torch.nn.Linear(4, 4, bias=False, device=device)
    twin = torch.nn.Linear(4, 4, bias=False, device=device)
    twin.load_state_dict(model.state_dict())
    opt = make(model.parameters(), lr=0.1, weight_decay=0.3, **options)
    stock = torch.optim.AdamW(twin.parameters(), lr=0.1, weight_decay=0.3)
    begin(opt, model)
    for _ in range(3):
        batches = torch.randn(2, 3, 4, device=device)
        for own, enter in ((model, lambda: around(opt, model)), (twin, contextlib.nullcontext)):
            for k, batch in enumerate(batches):
                with enter() if k else contextlib.nullcontext():
                    own(batch).square().sum().backward()
                if k == after:
                    edit(own.weight)
        if around is nothing:
            opt.step()
        stock.step()
        stock.zero_grad()
        for name, value in opt.state[model.weight].items():
            torch.testing.assert_close(value, stock.state[twin.weight][name], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(model.weight, twin.weight, rtol=1e-5, atol=1e-5)


def test_main_grad_refuses_it(make, device):
    """Layers add to main_grad, which would not know."""
    model = torch.nn.Linear(4, 4, bias=False, device=device)
    opt = make(model.parameters())
    opt.attach_main_grad()
    model(torch.randn(3, 4, device=device)).sum().backward()
    model.weight.grad.t_()
    with pytest.raises(RuntimeError, match="cleared or replaced"):
        model(torch.randn(3, 4, device=device)).sum().backward()
