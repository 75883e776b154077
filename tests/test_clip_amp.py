"""GradScaler with clipping and skipping, and token weights with both: step for step as torch.optim.AdamW."""

import contextlib
import copy
import math

import hypothesis
import pytest
import torch
from harness import values
from hypothesis import strategies as st
from torch import nn

pytestmark = pytest.mark.filterwarnings("error", "ignore:the scales of this window")

LARGE = {"lr": 0.3, "weight_decay": 0.3}
MODES = ["plain", "in backward", "direct"]
OPTIONS = [{}, {"max_grad_norm": 0.1}, {"max_grad_norm": 0.1, "skip_nonfinite": "step"}]
BY_HAND = "clip_grad_norm_"  # in between, as with any optimizer: where backward accumulates, p.grad is the sum


def net(device):
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)).to(device)


def assert_close(a, b, opt, torchs):
    for p, q in zip(a.parameters(), b.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(opt.state[p][name], torchs.state[q][name], rtol=1e-4, atol=1e-9)
        assert float(opt.state[p]["step"]) == float(torchs.state[q]["step"])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
@pytest.mark.parametrize(
    ("unscale", "options"), [*((u, o) for u in (False, True) for o in OPTIONS), (True, BY_HAND)], ids=str
)
def test_parity_with_inf_in_every_place(make, device, mode, fused, unscale, options):
    by_hand, options = options == BY_HAND, {} if options == BY_HAND else options
    count = 1 if mode == "plain" else 3
    models = [net(device)]
    models.append(copy.deepcopy(models[0]))
    opts = (
        make(models[0].parameters(), fused=fused, **options, **LARGE),
        torch.optim.AdamW(models[1].parameters(), **LARGE),
    )
    scalers = [torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=2) for _ in range(2)]
    if mode == "in backward":
        opts[0].accumulate_in_backward()
    elif mode == "direct":
        opts[0].direct_wgrad(models[0])
    for n in range(6):
        xs = [values((5, 4), device=device, spread=False) for _ in range(count)]
        if n % 2:
            xs[(n // 2) % count][0, 0] = float("inf")
        for i, (model, opt, scaler) in enumerate(zip(models, opts, scalers)):
            for x in xs:
                scaler.scale(model(x).square().mean() / count).backward()
            if unscale or i == 1:
                scaler.unscale_(opt)
            if by_hand or (i == 1 and options):
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        if n % 2 == 0:
            assert_close(*models, *opts)
            if options:
                assert float(opts[0].grad_norm) == pytest.approx(float(norm), rel=1e-5)
    assert float(opts[0].state[next(models[0].parameters())]["step"]) == 3


@hypothesis.settings(derandomize=True, deadline=None, max_examples=25, database=None,
                     suppress_health_check=list(hypothesis.HealthCheck))  # fmt: skip
@hypothesis.given(
    windows=st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(any), min_size=2, max_size=3),
    mode=st.sampled_from(["explicit", "folded", "in backward", "direct", "step in backward"]),
    amp=st.booleans(),
    max_norm=st.sampled_from([None, 0.05, 1e3]),
    tensor=st.booleans(),
    unit=st.sampled_from([1, 2.0**24, 1e-3]),
    seed=st.integers(0, 1000),
)
def test_any_split_equals_one_big_batch(make, device, windows, mode, amp, max_norm, tensor, unit, seed):
    """Micro-batches of any number of tokens, none included, in every mode, clipped, under GradScaler."""
    torch.manual_seed(seed)
    model = net(device)
    twin = copy.deepcopy(model).double()
    inside = mode == "step in backward"  # which knows no norm, and no scaler
    max_norm, amp = (None, False) if inside else (max_norm, amp)
    skip = None if inside else "step"
    opt = make(model.parameters(), max_grad_norm=max_norm, skip_nonfinite=skip, **LARGE)
    torchs = torch.optim.AdamW(twin.parameters(), **LARGE)
    if mode == "in backward":
        opt.accumulate_in_backward()
    elif mode in ("direct", "step in backward"):
        opt.direct_wgrad(model)
    explicit = mode in ("explicit", "folded")
    scaler = torch.amp.GradScaler(device, init_scale=2.0**8, enabled=amp and not explicit)
    for window in windows:
        xs = [values((n, 4), device=device, spread=False) for n in window]
        for k, x in enumerate(xs):
            weight = torch.tensor(len(x) * unit, dtype=torch.float64) if tensor else len(x) * unit
            loss = model(x).square().mean()  # NaN of no tokens
            if not explicit:
                last = inside and k == len(xs) - 1
                with opt.step_in_backward() if last else contextlib.nullcontext():
                    scaler.scale(opt.scale_loss(loss, weight=weight)).backward()
                continue
            loss.backward()
            if mode == "folded" and k == len(xs) - 1:
                opt.step(weight=weight)
            else:
                opt.accumulate(weight=weight)
        if mode == "explicit":
            opt.step()
        elif not explicit and not inside:
            scaler.step(opt)
            if scaler.is_enabled():
                scaler.update()
        twin(torch.cat(xs).double()).square().mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), max_norm or math.inf)
        torchs.step()
        torchs.zero_grad()
        assert inside or float(opt.grad_norm) == pytest.approx(float(norm), rel=1e-4)
        for p, q in zip(model.parameters(), twin.parameters()):
            for name, rtol in (("exp_avg", 1e-3), ("exp_avg_sq", 2e-3)):
                want = torchs.state[q][name]
                torch.testing.assert_close(
                    opt.state[p][name].double(), want, rtol=rtol, atol=1e-4 * float(want.abs().max())
                )
            q.data.copy_(p.detach())  # each window is judged alone


@pytest.mark.parametrize("mode", ["in backward", "direct"])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_change_of_scale_in_mid_window_is_refused(make, device, mode, weighted):
    """By the scaler, which has looked for no inf yet; the window goes on with the one scale."""
    models = [net(device)]
    models.append(copy.deepcopy(models[0]))
    opts = make(models[0].parameters(), **LARGE), torch.optim.AdamW(models[1].parameters(), **LARGE)
    opts[0].accumulate_in_backward() if mode == "in backward" else opts[0].direct_wgrad(models[0])
    scalers = [torch.amp.GradScaler(device, init_scale=2.0**8, growth_interval=1) for _ in range(2)]
    for _ in range(3):
        for k in range(2):
            x = values((5, 4), device=device, spread=False)
            losses = [model(x).square().mean() for model in models]
            ours = opts[0].scale_loss(losses[0], weight=5) if weighted else losses[0] / 2
            for scaler, loss in zip(scalers, (ours, losses[1] / 2)):
                scaler.scale(loss).backward()
            if k == 0:
                with pytest.raises(AssertionError, match="No inf checks were recorded prior to update"):
                    scalers[0].update()
        for scaler, opt in zip(scalers, opts):
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        assert_close(*models, *opts)
    assert scalers[0].get_scale() == 2.0**11


@pytest.mark.parametrize("mode", ["in backward", "direct"])
@pytest.mark.parametrize("clips", [False, True])
def test_unscaling_in_mid_window_is_refused(make, device, mode, clips):
    """torch adds scaled gradients to unscaled ones in silence. Other edits of p.grad between backwards are right. The
    scaler is known from its first step on."""
    model = net(device)
    opt = make(model.parameters(), **LARGE)
    opt.accumulate_in_backward() if mode == "in backward" else opt.direct_wgrad(model)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**8)

    def backward():
        scaler.scale(model(values((5, 4), device=device, spread=False)).square().mean()).backward()

    for _ in range(2):  # what is allowed
        backward()
        for p in model.parameters():
            p.grad.mul_(0.5)
        backward()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(opt)
        scaler.update()
    before = str([opt.state_dict(), list(model.parameters())])
    backward()
    scaler.unscale_(opt)
    if clips:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    for words in ("unscale_.. was called between two backwards", "did not finish"):
        with pytest.raises(RuntimeError, match=rf"{words}.*zero_grad\(\)"):
            backward()
    with pytest.raises(RuntimeError, match="did not finish"):
        opt.step()
    opt.zero_grad()
    scaler.update()
    assert str([opt.state_dict(), list(model.parameters())]) == before
    backward()
    scaler.step(opt)
    assert float(opt.state[next(model.parameters())]["step"]) == 3
