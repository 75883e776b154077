"""What only a device shows: streams, CUDA graphs, scalars in device memory, more than 2^31 elements.

Those that need a GPU proper (the fixture "gpu") are skipped without one, and have not been run on one yet; the others
also run on the CUDA emulator (test_cuda_emulated.py).
"""

import math

import pytest
import torch
from conftest import KERNEL_PAIRS
from harness import copies, give, parameters, values
from oracle import same_bits

from fused_accum import FusedAccumAdamW

pytestmark = pytest.mark.parametrize("on", KERNEL_PAIRS)
LARGE = 2**31 + 4096


@pytest.fixture
def gpu(on):
    if on[1] != "cuda":
        pytest.skip("needs a GPU")
    return torch.device("cuda")


@pytest.fixture
def make(on):
    return lambda params, **options: FusedAccumAdamW(params, backend=on[0], **{"lr": 0.1, **options})


def run(opt, params, gradients):
    """One window: all of ``gradients`` but the last accumulated."""
    for k, grads in enumerate(gradients):
        for p, g in zip(params, grads):
            give(p, g)
        opt.step(scale=0.5) if k == len(gradients) - 1 else opt.accumulate(0.5)


def batches(params, count):
    return [[values(p.shape, p.dtype, p.device) for p in params] for _ in range(count)]


def assert_same(a, b):
    for p, q in zip(a, b, strict=True):
        assert same_bits(p, q)


def mixed(device):
    return [p for dtype in (torch.float32, torch.bfloat16, torch.float64)
            for p in parameters((5000,), (13, 17), dtype=dtype, device=device)]  # fmt: skip


def test_runs_of_the_same_gradients_are_equal(on, make):
    start = mixed(on[1])
    windows = [batches(start, 3) for _ in range(3)]
    first, second = copies(start), copies(start)
    for params in (first, second):
        opt = make(params, amsgrad=True)
        for window in windows:
            run(opt, params, window)
    assert_same(first, second)


def test_gradient_of_an_earlier_window_may_be_freed_and_its_memory_reused(on, make):
    """Reported case 25: pointers kept between calls must not be those of the gradients before."""
    params = parameters((4000,), (300,), device=on[1])
    expected = copies(params)
    windows = [batches(params, 2) for _ in range(6)]
    opt, reference = make(params), make(expected)
    for window in windows:
        run(opt, params, [[g.clone() for g in grads] for grads in window])
        kept = [torch.full_like(p, float("nan")) for p in params for _ in range(3)]  # takes what was freed
        run(reference, expected, window)
        del kept
    assert_same(params, expected)


# -- streams -------------------------------------------------------------------------------------------------------


def test_streams_backward_on_a_side_stream(on, make, gpu):
    """Reported case 32: forward and backward in a side stream, accumulate and step on the default one."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(512, 512, device=gpu)
    plain = torch.nn.Linear(512, 512, device=gpu)
    plain.load_state_dict(layer.state_dict())
    inputs = torch.randn(64, 512, device=gpu)
    side = torch.cuda.Stream()
    opt, reference = make(layer.parameters(), lr=1e-3), make(plain.parameters(), lr=1e-3)
    for k in range(200):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            layer(inputs).square().mean().backward()
        torch.cuda.current_stream().wait_stream(side)
        plain(inputs).square().mean().backward()
        torch.cuda.synchronize()
        for one in (opt, reference):
            one.step() if k % 4 == 3 else one.accumulate(0.25)
    assert_same(list(layer.parameters()), list(plain.parameters()))


def test_streams_all_work_goes_to_the_current_one(on, make, gpu):
    """While the default stream is busy, a window on another one finishes."""
    params = parameters((100_000,), device=gpu)
    expected = copies(params)
    opt, reference = make(params), make(expected)
    warm_up, window = batches(params, 3), batches(params, 3)
    for one, own in ((opt, params), (reference, expected)):
        run(one, own, warm_up)  # compiles and allocates, which may wait for the device
    run(reference, expected, window)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second
    with torch.cuda.stream(side):
        run(opt, params, window)
    side.synchronize()
    default_is_busy = not torch.cuda.default_stream().query()
    torch.cuda.synchronize()
    assert_same(params, expected)
    assert default_is_busy


def test_no_call_waits_for_the_device(on, make, gpu):
    params = parameters((5000,), (64, 64), device=gpu)
    opt = make(params)
    window = batches(params, 3)
    run(opt, params, window)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(opt, params, window)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_weights_on_the_device_are_not_waited_for(on, make, gpu):
    """In the modes where backward accumulates, from scale_loss() to step(). Not run on a GPU yet."""
    if on[0] != "cuda":
        pytest.skip("steps that need the sum of weights on the host")
    params = parameters((5000,), (64, 64), device=gpu)
    opt = make(params)
    opt.accumulate_in_backward()
    weights = [torch.full((), float(k), device=gpu) for k in (3, 5)]

    def run_window():
        for weight in weights:
            opt.scale_loss(sum((p * p).sum() for p in params), weight=weight).backward()
        opt.step()

    run_window()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run_window()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert float(opt.state[params[0]]["step"]) == 2


# -- more than 2^31 elements ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("way", ["gradient", "buffer"])
def test_more_than_2_to_the_31_elements(on, make, gpu, way):
    """Reported case 22: head, tail, the places where 32 bits wrap around, and no element left out."""
    p = torch.nn.Parameter(torch.ones(LARGE, dtype=torch.bfloat16, device=gpu))
    grad = torch.full_like(p, 0.5)
    places = [0, 2**30, 2**31 - 64, 2**31, LARGE - 64]
    slices = [torch.nn.Parameter(p.detach()[i : i + 64].clone()) for i in places]
    for at, part in zip(places, slices):
        part.grad = values((64,), torch.bfloat16, gpu)
        grad[at : at + 64] = part.grad
    big, small = make([p]), make(slices)
    p.grad = grad
    for opt in (big, small):
        if way == "buffer":
            opt.accumulate(0.5)
        opt.step()
    for at, part in zip(places, slices):
        assert same_bits(p.detach()[at : at + 64], part)
    for chunk in p.detach().split(2**28):
        assert bool((chunk != 1).all())


# -- CUDA graphs, scalars in device memory -------------------------------------------------------------------------


@pytest.mark.parametrize("microbatches", [1, 3])
def test_graph_capture_and_replay(on, make, gpu, microbatches):
    """A captured window replays with other gradients, another lr and a growing count of updates."""
    params = parameters((5000,), (13, 17), device=gpu)
    expected = copies(params)
    lr = torch.tensor(0.1, device=gpu)
    opt, eager = make(params, lr=lr, capturable=True), make(expected, lr=0.1)
    inputs = batches(params, microbatches)
    warm_up = batches(params, microbatches)
    run(opt, params, warm_up)
    run(eager, expected, warm_up)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(opt, params, inputs)
    for k in range(4):
        fresh = batches(params, microbatches)
        for old, new in zip(inputs, fresh):
            torch._foreach_copy_(old, new)
        lr.fill_(0.1 / (k + 1))
        eager.param_groups[0]["lr"] = float(lr)
        graph.replay()
        run(eager, expected, fresh)
    assert_same(params, expected)
    assert [float(opt.state[p]["step"]) for p in params] == [5.0] * 2


def test_a_capture_without_capturable_is_refused(on, make, gpu):
    params = parameters((300,), device=gpu)
    opt, window = make(params), batches(params, 1)
    run(opt, params, window)
    before = params[0].detach().clone()
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="capturable=True"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        run(opt, params, window)
    torch.cuda.synchronize()
    assert same_bits(params[0], before)


def test_lr_in_device_memory(on, make):
    params = parameters((300,), device=on[1])
    expected = copies(params)
    window = batches(params, 2)
    run(make(params, lr=torch.tensor(0.03, device=on[1])), params, window)
    run(make(expected, lr=float(torch.tensor(0.03))), expected, window)
    assert_same(params, expected)


# -- others' features ----------------------------------------------------------------------------------------------


def test_grad_scaler(on, make, gpu):
    """unscale_, clip, step; a step with an inf changes nothing. Against torch's fused AdamW."""
    torch.manual_seed(0)
    params = parameters((600,), (7, 9), device=gpu)
    theirs = copies(params)
    opt, stock = make(params), torch.optim.AdamW(theirs, lr=0.1, fused=True)
    scalers = [torch.amp.GradScaler("cuda", init_scale=1024.0) for _ in range(2)]
    for k in range(4):
        window = batches(params, 1)[0]
        if k == 2:
            window[0][5] = math.inf
        before = [p.detach().clone() for p in params]
        for own, optimizer, scaler in ((params, opt, scalers[0]), (theirs, stock, scalers[1])):
            loss = sum((p * g).sum() for p, g in zip(own, window))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(own, 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        if k == 2:
            assert_same(params, before)
    assert scalers[0].get_scale() == scalers[1].get_scale() == 512.0
    for p, q in zip(params, theirs):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_addmm_accumulates_in_place(on, gpu):
    """What direct weight gradients rest on: bf16 factors, a float32 sum in place, no temporary."""
    x, dy = (torch.randn(256, n, device=gpu, dtype=torch.bfloat16) for n in (384, 512))
    total = torch.randn(512, 384, device=gpu)
    expected = total.double() + dy.double().t() @ x.double()
    place = total.data_ptr()
    torch.cuda.synchronize()
    torch.addmm(total, dy.t(), x, out_dtype=torch.float32, out=total)  # the library's workspace
    total.copy_(expected - dy.double().t() @ x.double())
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.addmm(total, dy.t(), x, out_dtype=torch.float32, out=total)
    assert torch.cuda.max_memory_allocated() == before
    assert total.data_ptr() == place
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-3)


def test_each_device_gets_its_own_launches(on, make, gpu):
    """Reported case 26: parameters of the second GPU while the first is current."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    params = parameters((5000,), device="cuda:1")
    expected = copies(params)
    window = batches(params, 2)
    with torch.cuda.device(1):
        run(make(expected), expected, window)
    with torch.cuda.device(0):
        run(make(params), params, window)
        assert torch.cuda.current_device() == 0
    assert_same(params, expected)
