"""The launcher of the CUDA kernels on the emulator: devices, streams, launches, order, counts. Run by
test_cuda_emulated.py."""

import warnings

import pytest
import torch
from harness import copies, params_of, values
from oracle import same_bits

from fused_accum import FusedAccumAdamW
from fused_accum.backends import cuda

INVALID_DEVICE, ILLEGAL_ADDRESS = 101, 700
SMALL, LARGE = "RowTable<56>", "RowTable<454>"


@pytest.fixture
def on_device(monkeypatch):
    """Makes kernels go to a device and stream of choice: CPU tensors have neither."""

    def use(device, stream):
        def executor(_, slots=None, **more):
            place = () if slots is None else (slots.data_ptr(), len(slots))
            return cuda._CUDA.Cuda(device, stream, *place)

        monkeypatch.setattr(cuda, "executor", executor)

    return use


def parameters(*shapes, dtype=torch.float32):
    return [torch.nn.Parameter(values(shape, dtype)) for shape in shapes]


def window(opt, grads):
    for k, micro in enumerate(grads):
        for p, g in zip(params_of(opt), micro):
            p.grad = g
        opt.step(scale=0.5) if k == len(grads) - 1 else opt.accumulate(0.5)


def gradients(params, count=3):
    return [[values(p.shape, p.dtype) for p in params] for _ in range(count)]


# -- devices and streams (reported case 26; 32 is in test_gpu.py) --------------------------------------------------


def test_launches_go_to_the_tensors_device_and_stream(emulation, on_device):
    stream = emulation.stream(2)
    on_device(2, stream)
    emulation.set_device(1)
    params = parameters((5000,), (33,))
    window(FusedAccumAdamW(params, backend="cuda"), gradients(params))
    launches = emulation.launches()
    assert {(launch.device, launch.stream) for launch in launches} == {(2, launches[0].stream)}
    assert launches[0].stream != 0
    assert emulation.device() == 1


def test_streams_of_two_optimizers_do_not_mix(emulation, on_device):
    for device in (0, 3):
        on_device(device, emulation.stream(device))
        params = parameters((100,))
        window(FusedAccumAdamW(params, backend="cuda"), gradients(params))
    used = [(launch.device, launch.stream) for launch in emulation.launches()]
    assert len(set(used)) == 2
    assert used == sorted(used)


def test_a_stream_of_another_device_is_refused_as_cuda_does(emulation, on_device):
    """That the emulator would notice a missing guard: nothing is launched on the current device instead."""
    on_device(1, emulation.stream(2))
    params = parameters((100,))
    opt = FusedAccumAdamW(params, backend="cuda")
    params[0].grad = torch.ones(100)
    with pytest.raises(RuntimeError, match=r"cudaErrorInvalidResourceHandle \(invalid resource handle\) from cuda"):
        opt.accumulate()
    assert emulation.launches() == []


@pytest.mark.parametrize(("call", "error", "words"), [
    ("cudaSetDevice", INVALID_DEVICE, r"cudaErrorInvalidDevice \(invalid device .*\) from cudaSetDevice\(device\)"),
    ("cudaGetDevice", INVALID_DEVICE, r"cudaErrorInvalidDevice .* from cudaGetDevice\(&before_\)"),
    ("launch", ILLEGAL_ADDRESS, r"cudaErrorIllegalAddress \(an illegal memory .*\) from cudaGetLastError\(\)"),
])  # fmt: skip
def test_errors_throw_with_expression_and_place_and_the_device_is_restored(emulation, on_device, call, error, words):
    on_device(2, emulation.stream(2))
    params = parameters((5000,))
    opt = FusedAccumAdamW(params, backend="cuda")
    before = [p.detach().clone() for p in params]
    for p in params:
        p.grad = torch.ones_like(p)
    emulation.set_device(1)
    emulation.fail(call, error)
    with pytest.raises(RuntimeError, match=words + r".* at .*cuda_\w+\.(cpp|cu|h):\d+"):
        opt.step()
    assert emulation.device() == 1
    assert all(same_bits(p, x) for p, x in zip(params, before))
    if call == "launch":  # from it alone nobody knows what has run
        with pytest.raises(RuntimeError, match="left some parameters updated and others not"):
            opt.step()
        return
    opt.step()  # the error is over
    assert not any(same_bits(p, x) for p, x in zip(params, before))


@pytest.mark.parametrize("after", range(3))
def test_the_device_is_restored_after_an_error_in_any_launch_of_a_step(emulation, on_device, after):
    """A count, and kernels for two sets of dtypes."""
    on_device(3, emulation.stream(3))
    params = parameters((50,)) + parameters((60,), dtype=torch.bfloat16)
    opt = FusedAccumAdamW(params, backend="cuda")
    for p in params:
        p.grad = torch.ones_like(p)
    emulation.fail("launch", ILLEGAL_ADDRESS, after)
    with pytest.raises(RuntimeError, match="cudaErrorIllegalAddress"):
        opt.step()
    assert emulation.device() == 0
    assert len(emulation.launches()) == after


# -- launches ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "sums", "counts", "launches"), [
    (1, SMALL, "CountTable<140>", 1), (56, SMALL, "CountTable<140>", 1), (57, LARGE, "CountTable<140>", 1),
    (141, LARGE, "CountTable<1800>", 1), (454, LARGE, "CountTable<1800>", 1), (1000, LARGE, "CountTable<1800>", 3),
])  # fmt: skip
def test_many_tensors_take_few_launches(emulation, count, sums, counts, launches):
    """Reported case 34: 1000 tensors of 64 elements."""
    params = parameters(*[(64,)] * count)
    opt = FusedAccumAdamW(params, backend="cuda")
    for call in (opt.accumulate, opt.step):
        for p in params:
            p.grad = torch.ones(64)
        emulation.launches()
        call()
        kinds = [launch.kind for launch in emulation.launches()]
        assert kinds == ([counts] + [LARGE] * launches if call == opt.step else [sums] * launches)


@pytest.mark.filterwarnings("ignore:the scales of this window")
def test_sums_of_squares_take_no_pass_of_their_own(emulation):
    """Kernels of an accumulation leave those of blocks; of a single gradient one read gives them."""
    params = parameters((5000,), (64,), (0,))
    opt = FusedAccumAdamW(params, backend="cuda", max_grad_norm=1.0, skip_nonfinite="step")
    for calls, kinds in (
        ("a", [LARGE, "SquaresTable"]),
        ("s", [LARGE, "SquaresTable", "CountTable<140>", LARGE]),
        ("s", [LARGE, "SquaresTable", "CountTable<140>", LARGE]),
    ):
        for p in params:
            p.grad = torch.ones_like(p)
        emulation.launches()
        opt.accumulate(0.5) if calls == "a" else opt.step(scale=0.5)
        assert [launch.kind for launch in emulation.launches()] == kinds


def test_sums_of_squares_of_many_rows(emulation):
    """More than one table of them holds, with empty ones between."""
    params = parameters(*[(0 if i % 7 == 3 else 2,) for i in range(1700)])
    opt = FusedAccumAdamW(params, backend="cuda", max_grad_norm=1.0)
    for p in params:
        p.grad = torch.ones_like(p)
    opt.accumulate()
    opt.step()
    assert sum(launch.kind == "SquaresTable" for launch in emulation.launches()) == 2
    ((_, _, rows, squares),) = opt._run.norms.parts
    assert list(rows) == list(range(1700))
    assert squares.tolist() == [float(p.numel()) for p in params]


def test_too_little_memory_for_sums_is_refused(emulation):
    executor = cuda._CUDA.Cuda(0, 0, squares=torch.empty(3, dtype=torch.float64).data_ptr(), square_count=3)
    (p,) = parameters((5000,))
    p.grad = torch.ones_like(p)
    table = cuda._C.Table([p], [0], torch.autograd.graph.increment_version, cuda._C.Place(1, 0), [0], 0, 0)
    for kind in (torch.nn.Parameter, torch.Tensor):
        table.accept(kind)
    assert table.collect([torch.zeros(5000)], bytearray(1), bytearray(1), True) == (1, -1)
    sums = torch.zeros(1, dtype=torch.float64)
    with pytest.raises(ValueError, match="need memory for 8 have it for 3"):
        table.accumulate(bytearray(1), 1.0, executor, None, bytearray(1), sums.data_ptr())
    assert emulation.launches() == []


def test_results_do_not_depend_on_the_order_of_blocks_and_threads(emulation):
    start = [p for dtype in (torch.float32, torch.bfloat16, torch.float64)
             for p in parameters((9000,), (4097,), (40, 30), dtype=dtype)]  # fmt: skip
    start.append(torch.nn.Parameter(values((70, 50)).t()))
    kept = {"master_weights": "fp32", "max_grad_norm": 0.1}
    grads = gradients(start)
    grads[1][-1] = values((50, 140))[:, ::2]  # strided
    ends = []
    for seed in (0, 1, 2, 12345):
        emulation.seed(seed)
        params = copies(start)
        opt = FusedAccumAdamW(params, backend="cuda", amsgrad=True, **kept)
        window(opt, grads)
        ends.append([*params, *(opt.state[p]["exp_avg_sq"] for p in params), opt._run.norms.parts[0][3]])
    for end in ends[1:]:
        assert all(same_bits(a, b) for a, b in zip(ends[0], end))


def test_counts_on_the_device_are_those_of_the_host(emulation):
    """Kernels count updates where torch keeps `step` on the device."""
    start = parameters((50,)) + parameters((60,), dtype=torch.float64)
    plan = [gradients(start, 2) for _ in range(4)]
    ends = []
    for on_device in (False, True):
        emulation.steps_on_device(on_device)
        params = copies(start)
        opt = FusedAccumAdamW(params, backend="cuda", lr=0.1)
        for grads in plan:
            window(opt, grads)
        ends.append([t for p in params for t in (p, opt.state[p]["step"], opt.state[p]["exp_avg_sq"])])
    assert all(same_bits(a, b) for a, b in zip(*ends))
    assert float(ends[1][1]) == 4


def test_weights_in_device_memory_are_never_read_by_the_host(emulation, monkeypatch):
    """From scale_loss() to the update; a sum of 0 updates and counts nothing."""
    from fused_accum import window as books

    def read(*_):
        raise AssertionError("the host waits for the device")

    monkeypatch.setattr(books, "on_device", lambda value: isinstance(value, torch.Tensor))
    emulation.steps_on_device(True)
    start = parameters((5000,), (33,))
    ends = []
    for on_device in (False, True):
        params = copies(start)
        opt = FusedAccumAdamW(params, lr=0.1, backend="cuda")
        opt.accumulate_in_backward()
        with monkeypatch.context() as patch:
            if on_device:
                for name in ("item", "tolist", "__float__", "__bool__", "__int__", "numpy"):
                    patch.setattr(torch.Tensor, name, read)
            for weights in ((3.0, 5.0), (2.0, 7.0), (0.0, 0.0)):
                for weight in weights:
                    loss = sum((p * p).sum() for p in params)
                    weight = torch.full((), weight, dtype=torch.float64) if on_device else weight
                    opt.scale_loss(loss, weight=weight).backward()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    opt.step()
        ends.append([t for p in params for t in (p, opt.state[p]["step"], opt.state[p]["exp_avg_sq"])])
    assert all(same_bits(a, b) for a, b in zip(*ends))
    assert float(ends[1][1]) == 2
