"""The float64 oracle itself: torch's own AdamW is within its bounds, wrong equations are not."""

import pytest
import torch
from cases import DTYPES, HYPER
from harness import parameters, values
from oracle import Micro, Oracle

N = 4096


@pytest.mark.parametrize("hyper", HYPER.values(), ids=HYPER)
@pytest.mark.parametrize(
    ("dtype", "options"),
    [("fp64", {"foreach": False}), ("fp64", {"fused": True}), ("fp32", {"foreach": True}),
     ("fp32", {"fused": True}), ("bf16", {"fused": True})],
    ids=["fp64-loop", "fp64-fused", "fp32-foreach", "fp32-fused", "bf16-fused"],
)  # fmt: skip
def test_torch_is_within_the_bounds(hyper, dtype, options):
    (p,) = parameters((N,), dtype=DTYPES[dtype])
    opt = torch.optim.AdamW([p], **hyper, **options)
    oracle = Oracle(opt, state_dtype=None)
    for _ in range(5):
        p.grad = values((N,), p.dtype)
        oracle.window([Micro([p.grad])])
        opt.step()
        oracle.check()


def _decay_after_update(opt, p, group):
    group["weight_decay"], decay = 0.0, group["weight_decay"]
    opt.step()
    p.data.mul_(1 - group["lr"] * decay)
    group["weight_decay"] = decay


def _eps_inside_the_root(opt, p, group):
    group["eps"], eps = group["eps"] * (1 + 1e-4), group["eps"]
    opt.step()
    group["eps"] = eps


def _shared_step(opt, p, group):
    opt.step()
    opt.state[p]["step"] += 1


def _wrong_bias_correction(opt, p, group):
    if p in opt.state:
        opt.state[p]["step"] += 1
        opt.step()
        opt.state[p]["step"] -= 1
    else:
        opt.step()


def _lr_in_bf16(opt, p, group):
    group["lr"], lr = torch.tensor(group["lr"]).bfloat16().item(), group["lr"]
    opt.step()
    group["lr"] = lr


def _sum_for_mean(opt, p, group):
    p.grad = p.grad * 2
    opt.step()


def _grad_in_bf16(opt, p, group):
    p.grad = p.grad.bfloat16().float()
    opt.step()


def _update_in_bf16(opt, p, group):
    before = p.detach().clone()
    opt.step()
    p.data.copy_(before + (p.detach() - before).bfloat16())


MUTANTS = [
    _decay_after_update, _eps_inside_the_root, _shared_step, _wrong_bias_correction, _lr_in_bf16, _sum_for_mean,
    _grad_in_bf16, _update_in_bf16,
]  # fmt: skip


def run_mutant(mutant):
    (p,) = parameters((N,))
    opt = torch.optim.AdamW([p], lr=0.3, weight_decay=0.3, eps=1e-3, fused=True)
    oracle = Oracle(opt)
    for _ in range(3):
        p.grad = values((N,))
        oracle.window([Micro([p.grad])])
        mutant(opt, p, opt.param_groups[0])
        oracle.check()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda f: f.__name__)
def test_a_wrong_equation_is_caught(mutant):
    run_mutant(lambda opt, p, group: opt.step())
    with pytest.raises(AssertionError, match=r"beyond their bound|step"):
        run_mutant(mutant)


def test_accum_of_a_bf16_buffer_is_told_from_an_fp32_one():
    (p,) = parameters((N,))
    oracle = Oracle(torch.optim.AdamW([p]))
    micros = [Micro([values((N,))]) for _ in range(3)]
    (expected,) = oracle.accum(micros)
    exact = sum(m.grads[0].double() for m in micros)
    rounded = sum(m.grads[0].double() for m in micros).bfloat16().double()
    assert ((exact - expected.value).abs() <= expected.bound).all()
    assert ((rounded - expected.value).abs() > expected.bound).any()
