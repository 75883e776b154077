"""What a step of backend "cuda" reads on the device, where the host never looks: lr, a GradScaler's factors. And what
torch's allocator is told of gradients from other streams. Run by test_cuda_emulated.py."""

import never_read
import pytest
import torch
from harness import copies, params_of, values
from oracle import same_bits
from torch import Tensor

from fused_accum import FusedAccumAdamW, norms, window
from fused_accum.backends import cuda

SHAPES = [(65,), (), (0,), (13, 17), (5000,)]


@pytest.fixture(autouse=True)
def _steps_on_device(emulation):
    emulation.steps_on_device(True)


class NeverRead(Tensor):
    """A tensor whose value the host must not ask for, as if that were a wait for the GPU."""

    item = tolist = __bool__ = __float__ = never_read.read


def on_device(value, dtype=torch.float32):
    return torch.tensor(value, dtype=dtype).as_subclass(NeverRead)


def make(dtype=torch.float32, **options):
    """The same optimizer on backends "cpu" and "cuda"."""
    params = [torch.nn.Parameter(values(shape, dtype)) for shape in SHAPES]
    return [FusedAccumAdamW(copies(params), backend=name, **options) for name in ("cpu", "cuda")]


def give(opts, dtype=torch.float32):
    gradients = [values(shape, dtype) for shape in SHAPES]
    for opt in opts:
        for p, g in zip(params_of(opt), gradients):
            p.grad = g.clone()


def assert_same(cpu, gpu):
    for p, q in zip(params_of(cpu), params_of(gpu)):
        assert same_bits(p, q)
        assert cpu.state[p].keys() == gpu.state[q].keys()
        for name, value in cpu.state[p].items():
            assert same_bits(value, gpu.state[q][name]), name


def end_window(opt, factors=None, before=lambda: None):
    """What step() does, with something between the reading of the hyper-parameters and the launch of the kernels."""
    (bucket,), _ = opt._run.collect(opt.param_groups, buffers=False)
    hypers = cuda.Hyper.of_all(opt.param_groups)
    bucket.prepare(opt.state, opt.param_groups, hypers)
    before()
    bucket.step(opt.state, hypers, 1.0, 1.0, factors)
    bucket.release()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lr_is_read_when_the_kernels_run(dtype):
    """As a replay of a captured step does."""
    cpu, gpu = make(lr=0.5, weight_decay=0.1)
    lr = torch.tensor(0.5, dtype=dtype)
    gpu.param_groups[0].update(lr=lr, capturable=True)
    for rate in (0.25, 0.125, 0.7):
        give((cpu, gpu))
        cpu.param_groups[0]["lr"] = float(torch.tensor(rate, dtype=dtype))
        cpu.step()
        end_window(gpu, before=lambda: lr.fill_(rate))  # noqa: B023
    assert_same(cpu, gpu)


def test_steps_are_counted_when_the_kernels_run():
    cpu, gpu = make(lr=0.5)
    for _ in range(3):
        give((cpu, gpu))
        cpu.step()
        gpu.step()
    give((cpu, gpu))
    for p in params_of(cpu):
        cpu.state[p]["step"].fill_(40)
    cpu.step()
    end_window(gpu, before=lambda: [gpu.state[p]["step"].fill_(40) for p in params_of(gpu)])
    assert_same(cpu, gpu)


@pytest.mark.parametrize("scaled", [True, False], ids=["grad_scale", "unscaled-before"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_scalers_factors_are_never_read_by_the_host(dtype, scaled):
    cpu, gpu = make(dtype, lr=0.5, weight_decay=0.1, fused=True)
    for scale, inf in ((1024.0, 0.0), (3.0, 0.0), (512.0, 1.0), (0.1, 0.0)):
        give((cpu, gpu), dtype)
        before = [p.detach().clone() for p in params_of(gpu)]
        for opt, kind in ((cpu, torch.tensor), (gpu, on_device)):
            opt.grad_scale, opt.found_inf = kind(scale) if scaled else None, kind(inf)
            opt.step()
            del opt.grad_scale, opt.found_inf
        assert all(p.grad is None for p in params_of(gpu))
        assert all(same_bits(p, b) for p, b in zip(params_of(gpu), before) if p.numel()) == bool(inf)
    assert_same(cpu, gpu)
    assert float(gpu.state[params_of(gpu)[0]]["step"]) == 3


@pytest.fixture
def nothing_read(monkeypatch):
    """Makes norms stay on the device, as on a GPU, and values unreadable while ``with nothing_read():`` lasts."""
    never_read.decide_there(monkeypatch)
    return never_read.nothing_read(monkeypatch)


@pytest.mark.parametrize("kept", [{}, {"master_weights": "fp32"}, {"stochastic_rounding": True}], ids=str)
@pytest.mark.parametrize("count", [1, 3])
def test_clipping_and_skipping_wait_for_nothing(nothing_read, count, kept):
    """And of one parameter, whose norm no order of sums changes, the clipped update has the CPU's bits."""
    dtype = torch.bfloat16 if kept else torch.float32
    start = torch.nn.Parameter(values((5000,), dtype))
    options = {"max_grad_norm": 0.3, "skip_nonfinite": "step", "lr": 0.5, "weight_decay": 0.1, **kept}
    cpu, gpu = (FusedAccumAdamW(copies([start]), backend=name, **options) for name in ("cpu", "cuda"))
    for n in range(4):
        for k in range(count):
            g = values((5000,), dtype)
            if (n, k) == (2, 0):
                g[77] = float("inf")
            for opt in (cpu, gpu):
                params_of(opt)[0].grad = g.clone()
                call = opt.step if k + 1 == count else opt.accumulate
                if opt is gpu and n:  # the first window makes the state
                    with nothing_read():
                        call(scale=0.5)
                else:
                    call(scale=0.5)
    assert_same(cpu, gpu)
    assert cpu.skipped_steps == gpu.skipped_steps == 1
    assert same_bits(cpu.grad_norm, gpu.grad_norm)


PLANS = {  # of windows: (scale, weight) of their micro-batches; NaN where the factor is 0
    "scales": [[(0.5, None), (0.25, None)], [(0.3, None)], [(0.5, None), (0.0, None), (0.1, None)]],
    "weights": [[(1.0, 3), (0.5, 7), (1.0, 0)], [(1.0, 0), (1.0, 5)], [(1.0, 2)], [(0.7, 3), (1.0, 0), (1.0, 5)]],
    "nothing": [[(1.0, 2)], [(1.0, 0), (1.0, 0)], [(1.0, 0)], [(1.0, 4), (1.0, 1)]],
}


@pytest.mark.filterwarnings("ignore:the scales of this window", "ignore:the weights of this window")
@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_scales_and_weights_on_the_device(nothing_read, monkeypatch, plan, dtype, clip):
    """The bits of the same numbers on the host: also where a factor, or a whole window's weight, is 0."""
    monkeypatch.setattr(window, "on_device", lambda value: isinstance(value, NeverRead))
    layout = values((9, 8), dtype).t()  # and a row that is not in line
    start = [torch.nn.Parameter(layout if clip is None else values((5000,), dtype))]
    start += [torch.nn.Parameter(values((65,), dtype)) for _ in range(2 if clip is None else 0)]
    options = {"lr": 0.5, "weight_decay": 0.1, "max_grad_norm": clip}
    cpu, gpu = (FusedAccumAdamW(copies(start), backend=name, **options) for name in ("cpu", "cuda"))
    for n, micros in enumerate(plan):
        for k, (scale, weight) in enumerate(micros):
            spoil = float("nan") if 0 in (scale, weight) else 1.0
            grads = [values(tuple(p.shape), dtype) * spoil for p in start]
            if n and clip is None:
                grads[0] = values((8, 18), dtype)[:, ::2] * spoil
            for opt, number in ((cpu, float), (gpu, lambda number: on_device(number, torch.float64))):
                for p, g in zip(params_of(opt), grads):
                    p.grad = g.clone(memory_format=torch.preserve_format)
                call = opt.step if k + 1 == len(micros) else opt.accumulate
                factors = {"scale": number(scale), "weight": None if weight is None else number(weight)}
                if opt is gpu and n:
                    with nothing_read():
                        call(**factors)
                else:
                    call(**factors)
            assert cpu._run.window.microbatches == gpu._run.window.microbatches
        if clip is not None and any(weight != 0 for _, weight in micros):
            assert same_bits(cpu.grad_norm, gpu.grad_norm)
    assert_same(cpu, gpu)


def test_scales_are_checked_for_their_shape(monkeypatch):
    monkeypatch.setattr(window, "on_device", lambda value: isinstance(value, NeverRead))
    _, gpu = make()
    with pytest.raises(ValueError, match=r"weight is a tensor of shape \(2,\)"):
        gpu.accumulate(weight=on_device([1.0, 2.0]))


def test_a_dropped_window_leaves_its_buffers_zero():
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        _, gpu = make(dtype, lr=0.5)
        params = params_of(gpu)
        params[3].data = params[3].data.t().contiguous().t()[::2]  # rows that are not in line
        for p in params:
            p.grad = values(p.shape, dtype)
        gpu.accumulate()
        held = [buffer for _, buffer in gpu._run.contributions()]
        before = [p.detach().clone() for p in params]
        end_window(gpu, factors=norms.Factors(None, torch.ones(())))
        assert len(held) == len(SHAPES)
        assert all(same_bits(buffer, torch.zeros_like(buffer)) for buffer in held)
        assert all(same_bits(p, b) for p, b in zip(params, before))
        assert all(float(gpu.state[p]["step"]) == 0 for p in params)


def test_the_allocator_is_told_of_every_consumed_gradient(monkeypatch):
    """And of the stream that the kernels went to. (Reported case 32.)"""

    class Stream:
        cuda_stream = 0

    told = []
    monkeypatch.setattr(cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(Tensor, "record_stream", lambda t, s: told.append((t.data_ptr(), s)), raising=False)
    _, gpu = make(lr=0.5)
    for call in (gpu.accumulate, gpu.step):
        stream = Stream()
        give([gpu])
        gradients = [p.grad.data_ptr() for p in params_of(gpu)]
        slots = [bucket.slots.data_ptr() for bucket in gpu._run.buckets(gpu.param_groups) if bucket.slots is not None]
        told.clear()
        call()
        assert all(s is stream for _, s in told)
        assert [place for place, _ in told if place not in slots][-len(gradients):] == gradients
