"""Master weights and clipping together: the update of fp32 AdamW with clip_grad_norm_ on the masters."""

import pytest
import torch
from harness import values

from fused_accum import backends


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
