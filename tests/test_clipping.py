"""max_grad_norm: the update of the clipped gradient of the whole window, and the norm it was clipped by."""

import copy
import math

import pytest
import torch
from backwards import buffers_read_zero, loss_with, run_backwards
from cases import WINDOWS
from harness import (
    copies,
    feed,
    in_layout,
    live_storages,
    micro_batches,
    mid_window_state,
    parameters,
    params_of,
    run_window,
    values,
)
from oracle import Micro, Oracle, same_bits

from fused_accum import skipping
from fused_accum.norms import Norms

pytestmark = pytest.mark.filterwarnings("error", "ignore:the scales of this window")

LARGE = {"lr": 0.5, "weight_decay": 0.3}
NORMS = [1e-3, 0.7, 1e6]


def gradient_norm(grads, factor=1.0):
    return factor * sum(float(g.double().square().sum()) for g in grads if g is not None) ** 0.5


@pytest.mark.parametrize("max_norm", NORMS)
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
def test_windows(make, device, window, max_norm):
    params = parameters((65,), (13, 17), (0,), (), (3000,), device=device)
    opt = make(params, max_grad_norm=max_norm, **LARGE)
    oracle = Oracle(opt, max_grad_norm=max_norm)
    for fold in (True, False, True):
        micros = micro_batches(params, window, absent={(1, 0), (len(window) - 1, 1)})
        oracle.window(micros)
        run_window(opt, micros, fold=fold)
        oracle.check()
        assert opt.grad_norm.dim() == 0
        assert float(opt.grad_norm) == pytest.approx(oracle.norm, rel=1e-6)
        assert buffers_read_zero(opt)


@pytest.mark.parametrize("accum_dtype", [torch.float32, torch.bfloat16], ids=["accum-fp32", "accum-bf16"])
def test_dtypes_and_groups(make, device, accum_dtype):
    """One norm over groups and dtypes; float64 parameters make it float64."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    params = [p for dtype in dtypes for p in parameters((129,), (7, 5), dtype=dtype, device=device)]
    groups = [{"params": params[:3], "lr": 0.1}, {"params": params[3:], "maximize": True}]
    opt = make(groups, max_grad_norm=0.3, accum_dtype=accum_dtype, **LARGE)
    oracle = Oracle(opt, accum_dtype, max_grad_norm=0.3)
    for _ in range(2):
        micros = micro_batches(params, [(0.5, 3), (1.0, 4), (1.0, 5)])
        oracle.window(micros)
        run_window(opt, micros)
        oracle.check()
        oracle.adopt()
        assert opt.grad_norm.dtype == torch.float64


@pytest.mark.parametrize("max_norm", NORMS)
def test_parity_with_clip_grad_norm_(make, device, max_norm):
    params = parameters((65,), (500, 7), device=device)
    twins = copies(params)
    opt, torchs = make(params, max_grad_norm=max_norm, **LARGE), torch.optim.AdamW(twins, **LARGE)
    for count in (1, 3, 1):
        micros = micro_batches(params, [(1.0, None)] * count)
        run_window(opt, micros)
        for i, q in enumerate(twins):
            q.grad = sum(m.grads[i] for m in micros)
        norm = torch.nn.utils.clip_grad_norm_(twins, max_norm)
        torchs.step()
        assert opt.grad_norm.dtype == norm.dtype
        torch.testing.assert_close(opt.grad_norm, norm, rtol=1e-6, atol=0)
        for p, q in zip(params, twins):
            for name in ("exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(opt.state[p][name], torchs.state[q][name], rtol=2e-5, atol=1e-9)
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "channels_last", "misaligned", "expanded"])
def test_folding_keeps_the_bits(make, device, dtype, layout):
    """step(scale) and accumulate(scale); step(): from the gradient at N=1, from the buffer otherwise."""
    start = parameters((6, 4, 5, 3), (2049,), dtype=dtype, device=device)
    runs = [make(copies(start), max_grad_norm=0.01, **LARGE) for _ in range(2)]
    for window in ([(0.3, None)], [(1.0, None)], [(0.5, None), (0.3, None)]):
        micros = micro_batches(start, window, absent={(0, 1)} if len(window) > 1 else ())
        for micro in micros:
            micro.grads[0] = in_layout(micro.grads[0], layout)
        for opt, fold in zip(runs, (True, False)):
            run_window(opt, micros, fold=fold)
        assert same_bits(runs[0].grad_norm, runs[1].grad_norm)
        for p, q in zip(*map(params_of, runs)):
            assert same_bits(p, q)
            assert same_bits(runs[0].state[p]["exp_avg"], runs[1].state[q]["exp_avg"])


def test_norm_of_each_parameter(make, device):
    params = parameters((65,), (5,), (9,), (4,), device=device)
    opt = make(params, max_grad_norm=1.0)
    assert opt.grad_norm is None
    assert opt.grad_norms() == {}
    micros = micro_batches(params, [(1.0, 3), (1.0, 5)], absent={(1, 0), (0, 1), (0, 3), (1, 3)})
    run_window(opt, micros)
    found = opt.grad_norms()
    assert list(found) == params[:3]
    for i, p in enumerate(params[:3]):
        total = sum(m.weight * m.grads[i].double() for m in micros if m.grads[i] is not None)
        assert found[p].dim() == 0
        assert float(found[p]) == pytest.approx(gradient_norm([total], 1 / 8), rel=1e-6)
    kept = opt.grad_norm.clone()
    opt.step()  # nothing to do: nothing to tell
    assert same_bits(opt.grad_norm, kept)


def test_without_the_options_nothing_is_measured(make, device):
    params = parameters((65,), device=device)
    opt = make(params)
    run_window(opt, micro_batches(params, [(1.0, None)] * 2))
    assert opt.grad_norm is None
    assert opt.grad_norms() == {}
    assert (opt.skipped_steps, opt.skipped_microbatches, opt.nonfinite_parameter) == (0, 0, None)


def test_options_are_no_group_keys(make, device):
    params = parameters((65,), device=device)
    opt = make(params, max_grad_norm=1.0, skip_nonfinite="step")
    assert opt.param_groups[0].keys() == torch.optim.AdamW(params).param_groups[0].keys()
    with pytest.raises(AttributeError):
        opt.grad_norm = 1.0


def test_one_micro_batch_needs_no_buffer(make, device):
    params = parameters((5000,), device=device)
    opt = make(params, max_grad_norm=1e-3)
    params[0].grad = values((5000,), device=device)
    opt.step()
    before = live_storages().keys()
    params[0].grad = values((5000,), device=device)
    opt.step()
    assert not opt._run.export()
    grown = sum(storage.nbytes() for at, storage in live_storages().items() if at not in before)
    assert grown < 5000 * 4


@pytest.mark.parametrize("how", ["reload", "deepcopy"])
def test_a_window_that_went_through_a_copy(make, device, how):
    """The sums of squares of earlier micro-batches are not copied: they are found again."""
    params = parameters((65,), (2000,), device=device)
    opt = make(params, max_grad_norm=0.1, **LARGE)
    oracle = Oracle(opt, max_grad_norm=0.1)
    micros = micro_batches(params, [(0.5, None)] * 3, absent={(2, 0)})
    for micro in micros[:2]:
        feed(opt, micro)
    if how == "deepcopy":
        other = copy.deepcopy(opt)
    else:
        other = make(copies(params), max_grad_norm=0.1, **LARGE)
        other.load_state_dict(copy.deepcopy(mid_window_state(opt)))
    for run in (opt, other):
        feed(run, micros[2], last=True)
    oracle.window(micros)
    oracle.check()
    assert same_bits(opt.grad_norm, other.grad_norm)
    assert all(same_bits(p, q) for p, q in zip(params, params_of(other)))


def test_a_window_after_a_discarded_one(make, device):
    params = parameters((65,), (20,), device=device)
    opt = make(params, max_grad_norm=0.1, **LARGE)
    oracle = Oracle(opt, max_grad_norm=0.1)
    feed(opt, micro_batches(params, [(100.0, None)])[0])
    with pytest.warns(UserWarning, match="dropped 1"):
        opt.zero_grad()
    micros = micro_batches(params, [(1.0, None)] * 2, absent={(0, 1), (1, 1)})
    oracle.window(micros)
    run_window(opt, micros)
    oracle.check()


@pytest.mark.parametrize("spoil", [float("inf"), float("nan")])
def test_not_finite_without_skipping_is_as_in_torch(make, device, spoil):
    """clip_grad_norm_ by an infinite norm makes zeros, of infinities NaN; by a NaN all is NaN."""
    params = parameters((9,), (5,), device=device)
    twins = copies(params)
    opt, torchs = make(params, max_grad_norm=1.0), torch.optim.AdamW(twins)
    grads = [values(p.shape, device=device) for p in params]
    grads[0][3] = spoil
    run_window(opt, [Micro(grads)])
    for q, g in zip(twins, grads):
        q.grad = g.clone()
    torch.nn.utils.clip_grad_norm_(twins, 1.0)
    torchs.step()
    for p, q in zip(params, twins):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7, equal_nan=True)
    assert not opt.grad_norm.isfinite()


def test_one_norm_of_several_devices(make, device):
    """Each device leaves its own sums of squares; here two optimizers' stand for them."""
    found = []
    for shapes in [(65,), (9,)], [(500,)]:
        params = parameters(*shapes, device=device)
        opt = make(params, max_grad_norm=1.0)
        run_window(opt, micro_batches(params, [(1.0, None)] * 2))
        found.append(opt)
    buckets = [bucket for opt in found for bucket in opt._run.built()]
    together = Norms(buckets, coefficient=0.5)
    expected = 0.5 * math.hypot(*(float(opt._run.norms.total()) for opt in found))
    assert float(together.total()) == pytest.approx(expected, rel=1e-12)
    assert together.on_host() == pytest.approx(expected, rel=1e-12)
    assert float(together.total()) == together.on_host()
    assert list(together.each()) == [p for opt in found for p in params_of(opt)]
    assert math.hypot(*map(float, together.each().values())) == pytest.approx(expected, rel=1e-6)


# -- where backward accumulates ----------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [[(1.0, None)], [(1.0, None)] * 3, [(1.0, 3), (1.0, 7), (1.0, 2)]], ids=str)
def test_in_backward(make, device, window):
    params = parameters((65,), (13, 17), (2000,), device=device)
    opt = make(params, max_grad_norm=0.2, **LARGE)
    oracle = Oracle(opt, max_grad_norm=0.2)
    opt.accumulate_in_backward()
    for _ in range(3):
        micros = micro_batches(params, window, absent={(0, 1)} if len(window) > 1 else ())
        for micro in micros:
            opt.scale_loss(loss_with(params, micro.grads), micro.scale, weight=micro.weight).backward()
        oracle.window(micros)
        opt.step()
        oracle.check()
        assert float(opt.grad_norm) == pytest.approx(oracle.norm, rel=1e-6)
        assert buffers_read_zero(opt)


def test_in_backward_a_replaced_p_grad_is_what_counts(make, device):
    params = parameters((65,), (20,), device=device)
    opt = make(params, max_grad_norm=0.2, **LARGE)
    oracle = Oracle(opt, max_grad_norm=0.2)
    opt.accumulate_in_backward()
    run_backwards(params, micro_batches(params, [(1.0, None)]))
    micro = micro_batches(params, [(1.0, None)])[0]
    params[0].grad, params[1].grad = micro.grads[0].clone(), None
    oracle.window([Micro([micro.grads[0], None])])
    opt.step()
    oracle.check()
    assert list(opt.grad_norms()) == params[:1]


def test_after_clip_grad_norm_in_backward_mode(make, device):
    """p.grad is the sum there: torch's own clip works as well, and ours then finds the clipped norm."""
    params = parameters((65,), device=device)
    opt = make(params, max_grad_norm=1e3)
    opt.accumulate_in_backward()
    run_backwards(params, micro_batches(params, [(1.0, None)] * 2))
    torch.nn.utils.clip_grad_norm_(params, 0.5)
    opt.step()
    assert float(opt.grad_norm) == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize("options", [{"max_grad_norm": 1.0}, {"skip_nonfinite": "step"}], ids=str)
def test_step_in_backward_is_refused(make, device, options):
    params = parameters((65,), device=device)
    opt = make(params, **options)
    (name,) = options
    with pytest.raises(RuntimeError, match=rf"step_in_backward\(\) with {name}.*step\(\) after the backward"):
        opt.step_in_backward().__enter__()
    run_window(opt, micro_batches(params, [(1.0, None)]))  # nothing is left of it


# -- on a device, without waiting for it -------------------------------------------------------------------------


def test_the_coefficient_may_stay_on_the_device(make, on, device, monkeypatch):
    """What runs on a GPU, here wherever the tensors are."""
    if on[0] == "cpu":
        pytest.skip("the native CPU code takes the coefficient from the host")
    monkeypatch.setattr(skipping, "on_host", lambda *_: False)
    params = parameters((65,), (13, 17), (2000,), device=device)
    opt = make(params, max_grad_norm=0.2, **LARGE)
    oracle = Oracle(opt, max_grad_norm=0.2)
    for window in ([(1.0, None)], [(0.5, 3), (1.0, 5)]):
        micros = micro_batches(params, window)
        oracle.window(micros)
        run_window(opt, micros)
        # The factor is rounded to float32 on its way, which the oracle does not know.
        for p in params:
            state, cell = opt.state[p], oracle.cells[p]
            torch.testing.assert_close(state["exp_avg"].double().cpu(), cell.exp_avg.value, rtol=1e-5, atol=1e-10)
            torch.testing.assert_close(p.detach().double().cpu(), cell.param.value, rtol=1e-4, atol=1e-5)
        assert float(opt.grad_norm) == pytest.approx(oracle.norm, rel=1e-6)
