"""Failures that users reported in such software, by their number in the project's list: norms, scalers, poison."""

import pytest
import torch
from backwards import buffers_read_zero, run_backwards
from harness import buffers, copies, mid_window_state, parameters, run_window, values
from oracle import Micro, same_bits

pytestmark = pytest.mark.filterwarnings("error")


def test_case_08_one_nan_micro_batch(make, device):
    """With the skip the buffer holds the other three, and they count; without, it shows before the step."""
    params = parameters((65,), device=device)
    grads = [values((65,), device=device) for _ in range(4)]
    grads[1][3] = float("nan")
    opts = make(copies(params), skip_nonfinite="microbatch"), make(copies(params))
    for opt in opts:
        for g in grads:
            opt.param_groups[0]["params"][0].grad = g.clone()
            opt.accumulate(weight=10)
    assert opts[0].pending == (3, 30.0)
    torch.testing.assert_close(buffers(opts[0])[0], 10 * (grads[0] + grads[2] + grads[3]))
    assert not buffers(opts[1])[0].isfinite().all()


@pytest.mark.parametrize("fused", [False, True])
def test_case_27_unscaled_exactly_once(make, device, fused):
    """unscale_, clip, step: against torch, with the moments."""
    params = parameters((65,), (5,), device=device)
    twins = copies(params)
    opts = make(params, lr=0.1, fused=fused, max_grad_norm=0.5), torch.optim.AdamW(twins, lr=0.1)
    scalers = [torch.amp.GradScaler(device, init_scale=2.0**12) for _ in opts]
    for unscale in (True, False, True):
        for i, (opt, scaler, own) in enumerate(zip(opts, scalers, (params, twins))):
            scaler.scale(sum((p**2).sum() for p in own)).backward()
            if unscale or i == 1:
                scaler.unscale_(opt)
            if i == 1:
                torch.nn.utils.clip_grad_norm_(own, 0.5)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        for p, q in zip(params, twins):
            for name in ("exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(opts[0].state[p][name], opts[1].state[q][name], rtol=1e-5, atol=1e-10)


@pytest.mark.parametrize("how", ["GradScaler", "skip_nonfinite"])
def test_case_28_inf_leaves_everything(make, device, how):
    """Parameters, moments and counts untouched, the buffer cleared, and the next step as if nothing had been."""
    params = parameters((65,), device=device)
    opt = make(params, lr=0.1, fused=True, skip_nonfinite="step" if how == "skip_nonfinite" else None)
    run_window(opt, [Micro([values((65,), device=device)])])
    opt.accumulate_in_backward()
    before = {name: x.clone() for name, x in opt.state[params[0]].items()}
    kept = params[0].detach().clone()
    scaler = torch.amp.GradScaler(device, init_scale=2.0**4, enabled=how == "GradScaler")
    for x in (1.0, float("inf"), 1.0):
        scaler.scale((params[0] * x).sum()).backward()
    scaler.step(opt)
    scaler.update()
    assert same_bits(params[0], kept)
    assert all(same_bits(opt.state[params[0]][name], x) for name, x in before.items())
    assert before["step"].dim() == 0
    assert buffers_read_zero(opt)
    assert opt.pending == (0, 0.0)
    scaler.scale(params[0].sum()).backward()
    scaler.step(opt)
    assert float(opt.state[params[0]]["step"]) == 2


@pytest.mark.parametrize("mode", ["explicit", "in backward"])
def test_case_29_the_norm_is_never_a_silent_zero(make, device, mode):
    """Gradients are drained when clipping comes: it is the sum's norm that counts."""
    params = parameters((65,), (9,), device=device)
    opt = make(params, max_grad_norm=0.1)
    micros = [Micro([values(p.shape, device=device) for p in params]) for _ in range(3)]
    if mode == "explicit":
        run_window(opt, micros, fold=False)
    else:
        opt.accumulate_in_backward()
        run_backwards(params, micros)
        opt.step()
    sums = [sum(g.double() for g in gs) for gs in zip(*(m.grads for m in micros))]
    norm = float(torch.cat(sums).norm())
    assert float(opt.grad_norm) == pytest.approx(norm, rel=1e-6)
    for p, total in zip(params, sums):
        expected = 0.1 * total * 0.1 / (norm + 1e-6)
        torch.testing.assert_close(mid_window_state(opt)["state"] and opt.state[p]["exp_avg"].double(), expected)
