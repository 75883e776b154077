"""What the tests of master weights share: runs beside the same run in fp32, and the fixture that makes them."""

import copy

import pytest
import torch
from cases import WINDOWS
from harness import micro_batches, params_of, run_window
from oracle import same_bits

from fused_accum import FusedAccumAdamW, backends
from fused_accum.backends import rounding

KINDS = {"bf16-fp32": (torch.bfloat16, "fp32"), "fp16-fp32": (torch.float16, "fp32"),
         "bf16-split": (torch.bfloat16, "split")}  # fmt: skip
every_kind = pytest.mark.parametrize(("dtype", "master"), KINDS.values(), ids=KINDS)
SHAPES = ((0,), (), (1,), (65,), (13, 17), (1025,))


@pytest.fixture(name="make")
def make_fixture(on):
    """FusedAccumAdamW on the backend under test; skips those that refuse master weights."""
    if not backends.registry()[on[0]].keeps_weights:
        pytest.skip(f"{on[0]} refuses master weights")
    if on[1] != "cpu":
        pytest.skip("these are CPU tensors; test_bits.py compares a GPU's with them")
    return lambda params, **options: FusedAccumAdamW(params, backend=on[0], **options)


def masters(opt):
    """The float32 master of every parameter."""
    found = []
    for p in params_of(opt):
        kept = opt.state[p]["master"]
        found.append(rounding.joined(p.detach(), kept) if kept.dtype == torch.int16 else kept)
    return found


def rounds_to(master, dtype, kind):
    return rounding.split(master)[0] if kind == "split" else master.to(dtype)


def twin_in_fp32(make, params, **options):
    """The same optimizer on float32 copies: what the masters must be, bit for bit."""
    return make([torch.nn.Parameter(p.detach().float()) for p in params], **options)


def run_both(opt, twin, windows=("uneven", "N=1", "mean-of-4"), layout=None, grad_dtype=None):
    for name in windows:
        micros = micro_batches(params_of(opt), WINDOWS[name], dtype=grad_dtype, layout=layout)
        copy_of = copy.deepcopy(micros)
        for micro in copy_of:
            micro.grads = [g.float() for g in micro.grads]
        run_window(opt, micros)
        run_window(twin, copy_of)


def check(opt, twin, kind):
    for p, q, master in zip(params_of(opt), params_of(twin), masters(opt)):
        assert same_bits(master, q)
        assert same_bits(p, rounds_to(master, p.dtype, kind))
        for name in opt.state[p].keys() - {"master"}:
            assert same_bits(opt.state[p][name], twin.state[q][name]), name
