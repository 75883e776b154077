"""What a step of backend "cuda" reads on the device, where the host never looks: lr, a GradScaler's factors. And what
torch's allocator is told of gradients from other streams. Run by test_cuda_scalars.py."""

import pytest
import torch
from harness import copies, params_of, values
from oracle import same_bits
from torch import Tensor

from fused_accum import FusedAccumAdamW
from fused_accum.backends import cuda

SHAPES = [(65,), (), (0,), (13, 17), (5000,)]


class NeverRead(Tensor):
    """A tensor whose value the host must not ask for, as if that were a wait for the GPU."""

    def __float__(self):
        raise AssertionError("the host has read a value that lives on the device")

    item = tolist = __bool__ = __float__


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


def end_window(opt, factors=(None, None), before=lambda: None):
    """What step() does, with something between the reading of the hyper-parameters and the launch of the kernels."""
    (bucket,), _ = opt._run.collect(opt.param_groups, buffers=False)
    hypers = [cuda.Hyper.of(group) for group in opt.param_groups]
    bucket.prepare(opt.state, opt.param_groups, hypers)
    before()
    bucket.factors = factors
    bucket.step(opt.state, hypers, 1.0, 1.0)
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
        end_window(gpu, factors=(None, torch.ones(())))
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
