"""A backward that fails in the middle never leaves half a micro-batch behind unnoticed."""

import copy
import sys
import warnings

import pytest
import torch
from backwards import Failing, Failure, gradients, loss_with, run_backwards
from harness import mid_window_state, parameters, values
from oracle import Oracle
from torch.utils.checkpoint import checkpoint

from fused_accum import slots

pytestmark = pytest.mark.filterwarnings("error")

LARGE = {"lr": 0.5, "weight_decay": 0.3}
ERRORS = [Failure("half way"), torch.OutOfMemoryError("simulated"), KeyboardInterrupt()]
RAISES = pytest.raises(RuntimeError, match=r"did not finish.*zero_grad\(\)")


def opened(make, device, whole=1):
    """An optimizer whose window holds ``whole`` micro-batches and half of another."""
    params = parameters((65,), (13, 17), device=device)
    opt = make(params, **LARGE)
    opt.accumulate_in_backward()
    micros = gradients(params, whole + 1)
    run_backwards(params, micros[:whole])
    with pytest.raises(Failure):
        loss_with(params, micros[-1].grads, fail_at=1).backward()
    assert params[0].grad is not None
    return params, opt


def check_window(opt, params):
    oracle = Oracle(opt)
    oracle.adopt()
    micros = gradients(params, 2)
    run_backwards(params, micros)
    assert opt.pending.microbatches == 2
    oracle.window(micros)
    opt.step()
    oracle.check()


@pytest.mark.parametrize("whole", [0, 1])
@pytest.mark.parametrize("call", ["backward", "step", "accumulate"])
def test_the_next_call_raises_until_zero_grad(make, device, whole, call):
    params, opt = opened(make, device, whole)
    before = [p.detach().clone() for p in params]

    def attempt():
        if call == "backward":
            run_backwards(params, gradients(params, 1))
        else:
            getattr(opt, call)()

    for _ in range(2):
        with RAISES:
            attempt()
    assert all(torch.equal(p, x) for p, x in zip(params, before))
    opt.zero_grad()
    assert opt.pending == (0, 0.0)
    check_window(opt, params)


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_whatever_stops_it(make, device, error):
    params = parameters((65,), (13, 17), device=device)
    opt = make(params, **LARGE)
    opt.accumulate_in_backward()
    (micro,) = gradients(params, 1)
    with pytest.raises(type(error)):
        loss_with(params, micro.grads, fail_at=1, error=error).backward()
    with RAISES:
        opt.step()
    opt.zero_grad()
    check_window(opt, params)


@pytest.mark.parametrize("whole", [0, 1])
def test_a_model_that_clears_its_gradients_is_enough(make, device, whole):
    """Trainers call model.zero_grad(): nothing of the half micro-batch is left then."""
    params, opt = opened(make, device, whole)
    for p in params:
        p.grad = None
    check_window(opt, params)


def test_clearing_a_part_of_the_gradients_is_not_enough(make, device):
    params, opt = opened(make, device)
    params[0].grad = None
    with RAISES:
        run_backwards(params, gradients(params, 1))
    opt.zero_grad()
    check_window(opt, params)


@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_either_way(make, device, to_none):
    params, opt = opened(make, device)
    opt.zero_grad(set_to_none=to_none)
    check_window(opt, params)


def test_nothing_was_added_yet(make, device):
    """A backward that fails before it has reached a parameter has done no harm."""
    params = parameters((65,), (13, 17), device=device)
    opt = make(params, **LARGE)
    oracle = Oracle(opt)
    opt.accumulate_in_backward()
    micros = gradients(params, 2)
    run_backwards(params, micros[:1])
    with pytest.raises(Failure):
        loss_with(params, micros[1].grads, fail_at=0).backward()
    run_backwards(params, micros[1:])
    oracle.window(micros)
    opt.step()
    oracle.check()


@pytest.mark.parametrize("at", ["in the segment", "between segments", "after all segments"])
def test_inside_a_reentrant_checkpoint(make, device, at):
    """Every parameter is used in checkpoints only, so that no hook runs in the outer backward."""
    params = parameters((5, 5), (5, 5), device=device)
    opt = make(params, **LARGE)
    opt.accumulate_in_backward()
    failing = False

    def fail(x, where):
        return Failing.apply(x, Failure("half way")) if failing and where == at else x

    def model():
        x = values((3, 5), device=device).requires_grad_()
        x = fail(x * 1, "after all segments")
        x = checkpoint(lambda x: fail(x @ params[0], "in the segment") * 2, x, use_reentrant=True)
        x = fail(x * 1, "between segments")
        return checkpoint(lambda x: x @ params[1], x, use_reentrant=True).sum()

    for failing in (False, True, False):
        if failing:
            loss = model()
            with pytest.raises(Failure):
                loss.backward()
            with RAISES:
                opt.step()
            opt.zero_grad()
        else:
            model().backward()
            model().backward()
            assert opt.pending.microbatches == 2
            opt.step()
    assert float(opt.state[params[0]]["step"]) == 2


def test_state_leaves_the_spoiled_window_out(make, device):
    params, opt = opened(make, device)
    with pytest.warns(UserWarning, match="did not finish.*left out"):
        saved = opt.state_dict()
    assert not any("accum" in entry for entry in saved["state"].values())
    with pytest.warns(UserWarning, match="did not finish.*left out"):
        other = copy.deepcopy(opt)
    assert other.pending == (0, 0.0)
    with pytest.warns(UserWarning, match="dropped 1"):
        opt.load_state_dict(saved)
    assert all(p.grad is None for p in params)
    check_window(opt, params)
    assert mid_window_state(opt)["state"]


def test_the_loop_that_retries_after_out_of_memory(make, device):
    """The recipe of the README: start the window again with micro-batches of half the size."""
    params = parameters((65,), (13, 17), device=device)
    opt = make(params, **LARGE)
    oracle = Oracle(opt)
    opt.accumulate_in_backward()
    halves = gradients(params, 4)
    wholes = [(halves[0], halves[1]), (halves[2], halves[3])]
    attempts = []

    def run(parts, too_big):
        for k, part in enumerate(parts):
            loss = sum(loss_with(params, micro.grads) for micro in part)
            if too_big and k == 1:
                loss = loss + loss_with(params, part[0].grads, fail_at=1, error=torch.OutOfMemoryError("simulated"))
            loss.backward()

    for parts in (wholes, [(half,) for half in halves]):
        attempts.append(len(parts))
        try:
            run(parts, too_big=len(parts) == 2)
        except torch.OutOfMemoryError:
            opt.zero_grad()
            continue
        opt.step()
    assert attempts == [2, 4]
    oracle.window(halves)
    oracle.check()


def test_a_failure_elsewhere_is_none_of_ours(make, device):
    """Another model's backward fails: no parameter of this optimizer was in it."""
    params = parameters((65,), device=device)
    opt = make(params, **LARGE)
    opt.accumulate_in_backward()
    others = parameters((5,), (5,), device=device)
    with warnings.catch_warnings(), pytest.raises(Failure):
        loss_with(others, [torch.ones_like(p) for p in others], fail_at=1).backward()
    check_window(opt, params)


@pytest.mark.skipif(slots.Hook is slots.PlainHook, reason="a hook in Python can be interrupted before it notes it")
@pytest.mark.parametrize("whole", [0, 1])
def test_an_interrupt_before_the_first_hook_runs_is_noticed(make, device, whole):
    """Autograd has added a gradient by then. A signal's exception is raised by the first Python code that runs."""
    params = parameters((65,), (13, 17), device=device)
    opt = make(params, **LARGE)
    opt.accumulate_in_backward()
    micros = gradients(params, whole + 1)
    run_backwards(params, micros[:whole])
    loss = loss_with(params, micros[-1].grads)

    def interrupt(frame, event, _):
        if event == "call" and frame.f_code is slots.Slot.slow.__code__:
            sys.setprofile(None)
            raise KeyboardInterrupt

    before = sys.getprofile()
    sys.setprofile(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
    finally:
        sys.setprofile(before)
    assert opt.pending.microbatches == whole
    with RAISES:
        opt.step()
    with RAISES:
        run_backwards(params, gradients(params, 1))
    opt.zero_grad()
    check_window(opt, params)
