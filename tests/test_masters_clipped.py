"""Master weights and stochastic rounding with clipping and skipping: as in fp32, and nothing moves by a skip."""

import copy

import pytest
import torch
from harness import assert_same_run, assert_unchanged, copies, micro_batches, parameters, run_window, snapshot, values

from fused_accum import backends

KINDS = {
    "bf16-fp32": (torch.bfloat16, {"master_weights": "fp32"}),
    "bf16-split": (torch.bfloat16, {"master_weights": "split"}),
    "fp16-fp32": (torch.float16, {"master_weights": "fp32"}),
    "bf16-by-chance": (torch.bfloat16, {"stochastic_rounding": True, "rounding_seed": 3}),
}


@pytest.mark.filterwarnings("ignore:the scales of this window")
@pytest.mark.parametrize("masters", ["fp32", "split"])
def test_masters_with_max_grad_norm_equal_fp32_adamw_with_clip(make, on, device, masters):
    if not backends.registry()[on[0]].keeps_weights:
        pytest.skip(f"{on[0]} refuses master weights")
    torch.manual_seed(4)
    shapes = [(65,), (130, 7), ()]
    params = [torch.nn.Parameter(values(s, device=device).bfloat16()) for s in shapes]
    wide = [torch.nn.Parameter(p.detach().float()) for p in params]
    ours = make(params, lr=0.1, weight_decay=0.3, master_weights=masters, max_grad_norm=0.5)
    torchs = torch.optim.AdamW(wide, lr=0.1, weight_decay=0.3)
    for window in (3, 1, 2):
        sums = [torch.zeros_like(w) for w in wide]
        for k in range(window):
            grads = [values(s, device=device).bfloat16() for s in shapes]
            for p, g, total in zip(params, grads, sums):
                p.grad = g
                total.add_(g.float(), alpha=0.5)
            if k < window - 1:
                ours.accumulate(0.5)
        ours.step(scale=0.5)
        for w, total in zip(wide, sums):
            w.grad = total
        norm = torch.nn.utils.clip_grad_norm_(wide, 0.5)
        torchs.step()
        torch.testing.assert_close(ours.grad_norm.float(), norm, rtol=1e-6, atol=0)
        for p, w in zip(params, wide):
            kept = ours.state[p]["master"]
            if masters == "fp32":
                torch.testing.assert_close(kept, w.detach(), rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(p.detach().float(), w.detach(), rtol=2**-7, atol=1e-6)
            for name in ("exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(ours.state[p][name], torchs.state[w][name], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("skip", ["step", "microbatch"])
@pytest.mark.parametrize(("dtype", "options"), KINDS.values(), ids=KINDS)
def test_what_is_skipped_leaves_no_trace(make, on, device, dtype, options, skip):
    """Parameters, masters, moments and counts (and so the random numbers to come): those of a run without it."""
    if not backends.registry()[on[0]].keeps_weights:
        pytest.skip(f"{on[0]} refuses master weights and stochastic rounding")
    params = parameters((65,), (9, 7), dtype=dtype, device=device)
    start = copies(params), copies(params)
    opt, clean = (make(own, lr=0.1, weight_decay=0.3, skip_nonfinite=skip, **options) for own in start)
    for n in range(4):
        micros = micro_batches(params, [(1.0, 3), (1.0, 5)])
        spoiled = copy.deepcopy(micros)
        spoiled[n % 2].grads[n % 2].view(-1)[n] = [float("nan"), float("inf")][n % 2]
        if skip == "step":
            before = snapshot(opt)
            run_window(opt, spoiled)
            assert_unchanged(before, snapshot(opt))
            run_window(opt, copy.deepcopy(micros))
        else:
            extra = copy.deepcopy(micros)
            run_window(opt, [*spoiled[n % 2 : n % 2 + 1], *extra])
        run_window(clean, micros)
        assert_same_run(opt, clean)
    assert (opt.skipped_steps, opt.skipped_microbatches) == ((4, 0) if skip == "step" else (0, 4))
