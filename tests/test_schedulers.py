"""torch.optim.lr_scheduler on top: hyper-parameters are read from the group at every step, and step is patched."""

import copy
import math

import pytest
import torch
from cases import WINDOWS
from harness import copies, micro_batches, parameters, params_of, run_checked, run_window
from oracle import Oracle
from torch.optim import lr_scheduler, swa_utils

pytestmark = pytest.mark.filterwarnings("error")

SCHEDULERS = {
    "one-cycle": lambda opt: lr_scheduler.OneCycleLR(opt, max_lr=0.5, total_steps=30),
    "cyclic": lambda opt: lr_scheduler.CyclicLR(opt, 0.01, 0.5, step_size_up=3, cycle_momentum=True),
    "lambda": lambda opt: lr_scheduler.LambdaLR(opt, lambda n: 1 / (n + 1)),
    "cosine": lambda opt: lr_scheduler.CosineAnnealingLR(opt, 5),
    "warm-restarts": lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, 4),
    "linear-then-exponential": lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.LinearLR(opt, total_iters=3), lr_scheduler.ExponentialLR(opt, 0.7)], [3]
    ),
    "step-and-polynomial": lambda opt: lr_scheduler.ChainedScheduler(
        [lr_scheduler.StepLR(opt, 4, 0.5), lr_scheduler.PolynomialLR(opt, 10, power=2.0)]
    ),
    "multiplicative": lambda opt: lr_scheduler.MultiplicativeLR(opt, lambda n: 0.9 if n % 2 else 1.2),
    "multi-step-after-constant": lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.ConstantLR(opt, 0.3, 3), lr_scheduler.MultiStepLR(opt, [2, 5], 0.5)], [3]
    ),
    "swa": lambda opt: swa_utils.SWALR(opt, swa_lr=0.05, anneal_epochs=4),
}


@pytest.mark.parametrize("schedule", SCHEDULERS.values(), ids=SCHEDULERS)
def test_scheduler(make, device, schedule):
    params = parameters((65,), (5,), device=device)
    opt = make([{"params": params[:1]}, {"params": params[1:], "lr": 0.05}], lr=0.2, weight_decay=0.3)
    twin = copies(params)
    stock = torch.optim.AdamW([{"params": twin[:1]}, {"params": twin[1:], "lr": 0.05}], lr=0.2, weight_decay=0.3)
    oracle = Oracle(opt)
    schedulers = [schedule(opt), schedule(stock)]
    for _ in range(12):
        micros = micro_batches(params, WINDOWS["mean-of-4"])
        for k, p in enumerate(twin):
            p.grad = sum(0.25 * m.grads[k] for m in micros)
        stock.step()
        run_checked(opt, oracle, micros)
        for scheduler in schedulers:
            scheduler.step()
        for ours, theirs in zip(opt.param_groups, stock.param_groups):
            for key in ("lr", "betas"):
                assert ours[key] == theirs[key]


def test_betas_really_change_under_one_cycle(make, device):
    """Case 16 rests on it: the scheduler rewrites betas[0] at every step."""
    opt = make(parameters((5,), device=device))
    scheduler = lr_scheduler.OneCycleLR(opt, max_lr=0.5, total_steps=30)
    seen = set()
    for _ in range(5):
        run_window(opt, micro_batches(params_of(opt), WINDOWS["N=1"]))
        scheduler.step()
        seen.add(opt.param_groups[0]["betas"][0])
    assert len(seen) == 5


@pytest.mark.parametrize("schedule", ["one-cycle", "lambda", "cosine"])
def test_tensor_lr(make, device, schedule):
    """Schedulers fill a tensor lr in place."""
    params = parameters((65,), device=device)
    lr = torch.tensor(0.2, device=device)
    opt = make(params, lr=lr)
    oracle = Oracle(opt)
    scheduler = SCHEDULERS[schedule](opt)
    values_seen = set()
    for _ in range(6):
        micros = micro_batches(params, WINDOWS["mean-of-4"])
        run_checked(opt, oracle, micros)
        scheduler.step()
        values_seen.add(float(lr))
    assert opt.param_groups[0]["lr"] is lr
    assert len(values_seen) > 3


def test_plateau(make, device):
    params = parameters((65,), device=device)
    opt = make(params, lr=0.4)
    oracle = Oracle(opt)
    scheduler = lr_scheduler.ReduceLROnPlateau(opt, patience=0, factor=0.5)
    for n in range(5):
        micros = micro_batches(params, WINDOWS["tokens"])
        run_checked(opt, oracle, micros)
        scheduler.step(float(n))
    assert math.isclose(opt.param_groups[0]["lr"], 0.4 * 0.5**4)


def test_scheduler_wraps_step_on_the_instance(make, device):
    """LRScheduler replaces opt.step; scale, weight and closure must still go through, and it counts the step."""
    params = parameters((65,), device=device)
    opt = make(params, lr=0.4)
    scheduler = lr_scheduler.StepLR(opt, 1, 0.5)
    oracle = Oracle(opt)
    micros = micro_batches(params, WINDOWS["tokens-scaled"])
    oracle.window(micros)
    run_window(opt, micros)
    scheduler.step()  # would warn had it not seen the step
    micros = micro_batches(params, [(1.0, None)])

    def closure():
        params[0].grad = micros[0].grads[0]
        return 3.0

    oracle.window(micros)
    assert opt.step(closure) == 3.0
    oracle.check()


def test_scheduler_warns_when_only_accumulate_was_called(make, device):
    """accumulate() is not a step: a scheduler stepped per micro-batch is told so by torch's own warning."""
    params = parameters((5,), device=device)
    opt = make(params)
    scheduler = lr_scheduler.StepLR(opt, 1)
    params[0].grad = torch.ones_like(params[0])
    opt.accumulate()
    with pytest.warns(UserWarning, match=r"before.*optimizer.step"):
        scheduler.step()


def test_scheduler_state_survives_a_reload(make, device):
    params = parameters((5,), device=device)
    opt = make(params, lr=0.2)
    scheduler = lr_scheduler.OneCycleLR(opt, max_lr=0.5, total_steps=30)
    for _ in range(3):
        run_window(opt, micro_batches(params, WINDOWS["N=1"]))
        scheduler.step()
    fresh = make(copies(params), lr=0.2)
    again = lr_scheduler.OneCycleLR(fresh, max_lr=0.5, total_steps=30)
    fresh.load_state_dict(copy.deepcopy(opt.state_dict()))  # torch's load shares tensors
    again.load_state_dict(scheduler.state_dict())
    for o, s in ((opt, scheduler), (fresh, again)):
        torch.manual_seed(1)
        run_window(o, micro_batches(params, WINDOWS["N=1"]))
        s.step()
    assert opt.param_groups[0]["lr"] == fresh.param_groups[0]["lr"]
    assert opt.param_groups[0]["betas"] == fresh.param_groups[0]["betas"]
    assert torch.equal(params[0], params_of(fresh)[0])
