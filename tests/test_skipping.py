"""skip_nonfinite: a window, or a micro-batch, with an inf or a NaN is dropped and leaves no trace but a count."""

import copy
import pickle

import pytest
import torch
from backwards import buffers_read_zero, loss_with
from harness import micro_batches, mid_window_state, parameters, params_of, run_window, values
from oracle import Micro, Oracle, same_bits
from torch import nn

from fused_accum import backends, skipping

pytestmark = pytest.mark.filterwarnings("error", "ignore:the scales of this window")

LARGE = {"lr": 0.5, "weight_decay": 0.3}
SPOILS = [float("inf"), float("-inf"), float("nan")]


def spoiled(micros, at, i, value):
    micros[at].grads[i].view(-1)[-1] = value
    return micros


def kept(opt):
    return copy.deepcopy((mid_window_state(opt), [p.detach() for p in params_of(opt)]))


def assert_kept(opt, before):
    state, params = before
    now = mid_window_state(opt)
    assert now["param_groups"] == state["param_groups"]
    assert now["state"].keys() == state["state"].keys()
    for i, entries in state["state"].items():
        assert entries.keys() == now["state"][i].keys()
        assert all(same_bits(now["state"][i][name], value) for name, value in entries.items())
    assert all(same_bits(p, x) for p, x in zip(params_of(opt), params))


def in_backward(opt, micros):
    for m in micros:
        opt.scale_loss(loss_with(params_of(opt), m.grads), m.scale, weight=m.weight).backward()
    opt.step()


WAYS = {
    "folded": run_window,
    "accumulated": lambda opt, micros: run_window(opt, micros, fold=False),
    "in backward": in_backward,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("spoil", SPOILS, ids=str)
@pytest.mark.parametrize("at", range(3))
@pytest.mark.parametrize("clip", [None, 0.3])
def test_a_spoiled_window_changes_nothing(make, device, way, spoil, at, clip):
    params = parameters((65,), (2000,), device=device)
    opt = make([("first", params[0]), ("second", params[1])], skip_nonfinite="step", max_grad_norm=clip, **LARGE)
    oracle = Oracle(opt, max_grad_norm=clip)
    if way == "in backward":
        opt.accumulate_in_backward()
    window = [(1.0, 3), (1.0, 7), (1.0, 2)]
    absent = {(k, 1) for k in range(3) if k != at}  # the sum that is not finite is of an earlier micro-batch
    before = kept(opt)
    for skipped in (1, 2):  # the first step of all, and a later one
        WAYS[way](opt, spoiled(micro_batches(params, window, absent=absent), at, 1, spoil))
        assert_kept(opt, before)
        assert opt.pending == (0, 0.0)
        assert buffers_read_zero(opt)
        assert all(p.grad is None for p in params)
        assert (opt.skipped_steps, opt.nonfinite_parameter) == (skipped, "'second'")
        assert not opt.grad_norm.isfinite()
        micros = micro_batches(params, window)
        oracle.window(micros)
        WAYS[way](opt, micros)
        oracle.check()
        before = kept(opt)
    assert opt.skipped_steps == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_one_micro_batch(make, device, dtype):
    params = parameters((65,), (5,), dtype=dtype, device=device)
    opt = make(params, skip_nonfinite="step", **LARGE)
    oracle = Oracle(opt)
    before = kept(opt)
    run_window(opt, spoiled(micro_batches(params, [(1.0, None)]), 0, 1, float("inf")))
    assert_kept(opt, before)
    assert not opt.state
    micros = micro_batches(params, [(1.0, None)])
    oracle.window(micros)
    run_window(opt, micros)
    oracle.check()


def test_large_gradients_are_finite(make, device):
    """Their squares overflow float32, and do not here; so do sums that overflow the buffer."""
    params = parameters((65,), device=device)
    opt = make(params, skip_nonfinite="step")
    run_window(opt, [Micro([torch.full((65,), 3e38, device=device)])])
    assert opt.skipped_steps == 0
    assert float(opt.grad_norm.double()) == pytest.approx(3e38 * 65**0.5, rel=1e-6) or opt.grad_norm.isinf()
    before = kept(opt)
    run_window(opt, [Micro([torch.full((65,), 3e38, device=device)])] * 2)
    assert opt.skipped_steps == 1
    assert_kept(opt, before)


def test_schedulers_go_on(make, device):
    params = parameters((5,), device=device)
    opt = make(params, lr=1.0, skip_nonfinite="step")
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
    for spoil in (True, False):
        micros = micro_batches(params, [(1.0, None)])
        run_window(opt, spoiled(micros, 0, 0, float("nan")) if spoil else micros)
        scheduler.step()
    assert opt.param_groups[0]["lr"] == 0.25


def test_counts_survive_copies(make, device):
    params = parameters((5,), device=device)
    opt = make(params, skip_nonfinite="step")
    run_window(opt, spoiled(micro_batches(params, [(1.0, None)]), 0, 0, float("nan")))
    for other in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        assert other.skipped_steps == 1
        run_window(other, spoiled(micro_batches(params, [(1.0, None)]), 0, 0, float("nan")))
        assert other.skipped_steps == 2
    with pytest.raises(AttributeError):
        opt.skipped_steps = 0
    assert opt.param_groups[0].keys() == torch.optim.AdamW(params).param_groups[0].keys()


def test_direct_wgrad(make, device):
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)).to(device)
    twin = copy.deepcopy(model)
    opt = make(model.named_parameters(), skip_nonfinite="step", max_grad_norm=0.1, **LARGE)
    torchs = torch.optim.AdamW(twin.parameters(), **LARGE)
    opt.direct_wgrad(model)
    for n in range(4):
        xs = [values((5, 4), device=device, spread=False) for _ in range(3)]
        if n in (0, 2):
            xs[n][0, 0] = float("inf")
        before = kept(opt)
        for x in xs:
            model(x).square().mean().backward()
            twin(x).square().mean().backward()
        opt.step()
        if n in (0, 2):
            assert_kept(opt, before)
            assert opt.nonfinite_parameter == "'0.weight'"
        else:
            torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
            torchs.step()
        torchs.zero_grad()
        for p, q in zip(model.parameters(), twin.parameters()):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-4)
    assert opt.skipped_steps == 2


# -- micro-batches -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("fold", [True, False], ids=["folded", "accumulated"])
@pytest.mark.parametrize("at", range(3))
@pytest.mark.parametrize("weighted", [True, False])
def test_a_spoiled_micro_batch_leaves_the_others(make, device, at, fold, clip, weighted):
    params = parameters((65,), (2000,), device=device)
    named = [("first", params[0]), ("second", params[1])]
    opt = make(named, skip_nonfinite="microbatch", max_grad_norm=clip, **LARGE)
    oracle = Oracle(opt, max_grad_norm=clip)
    window = [(1.0, 3), (1.0, 7), (1.0, 2)] if weighted else [(0.5, None)] * 3
    for n in range(1, 4):
        micros = spoiled(micro_batches(params, window), at, 1, SPOILS[n - 1])
        oracle.window(micros[:at] + micros[at + 1 :])
        run_window(opt, micros, fold=fold)
        oracle.check()
        assert opt.pending == (0, 0.0)
        assert (opt.skipped_microbatches, opt.skipped_steps, opt.nonfinite_parameter) == (n, 0, "'second'")


def test_a_rejected_micro_batch_does_not_count(make, device):
    params = parameters((65,), device=device)
    opt = make(params, skip_nonfinite="microbatch")
    good, bad = micro_batches(params, [(1.0, 3), (1.0, 100)])
    spoiled([bad], 0, 0, float("nan"))
    for micro in (bad, good, bad):
        params[0].grad = micro.grads[0].clone()
        opt.accumulate(weight=micro.weight)
        assert params[0].grad is None
    assert opt.pending == (1, 3.0)


@pytest.mark.parametrize("fold", [True, False], ids=["folded", "accumulated"])
@pytest.mark.parametrize("weight", [3, None])
@pytest.mark.parametrize("count", [1, 3])
def test_a_window_of_nothing_but_spoiled_ones(make, device, count, weight, fold):
    """No update, and a warning, as of a window without a token; the next one is as if it had not been."""
    params = parameters((65,), device=device)
    opt = make([("first", params[0])], skip_nonfinite="microbatch", **LARGE)
    oracle = Oracle(opt)
    for n in (1, 2):  # the first window of all, and a later one
        before = kept(opt)
        micros = micro_batches(params, [(1 / count, weight)] * count)
        for k in range(count):
            spoiled(micros, k, 0, SPOILS[k])
        with pytest.warns(UserWarning, match=rf"rejected all {count} micro-batch.*no parameter was") as caught:
            run_window(opt, micros, fold=fold)
        assert len(caught) == 1
        assert_kept(opt, before)
        assert (opt.skipped_microbatches, opt.pending) == (n * count, (0, 0.0))
        assert opt.nonfinite_parameter == "'first'"
        opt.step()  # nothing was begun: nothing to warn of
        micros = micro_batches(params, [(1 / count, weight)] * count)
        oracle.window(micros)
        run_window(opt, micros, fold=fold)
        oracle.check()


def test_a_discarded_window_of_spoiled_ones_is_not_warned_of(make, device):
    params = parameters((65,), device=device)
    opt = make(params, skip_nonfinite="microbatch")
    params[0].grad = torch.full((65,), float("nan"), device=device)
    opt.accumulate()
    opt.zero_grad()
    opt.step()
    assert opt.skipped_microbatches == 1


def test_a_scale_that_overflows_spoils(make, device):
    params = parameters((65,), device=device)
    opt = make(params, skip_nonfinite="microbatch")
    params[0].grad = torch.full((65,), 1e30, device=device)
    opt.accumulate(1e15)
    assert opt.skipped_microbatches == 1


@pytest.mark.parametrize("mode", ["accumulate_in_backward", "attach_main_grad", "direct_wgrad"])
def test_backward_modes_cannot_reject_a_micro_batch(make, device, mode):
    model = nn.Linear(4, 3).to(device)
    opt = make(model.parameters(), skip_nonfinite="microbatch")
    with pytest.raises(RuntimeError, match=r"skip_nonfinite='microbatch'.*before any of it is added.*'step'"):
        getattr(opt, mode)(*([model] if mode == "direct_wgrad" else []))


# -- on a device -------------------------------------------------------------------------------------------------


def test_the_decision_may_stay_on_the_device(make, on, device, monkeypatch):
    if not backends.registry()[on[0]].decides_on_device:
        pytest.skip(f"backend {on[0]} is told by the host what to skip")
    monkeypatch.setattr(skipping, "on_host", lambda *_: False)
    params = parameters((65,), (5000,), device=device)
    opt = make([("first", params[0]), ("second", params[1])], skip_nonfinite="step", max_grad_norm=1e9, **LARGE)
    oracle = Oracle(opt)
    for n in range(4):
        for window in ([(1.0, None)], [(1.0, None)] * 2):
            micros = micro_batches(params, window)
            before = kept(opt)
            if n % 2:
                run_window(opt, spoiled(micros, len(window) - 1, 1, SPOILS[n - 1]))
                assert_kept(opt, before)
                assert opt.nonfinite_parameter == "'second'"
            else:
                oracle.window(micros)
                run_window(opt, micros)
                oracle.check()
            assert buffers_read_zero(opt)
    assert opt.skipped_steps == 4
