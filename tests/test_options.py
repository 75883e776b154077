"""Refused options and arguments: constructor, scale, weight."""

import copy
import math
import subprocess
import sys

import pytest
import torch
from harness import assert_names, assert_unchanged, open_window, parameters, params_of, snapshot
from oracle import same_bits

from fused_accum import FusedAccumAdamW, backends

pytestmark = pytest.mark.filterwarnings("error")


# ---- constructor -----------------------------------------------------------------------------------------

CONSTRUCTOR = {
    # options, error, what the message must hold
    "accum-fp16": ({"accum_dtype": torch.float16}, ValueError, ["accum_dtype", "float16", "float32", "bfloat16"]),
    "accum-int": ({"accum_dtype": torch.int32}, ValueError, ["accum_dtype", "int32", "float32"]),
    "accum-none": ({"accum_dtype": None}, ValueError, ["accum_dtype", "None", "float32"]),
    "state-int": ({"state_dtype": torch.int8}, ValueError, ["state_dtype", "int8", "float32"]),
    "state-text": ({"state_dtype": "fp32"}, ValueError, ["state_dtype", "fp32", "float32"]),
    "clip-0": ({"max_grad_norm": 0.0}, ValueError, ["max_grad_norm", "0.0", "above 0"]),
    "clip-negative": ({"max_grad_norm": -1}, ValueError, ["max_grad_norm", "-1"]),
    "clip-inf": ({"max_grad_norm": math.inf}, ValueError, ["max_grad_norm", "inf", "finite"]),
    "clip-nan": ({"max_grad_norm": math.nan}, ValueError, ["max_grad_norm", "nan"]),
    "clip-text": ({"max_grad_norm": "all"}, ValueError, ["max_grad_norm", "all"]),
    "skip": ({"skip_nonfinite": True}, ValueError, ["skip_nonfinite", "True", "step", "microbatch"]),
    "differentiable": ({"differentiable": True}, ValueError, ["differentiable", "torch.optim.AdamW"]),
    "backend": ({"backend": "fastest"}, ValueError, ["backend", "fastest", "auto", "reference"]),
    "foreach-fused": ({"foreach": True, "fused": True}, RuntimeError, ["fused", "foreach"]),
    "lr": ({"lr": -1.0}, ValueError, ["learning rate", "-1.0"]),
    "betas": ({"betas": (1.0, 0.5)}, ValueError, ["beta", "1.0"]),
    "eps": ({"eps": -1.0}, ValueError, ["epsilon", "-1.0"]),
    "weight-decay": ({"weight_decay": -1.0}, ValueError, ["weight_decay", "-1.0"]),
}


@pytest.mark.parametrize(("options", "error", "words"), CONSTRUCTOR.values(), ids=CONSTRUCTOR)
def test_constructor_refuses(options, error, words):
    with pytest.raises(error) as caught:
        FusedAccumAdamW(parameters((3,)), **options)
    assert_names(caught.value, words)


@pytest.mark.parametrize("options", [{}, {"lr": -1.0}, {"eps": -1.0}, {"betas": (-0.1, 0.5)}], ids=str)
@pytest.mark.parametrize(
    "params",
    [[], [torch.zeros(3)], "text", [torch.zeros(3).requires_grad_() * 2], torch.zeros(3)],
    ids=["empty", "plain", "text", "not-a-leaf", "bare-tensor"],
)
def test_constructor_agrees_with_torch(params, options):
    """What torch.optim.AdamW refuses is refused with its error, what it takes is taken."""

    def outcome(cls):
        try:
            cls(copy.copy(params), **options)
        except Exception as error:
            return type(error), str(error)
        return None

    assert outcome(FusedAccumAdamW) == outcome(torch.optim.AdamW)


def test_backend_that_does_not_work_here_is_refused_with_its_reason():
    for name in backends.registry():
        reason = backends.registry()[name].why_not(torch.device("cpu"))
        if reason is None:
            assert backends.select(name, torch.device("cpu")).name == name
            continue
        with pytest.raises(RuntimeError) as caught:
            backends.select(name, torch.device("cpu"))
        assert reason in str(caught.value)
        opt = FusedAccumAdamW(parameters((3,)), backend=name)
        params_of(opt)[0].grad = torch.ones(3)
        with pytest.raises(RuntimeError, match=name):
            opt.step()


def test_unknown_backend():
    with pytest.raises((ValueError, RuntimeError)) as caught:
        backends.select("fastest", torch.device("cpu"))
    assert_names(caught.value, ["fastest", "reference"])


# ---- scale and weight ------------------------------------------------------------------------------------

NUMBERS = {
    "negative": (-0.5, ValueError, ["-0.5", "negative"]),
    "nan": (math.nan, ValueError, ["nan", "finite"]),
    "inf": (math.inf, ValueError, ["inf", "finite"]),
    "negative-inf": (-math.inf, ValueError, ["inf", "finite"]),
    "text": ("1.0", TypeError, ["1.0", "number"]),
    "list": ([1.0], TypeError, ["1.0", "number"]),
    "complex": (1j, TypeError, ["1j", "number"]),
    "vector": (torch.ones(2), ValueError, ["(2,)", "0-dim"]),
    "one-element": (torch.ones(1), ValueError, ["(1,)", "0-dim"]),
    "negative-tensor": (torch.tensor(-2.0), ValueError, ["-2", "negative"]),
    "nan-tensor": (torch.tensor(math.nan), ValueError, ["nan", "finite"]),
}


@pytest.mark.parametrize("call", ["accumulate", "step"])
@pytest.mark.parametrize("argument", ["scale", "weight"])
@pytest.mark.parametrize(("value", "error", "words"), NUMBERS.values(), ids=NUMBERS)
def test_scale_and_weight_out_of_range(make, device, value, error, words, argument, call):
    opt = open_window(make, device, weight=2.0 if argument == "weight" else None)
    before = snapshot(opt)
    with pytest.raises(error) as caught:
        getattr(opt, call)(**{argument: value})
    assert_names(caught.value, [argument, *words])
    assert_unchanged(before, snapshot(opt))
    assert_usable(opt, weight=2.0 if argument == "weight" else None)


def assert_usable(opt, weight=None):
    before = [p.detach().clone() for p in params_of(opt)]
    opt.step(scale=0.5, weight=weight)
    assert all(not same_bits(p, x) and p.isfinite().all() for p, x in zip(params_of(opt), before))
    assert opt.pending == (0, 0.0)


# ---- without the native extension ------------------------------------------------------------------------

WITHOUT_NATIVE = """
import sys, warnings
sys.modules["fused_accum._C"] = None  # what an installation without a compiler looks like
import torch
from fused_accum import FusedAccumAdamW

with warnings.catch_warnings(record=True) as record:
    warnings.simplefilter("always")
    for _ in range(2):
        p = torch.nn.Parameter(torch.ones(3))
        opt = FusedAccumAdamW([p], lr=0.1)
        for call in (opt.accumulate, opt.step):
            p.grad = torch.ones(3)
            call(scale=0.5)
(row,) = opt.backends
print(row.backend, p.tolist())
print(row.reason)
print([str(w.message) for w in record])
p = torch.nn.Parameter(torch.ones(3))
p.grad = torch.ones(3)
try:
    FusedAccumAdamW([p], backend="cpu").step()
except RuntimeError as error:
    print(error)
"""


def test_without_the_native_extension_the_first_use_says_what_is_missing():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_NATIVE], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    result, reason, warned, refused = done.stdout.splitlines()
    assert result.startswith("reference [0.89")
    assert len(eval(warned)) == 1, "one warning in a process"
    for text in (reason, warned, refused):
        assert_names(text, ["g++", "install"])
