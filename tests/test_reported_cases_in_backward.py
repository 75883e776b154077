"""Reported failures 6, 29, 30 and 33, in every mode: see test_reported_cases.py."""

import copy
import gc
import sys

import pytest
import torch
from layers import exact_gradients, loss_of, tokens
from oracle import same_bits
from torch import nn

from fused_accum import slots

pytestmark = pytest.mark.filterwarnings("error")

MODES = ["explicit", "in-backward", "direct", "step-in-backward", "direct+step-in-backward", "main-grad"]
LARGE = {"lr": 0.5, "weight_decay": 0.3}


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(23, 8)
        self.mid = nn.Linear(8, 8)
        self.head = nn.Linear(8, 23, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, index):
        return self.head(torch.tanh(self.mid(self.emb(index))))


class Training:
    """An optimizer in a mode, and how a window goes in it."""

    def __init__(self, make, mode, model, **options):
        self.mode, self.model, self.opt = mode, model, make(model.parameters(), **LARGE, **options)
        if "direct" in mode:
            self.handle = self.opt.direct_wgrad(model)
        elif mode == "main-grad":
            self.handle = self.opt.attach_main_grad()
        elif mode != "explicit":
            self.handle = self.opt.accumulate_in_backward()

    def micro_batch(self, batch) -> None:
        loss_of(self.model, batch).backward()
        self.opt.accumulate()

    def last(self, batch) -> None:
        if "step" in self.mode:
            with self.opt.step_in_backward():
                loss_of(self.model, batch).backward()
        else:
            loss_of(self.model, batch).backward()
            self.opt.step()


@pytest.fixture(params=MODES)
def training(request, make, device):
    return Training(make, request.param, Tied().to(device))


def test_case_06_one_update_per_window(training, device):
    """Not one per micro-batch: nothing moves before, `step` is 1 after, and the moments are those of the sum."""
    model, opt = training.model, training.opt
    before = [p.detach().clone() for p in model.parameters()]
    batches = tokens(4, device=device)
    exact = exact_gradients(model, batches)
    for batch in batches[:3]:
        training.micro_batch(batch)
        assert all(same_bits(p, x) for p, x in zip(model.parameters(), before))
    training.last(batches[3])
    for name, p in model.named_parameters():
        assert float(opt.state[p]["step"]) == 1
        scale = float(exact[name].abs().max())
        torch.testing.assert_close(opt.state[p]["exp_avg"].double(), 0.1 * exact[name], rtol=1e-4, atol=1e-6 * scale)
        torch.testing.assert_close(
            opt.state[p]["exp_avg_sq"].double(), 0.001 * exact[name] ** 2, rtol=1e-4, atol=1e-8 * scale**2
        )


@pytest.mark.parametrize("mode", ["in-backward", "direct", "main-grad"])
def test_case_29_clip_grad_norm_sees_the_window(make, device, mode):
    """Never a silent norm of 0 over gradients that were drained elsewhere: the norm of the sum, and it clips."""
    training = Training(make, mode, Tied().to(device))
    model = training.model
    batches = tokens(3, device=device)
    exact = exact_gradients(model, batches)
    for batch in batches:
        training.micro_batch(batch)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    expected = torch.cat([g.flatten() for g in exact.values()]).norm()
    torch.testing.assert_close(norm.double(), expected, rtol=1e-5, atol=0)
    training.opt.step()
    total = torch.cat([training.opt.state[p]["exp_avg"].flatten() for p in model.parameters()]).norm()
    torch.testing.assert_close(float(total), 0.1 * 0.5, rtol=1e-4, atol=0)


def test_case_30_tied_weights_count_once(training, device):
    """One state, one update a window, both uses in the sum."""
    model, opt = training.model, training.opt
    twin = copy.deepcopy(model)
    stock = torch.optim.AdamW(twin.parameters(), **LARGE)
    for _ in range(3):
        batches = tokens(3, device=device)
        for batch in batches[:2]:
            training.micro_batch(batch)
        training.last(batches[2])
        for batch in batches:
            loss_of(twin, batch).backward()
        stock.step()
        stock.zero_grad()
    assert len(opt.state) == 3
    for p, q in zip(model.parameters(), twin.parameters()):
        assert float(opt.state[p]["step"]) == 3
        torch.testing.assert_close(opt.state[p]["exp_avg"], stock.state[q]["exp_avg"], rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-3)


def python_calls(call) -> int:
    count = 0

    def note(frame, event, _):
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    gc.disable()  # hypothesis has Python functions called at every collection
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
        gc.enable()
    return count


@pytest.mark.parametrize("mode", ["in-backward", "direct", "main-grad", "step-in-backward"])
@pytest.mark.parametrize("weighted", [False, True])
def test_case_33_a_hook_costs_the_same_however_many_there_are(make, device, mode, weighted):
    """Counted in Python calls per parameter, in a window's later micro-batches (147 tensors were reported)."""

    def calls(layers: int) -> int:
        model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(layers)]).to(device)
        training = Training(make, mode, model)
        x = torch.ones(2, 4, device=device)

        def loss():
            y = model(x).sum()
            return training.opt.scale_loss(y, weight=1) if weighted else y

        for _ in range(2):
            loss().backward()
        last = loss()
        if mode == "step-in-backward":
            with training.opt.step_in_backward():
                return python_calls(last.backward)
        return python_calls(last.backward)

    few, more, many = calls(10), calls(73), calls(136)
    assert many - more == more - few  # 63 layers, 126 parameters each time
    if mode == "in-backward":
        assert (more - few) / 126 == (slots.Hook is slots.PlainHook)  # the hook itself is native code
