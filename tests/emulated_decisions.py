"""What is skipped, decided on the device alone: the results of backend "cpu", and nothing is read by the host.

Run by test_cuda_emulated.py on the emulated backend "cuda", and by test_triton.py in Triton's interpreter."""

import copy
import pickle
import warnings
from contextlib import nullcontext

import cuda_emulated
import pytest
import torch
from harness import copies, mid_window_state, params_of, values
from never_read import decide_there, nothing_read
from oracle import same_bits

from fused_accum import FusedAccumAdamW, window

NAME = "triton" if cuda_emulated.EMULATION is None else "cuda"
LARGE = {"lr": 0.3, "weight_decay": 0.2}
SHAPES = [(65,), (13, 79), (3,), (0,)]
SPOILS = [float("nan"), float("inf"), float("-inf")]
# Micro-batches of a window that are spoiled, and parameters that are in these alone.
WINDOWS = [
    (3, {0}, {1: {0}}), (3, {1}, {1: {1}, 2: {0, 2}}), (3, {2}, {1: {2}, 3: {0}}), (3, {0, 1}, {0: {0}, 1: {0, 1}}),
    (3, {0, 2}, {2: {0}, 3: {0, 2}}), (3, {1, 2}, {1: {1, 2}}), (3, {0, 1, 2}, {2: {1}}), (1, {0}, {2: set()}),
    (1, set(), {}), (2, set(), {1: {0}}),
]  # fmt: skip

pytestmark = pytest.mark.filterwarnings(
    "ignore:the scales of this window", "ignore:the weights of this window", "ignore:skip_nonfinite='microbatch' rej"
)


@pytest.fixture(autouse=True)
def _steps_on_device():
    if cuda_emulated.EMULATION is None:
        yield
        return
    cuda_emulated.EMULATION.steps_on_device(True)
    yield
    cuda_emulated.EMULATION.reset()


@pytest.fixture
def guard(monkeypatch):
    """A context in which nothing may be read."""
    decide_there(monkeypatch)
    return nothing_read(monkeypatch)


def both(dtype, **options):
    """The same optimizer on backend "cpu" and on the one under test."""
    start = [torch.nn.Parameter(values(shape, dtype)) for shape in SHAPES]
    return [FusedAccumAdamW(copies(start), backend=name, **LARGE, **options) for name in ("cpu", NAME)]


def give(opts, k, only, spoiled, n=0):
    """Micro-batch ``k``: the same gradients for both, in ``only`` some parameters, one of which is spoiled."""
    for i, shape in enumerate(SHAPES):
        g = values(shape, params_of(opts[0])[i].dtype)
        if spoiled and i == (1 if k in only.get(1, {k}) else 0) and g.numel():
            g.view(-1)[-1] = SPOILS[(k + n) % 3]
        for opt in opts:
            params_of(opt)[i].grad = g.clone() if k in only.get(i, {k}) else None


def assert_same(cpu, gpu, exact=True):
    for i, (p, q) in enumerate(zip(params_of(cpu), params_of(gpu))):
        own, other = cpu.state.get(p, {}), gpu.state.get(q, {})
        if not own:  # never updated: the device has begun its state
            assert all(not value.any() for name, value in other.items() if name != "master"), i
            other = {}
        assert own.keys() == other.keys()
        for name, a, b in [("parameter", p, q), *((name, value, other[name]) for name, value in own.items())]:
            if exact or name == "step":
                assert same_bits(a, b), (i, name)
            else:
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)


def assert_buffers_are_zero(opt):
    for bucket in opt._run.buckets(opt.param_groups):
        assert not any(bucket.present)
        assert bucket.counts is None
        clean = [accum for accum, stale in zip(bucket.accums, bucket.stale) if accum is not None and not stale]
        assert not any(accum.any() for accum in clean)


KINDS = {
    "fp32": (torch.float32, {}),
    "fp64": (torch.float64, {}),
    "bf16, chance": (torch.bfloat16, {"stochastic_rounding": True, "amsgrad": True}),
    "masters, clip": (torch.bfloat16, {"master_weights": "fp32", "max_grad_norm": 0.3}),
    "split, bf16 buffer": (torch.bfloat16, {"master_weights": "split", "accum_dtype": torch.bfloat16}),
    "clip": (torch.float32, {"max_grad_norm": 0.3}),
}


WAYS = [("fp32", "no"), ("fp64", "device"), ("bf16, chance", "host"), ("masters, clip", "no")]
if NAME != "triton":  # whose interpreter is slow
    WAYS += [("fp32", "host"), ("split, bf16 buffer", "device"), ("clip", "device")]


@pytest.mark.parametrize(("kind", "weighted"), WAYS)
def test_rejected_micro_batches(guard, monkeypatch, kind, weighted):
    """First, middle, last and all; of parameters that are in others too, and of those that are not."""
    dtype, options = KINDS[kind]
    monkeypatch.setattr(window, "on_device", lambda value: isinstance(value, torch.Tensor))
    cpu, gpu = both(dtype, skip_nonfinite="microbatch", **options)
    for n, (count, spoiled, only) in enumerate(WINDOWS):
        for k in range(count):
            give((cpu, gpu), k, only, k in spoiled, n)
            last = k + 1 == count and n % 2 == 0  # else all are accumulated
            for opt in (cpu, gpu):
                weight = None if weighted == "no" else 3.0 + k
                if weighted == "device" and opt is gpu:
                    weight = torch.tensor(weight, dtype=torch.float64)
                with nullcontext() if opt is cpu else guard():
                    (opt.step if last else opt.accumulate)(scale=0.25, weight=weight)
        if n % 2:
            cpu.step()
            with guard():
                gpu.step()
        assert_same(cpu, gpu, exact="max_grad_norm" not in options)
        assert_buffers_are_zero(gpu)
        if n % 3 == 0:  # else the next window is judged while this has not been read
            assert cpu.skipped_microbatches == gpu.skipped_microbatches
            assert cpu.nonfinite_parameter == gpu.nonfinite_parameter
            if "max_grad_norm" in options and len(spoiled) < count:
                torch.testing.assert_close(cpu.grad_norm, gpu.grad_norm, rtol=1e-6, atol=0)
    assert cpu.skipped_microbatches == gpu.skipped_microbatches == sum(len(spoiled) for _, spoiled, _ in WINDOWS)
    assert cpu.skipped_steps == gpu.skipped_steps == 0


@pytest.mark.parametrize("weight", [None, 3.0])
def test_what_is_pending_is_what_was_not_rejected(guard, weight):
    """The one time that the host asks; the window goes on, also in a copy and from a checkpoint."""
    opts = both(torch.float32, skip_nonfinite="microbatch")
    cpu, gpu = opts
    give(opts, 1, {}, False)
    for opt in opts:
        opt.step()
    for k, (spoiled, only) in enumerate([(True, {}), (False, {1: set()}), (True, {2: set()})]):
        give(opts, k, only, spoiled)
        for opt in opts:
            opt.accumulate(weight=weight)
        if k == 0:
            assert gpu.pending == cpu.pending == (0, 0.0)
    assert gpu.pending == cpu.pending
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = both(torch.float32, skip_nonfinite="microbatch")[1]
        for p, q in zip(params_of(loaded), params_of(gpu)):
            p.data.copy_(q)
        loaded.load_state_dict(copy.deepcopy(gpu.state_dict()))
        copied = pickle.loads(pickle.dumps(gpu))
    saved, expected = mid_window_state(gpu), mid_window_state(cpu)
    assert [e.keys() for e in saved["state"].values()] == [e.keys() for e in expected["state"].values()]
    assert copied.skipped_microbatches == gpu.skipped_microbatches == 2
    ends = [cpu, gpu, loaded, copied]
    give(ends, 1, {3: set()}, True)
    for opt in ends:
        opt.accumulate(weight=weight)
    give(ends, 1, {3: set()}, False)
    for opt in ends:
        opt.step(weight=weight)
        assert_same(cpu, opt)


@pytest.mark.parametrize("clip", [None, 0.3])
def test_parameters_whose_only_weights_are_zero_are_not_updated(guard, monkeypatch, clip):
    """Weights in device memory; NaN where they are 0."""
    monkeypatch.setattr(window, "on_device", lambda value: isinstance(value, torch.Tensor))
    cpu, gpu = both(torch.float32, max_grad_norm=clip)
    plan = [([0, 2], {1: {0}}), ([4, 0, 1], {1: {1}, 0: {1, 2}}), ([1, 0], {1: {1}}), ([0, 0], {}), ([0], {})]
    for n, (weights, only) in enumerate([*plan, ([2], {})]):
        for k, weight in enumerate(weights):
            give((cpu, gpu), k, only, weight == 0, n)
            for opt in (cpu, gpu):
                given = weight if opt is cpu else torch.tensor(float(weight), dtype=torch.float64)
                with nullcontext() if opt is cpu else guard():
                    (opt.step if k + 1 == len(weights) else opt.accumulate)(weight=given)
        assert_same(cpu, gpu, exact=clip is None)
        assert_buffers_are_zero(gpu)


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.3}, {"skip_nonfinite": "step"}], ids=str)
def test_a_scaler_and_weights_together(guard, monkeypatch, options):
    """grad_scale, found_inf, weights in backward, clipping, skipping: one factor on the device."""
    monkeypatch.setattr(window, "on_device", lambda value: isinstance(value, torch.Tensor))
    opts = both(torch.float32, fused=True, **options)
    cpu, gpu = opts
    for opt in opts:
        opt.accumulate_in_backward()
    for scale, inf in [(1024.0, 0.0), (8.0, 1.0), (0.5, 0.0)]:
        targets = [[values(shape) for shape in SHAPES] for _ in range(2)]
        for opt in opts:
            for k, target in enumerate(targets):
                loss = scale * sum(((p - t) ** 2).sum() for p, t in zip(params_of(opt), target))
                weight = 2.0 + k
                if opt is gpu:
                    weight = torch.tensor(weight, dtype=torch.float64)
                opt.scale_loss(loss, weight=weight).backward()
            opt.grad_scale, opt.found_inf = torch.tensor(scale), torch.tensor(inf)
            with nullcontext() if opt is cpu else guard():
                opt.step()
            del opt.grad_scale, opt.found_inf
        assert_same(cpu, gpu, exact=not options)
    assert cpu.skipped_steps == gpu.skipped_steps == 0
    assert float(gpu.state[params_of(gpu)[0]]["step"]) == 2


def test_a_skipped_step_is_remembered(guard):
    """Until the next one is skipped; norms of any step may be read in between."""
    opts = both(torch.float32, skip_nonfinite="step")
    for n, spoiled in enumerate([False, True, False, False, True]):
        give(opts, n, {}, spoiled)
        for opt in opts:
            with nullcontext() if opt is opts[0] else guard():
                opt.step()
        if n == 3:
            assert [opt.nonfinite_parameter for opt in opts] == ["param_groups[0]['params'][1]"] * 2
            assert [opt.skipped_steps for opt in opts] == [1, 1]
    assert [opt.skipped_steps for opt in opts] == [2, 2]
    assert_same(*opts)
