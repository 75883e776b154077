"""Threads, re-entry, fork: one call at a time, the rest refused; never a deadlock, never a half-applied call."""

import sys
import threading
import time
import warnings

import pytest
import torch
from harness import copies, micro_batches, mid_window_state, parameters, run_checked
from oracle import Micro, Oracle, same_bits

pytestmark = pytest.mark.filterwarnings("error")


# ---- inside a backward -----------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", ["tensor", "post-accumulate"])
@pytest.mark.parametrize("call", ["step", "accumulate"])
def test_call_inside_a_backward_is_refused(make, device, hook, call):
    """Gradients are not complete there; the backward fails, nothing was updated, and the optimizer goes on."""
    params = parameters((65,), (5,), device=device)
    opt = make(params, lr=0.5)
    oracle = Oracle(opt)
    run = lambda *_: getattr(opt, call)()  # noqa: E731
    handle = params[1].register_hook(run) if hook == "tensor" else params[1].register_post_accumulate_grad_hook(run)
    with pytest.raises(RuntimeError, match=rf"{call}\(\).*backward"):
        sum((p**2).sum() for p in params).backward()
    oracle.check()
    handle.remove()
    opt.discard_microbatch()
    grads = [2 * p.detach() for p in params]
    oracle.window([Micro(grads)])
    sum((p**2).sum() for p in params).backward()
    opt.step()
    oracle.check()


def test_backward_inside_a_closure_is_not_inside_a_backward(make, device):
    params = parameters((65,), device=device)
    opt = make(params, lr=0.5)
    oracle = Oracle(opt)
    oracle.window([Micro([2 * params[0].detach()])])
    opt.step(lambda: (params[0] ** 2).sum().backward())
    oracle.check()


def test_step_in_a_step_hook_is_refused_or_a_plain_call(make, device):
    """Hooks run around the step: a second step there finds no gradients and does nothing, or raises."""
    params = parameters((65,), device=device)
    opt = make(params, lr=0.5)
    oracle = Oracle(opt)
    nested = []

    def again(*_):
        if not nested:
            nested.append(1)
            opt.step()

    opt.register_step_post_hook(again)
    micros = micro_batches(params, [(1.0, None)])
    run_checked(opt, oracle, micros)


# ---- other threads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["step", "accumulate"])
@pytest.mark.parametrize("second", ["step", "accumulate", "zero_grad", "discard_microbatch", "state_dict"])
def test_concurrent_calls_are_refused(make, device, emulated, first, second):
    """While one thread is in a call on large tensors, another's call raises and disturbs nothing."""
    warnings.simplefilter("ignore")  # of a mid-window state_dict, of what zero_grad drops; pytest restores it
    p = torch.nn.Parameter(torch.zeros(300_000 if emulated else 6_000_000, device=device))
    grad = torch.ones_like(p)
    opt = make([p], lr=0.5)
    refused = []

    def intrude():
        try:
            while not stop.is_set():
                try:
                    getattr(opt, second)()
                except RuntimeError as error:
                    refused.append(str(error))
                    return
        finally:
            done.set()

    for _ in range(50):
        stop, done = threading.Event(), threading.Event()
        p.grad = None
        intruder = threading.Thread(target=intrude)
        p.grad = grad
        intruder.start()
        try:
            getattr(opt, first)()
        except RuntimeError as error:  # the intruder was first
            refused.append(str(error))
        stop.set()
        intruder.join()
        if refused:
            break
        with torch.no_grad():
            p.zero_()
    assert refused, "the calls never overlapped"
    assert "another" in refused[0]
    opt.discard_microbatch()
    assert p.isfinite().all()
    assert len(p.detach().unique()) == 1, "elements were updated a different number of times"


def test_step_while_another_thread_takes_a_state_dict_is_refused(make, device):
    """A checkpoint thread must get one consistent state: hooks show what happens within state_dict()."""
    params = parameters((65,), device=device)
    opt = make(params, lr=0.5)
    oracle = Oracle(opt)
    micros = micro_batches(params, [(0.5, None)] * 2)
    outcome = []

    def step():
        try:
            opt.step(scale=0.5)
            outcome.append(None)
        except RuntimeError as error:
            outcome.append(str(error))

    def during(*_):
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()

    handle = opt.register_state_dict_post_hook(during)
    params[0].grad = micros[0].grads[0]
    opt.accumulate(0.5)
    params[0].grad = micros[1].grads[0]
    state = mid_window_state(opt)
    handle.remove()
    assert outcome[0] is not None, "step() ran in the middle of state_dict()"
    assert "another call" in outcome[0]
    assert state["state"][0]["accum"].any()
    oracle.window(micros)
    opt.step(scale=0.5)
    oracle.check()


def test_calls_from_different_threads_in_turn(make, device):
    """What trainers with a thread for checkpoints or evaluation do: no thread owns the optimizer."""
    params = parameters((65,), device=device)
    opt = make(params, lr=0.5)
    oracle = Oracle(opt)
    micros = micro_batches(params, [(0.25, None)] * 4)
    oracle.window(micros)
    for k, micro in enumerate(micros):
        params[0].grad = micro.grads[0]
        call = opt.step if k == 3 else opt.accumulate
        thread = threading.Thread(target=call, kwargs={"scale": 0.25})
        thread.start()
        thread.join()
    oracle.check()


def test_two_optimizers_in_two_threads(make, device, emulated):
    """Different optimizers run at the same time and get what each would get alone."""
    torch.set_num_threads(3)
    torch.manual_seed(0)
    start = parameters((10_000 if emulated else 100_000,), (5,), device=device)
    micros = micro_batches(start, [(0.5, None)] * 2)
    runs = [copies(start) for _ in range(3)]
    opts = [make(params, lr=0.5, weight_decay=0.3) for params in runs]
    errors = []

    def work(opt, params):
        try:
            for _ in range(20):
                for k, micro in enumerate(micros):
                    for p, g in zip(params, micro.grads):
                        p.grad = g
                    (opt.step if k else opt.accumulate)(scale=0.5)
        except BaseException as error:
            errors.append(error)

    work(opts[2], runs[2])
    threads = [threading.Thread(target=work, args=pair) for pair in zip(opts[:2], runs[:2])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for params in runs[:2]:
        assert all(map(same_bits, params, runs[2]))


def test_other_threads_run_meanwhile(make, device, emulated):
    """The GIL is released: a Python thread makes progress during one long call."""
    p = torch.nn.Parameter(torch.zeros(300_000 if emulated else 5_000_000, device=device))
    opt = make([p])
    p.grad = torch.ones_like(p)
    opt.step()
    ticks, stop = [], threading.Event()

    def tick():
        while not stop.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0)

    p.grad = torch.ones_like(p)
    thread = threading.Thread(target=tick)
    thread.start()
    while not ticks:
        time.sleep(0)
    interval, before = sys.getswitchinterval(), len(ticks)
    sys.setswitchinterval(60)  # without a release the other thread could not run before the call is over
    try:
        opt.step()
        during = len(ticks) - before
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()
    assert during > 10
