"""The CUDA kernels and their launcher on the emulator, for what other backends do not have. Run by
test_cuda_emulated.py."""

import warnings

import cuda_emulated
import pytest
import torch
from harness import copies, params_of, values
from oracle import same_bits

from fused_accum import FusedAccumAdamW
from fused_accum.backends import cuda, registry

EMULATION = cuda_emulated.EMULATION
CPU = torch.device("cpu")
LARGE = 2**31 + 4096
INVALID_DEVICE, ILLEGAL_ADDRESS = 101, 700


@pytest.fixture
def emulation():
    EMULATION.reset()
    yield EMULATION
    EMULATION.reset()


@pytest.fixture
def on_device(monkeypatch):
    """Makes kernels go to a device and stream of choice: CPU tensors have neither."""

    def use(device, stream):
        def executor(_, slots=None, **more):
            place = () if slots is None else (slots.data_ptr(), len(slots))
            return cuda._C.Cuda(device, stream, *place)

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


@pytest.mark.parametrize(("count", "kind", "launches"), [
    (1, "RowTable<56>", 1), (56, "RowTable<56>", 1), (57, "RowTable<454>", 1), (454, "RowTable<454>", 1),
    (1000, "RowTable<454>", 3),
])  # fmt: skip
def test_many_tensors_take_few_launches(emulation, count, kind, launches):
    """Reported case 34: 1000 tensors of 64 elements."""
    params = parameters(*[(64,)] * count)
    opt = FusedAccumAdamW(params, backend="cuda")
    for call in (opt.accumulate, opt.step):
        for p in params:
            p.grad = torch.ones(64)
        emulation.launches()
        call()
        kinds = [launch.kind for launch in emulation.launches()]
        assert kinds == ["CountTable"] * (call == opt.step) + [kind] * launches


@pytest.mark.filterwarnings("ignore:the scales of this window")
def test_sums_of_squares_take_no_pass_of_their_own(emulation):
    """Kernels of an accumulation leave those of blocks; of a single gradient one read gives them."""
    params = parameters((5000,), (64,), (0,))
    opt = FusedAccumAdamW(params, backend="cuda", max_grad_norm=1.0, skip_nonfinite="step")
    small, large = "RowTable<56>", "RowTable<454>"
    for calls, kinds in (
        ("a", [large, "SquaresTable"]),
        ("s", [large, "SquaresTable", "CountTable", small]),
        ("s", [large, "SquaresTable", "CountTable", small]),
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
    executor = cuda._C.Cuda(0, 0, squares=torch.empty(3, dtype=torch.float64).data_ptr(), square_count=3)
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


# -- rows added by index -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "tokens", "rows", "offset"), [
    (512, 300, 40, 0), (512, 300, 1, 0), (516, 100, 7, 0), (513, 100, 1000, 0), (64, 9, 3, 1), (1, 5, 2, 0),
    (300, 500, 5, 0),
])  # fmt: skip
@pytest.mark.parametrize(("accum", "grad"), [
    ("float32", "float32"), ("float32", "bfloat16"), ("float32", "float64"), ("bfloat16", "float16"),
    ("float64", "float32"),
])  # fmt: skip
def test_scattered_rows_have_the_bits_of_the_cpu(emulation, width, tokens, rows, offset, accum, grad):
    """Rows that one token names and that all name; pieces that are wide, and single elements where rows are not
    aligned; a row that is left out; in any order of threads."""
    total = torch.randn(rows * width + offset)[offset:].view(rows, width).to(getattr(torch, accum))
    if offset:
        total = torch.cat([total.flatten()[:1], total.flatten()])[1:].view(rows, width)
    index, given = torch.randint(rows, (tokens,)), torch.randn(tokens, width).to(getattr(torch, grad))
    left_out = int(index[0]) if rows > 3 else None
    expected, before = total.clone(), total.clone()
    registry()["cpu"].scatter_rows(expected, index, given, left_out)
    emulation.check_races(True)
    for seed in (0, 7):
        emulation.seed(seed)
        total.copy_(before)
        cuda.BACKEND.scatter_rows(total, index, given, left_out)
        assert same_bits(total, expected)
    assert {launch.kind for launch in emulation.launches()} == {"ScatterJob"}


@pytest.mark.parametrize(("rows", "tokens"), [(3, 100), (30_000, 100), (3, 1000)])
def test_the_cost_of_scattered_rows_is_that_of_their_tokens(emulation, rows, tokens):
    """Elements read and written, and blocks: none for rows that no token names."""
    total, index, given = torch.zeros(rows, 8), torch.arange(tokens) % 3, torch.randn(tokens, 8)
    written, read = emulation.phantom(total), emulation.phantom(given)
    cuda.BACKEND.scatter_rows(total, index, given, None)
    (launch,) = emulation.launches()
    assert launch.grid == -(-tokens * 2 // launch.block)
    assert emulation.phantom_counts(written) == (24, 24, 0)
    assert emulation.phantom_counts(read) == (tokens * 8, 0, 0)


def test_scattered_rows_go_to_a_device_and_stream(emulation):
    emulation.set_device(1)
    total, grad, index = torch.zeros(2, 4), torch.ones(3, 4), torch.tensor([0, 0, 1])
    order = torch.arange(3)
    stream = emulation.stream(2)
    cuda._C.scatter_rows(total, index.data_ptr(), order.data_ptr(), grad, -1, 2, stream)
    (launch,) = emulation.launches()
    assert (launch.device, launch.stream != 0, emulation.device()) == (2, True, 1)
    assert total.tolist() == [[2.0] * 4, [1.0] * 4]
    emulation.fail("launch", ILLEGAL_ADDRESS)
    with pytest.raises(RuntimeError, match="cudaErrorIllegalAddress"):
        cuda._C.scatter_rows(total, index.data_ptr(), order.data_ptr(), grad, -1, 2, stream)
    assert emulation.device() == 1


@pytest.mark.parametrize(("accum", "grad", "words"), [
    (torch.zeros(2, 4), torch.ones(3, 5), "rows of one length"),
    (torch.zeros(4, 2).t(), torch.ones(3, 4), "contiguous matrices"),
    (torch.zeros(2, 4), torch.ones(3, 4).double(), "both be float64"),
    (torch.zeros(2, 4), torch.ones(12), "contiguous matrices"),
])  # fmt: skip
def test_matrices_that_do_not_fit_are_refused(emulation, accum, grad, words):
    index = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match=words):
        cuda._C.scatter_rows(accum, index.data_ptr(), index.data_ptr(), grad, -1, 0, 0)
    assert emulation.launches() == []


def test_indices_that_no_row_has_add_nothing(emulation):
    total = torch.zeros(2, 4)
    cuda.BACKEND.scatter_rows(total, torch.tensor([1, -1, 2, 1]), torch.ones(4, 4), None)
    assert total.tolist() == [[0.0] * 4, [2.0] * 4]


# -- more than 2^31 elements (reported case 22), with memory that is recorded and not touched ----------------------


SAMPLE = 97  # one in so many blocks runs, besides the first and the last


def covered(launch):
    """Elements that belong to the blocks that ran, of as many for every block."""
    assert LARGE % launch.grid == 0
    ran = [b for b in range(launch.grid) if b < 64 or b + 64 >= launch.grid or b % SAMPLE == 0]
    return LARGE // launch.grid * len(ran)



@pytest.fixture
def large(emulation):
    """A tensor of LARGE elements, of which only addresses are used: nothing is touched, so no memory is taken."""
    tensors = []

    def make(dtype):
        tensors.append(torch.empty(LARGE, dtype=dtype))
        return tensors[-1], emulation.phantom(tensors[-1])

    emulation.sample_blocks(SAMPLE)
    return make


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("first", [True, False], ids=["write", "add"])
def test_accumulate_beyond_31_bits(emulation, large, dtype, first):
    (accum, to), (grad, source) = large(torch.float32), large(dtype)
    cuda.BACKEND.accumulate([accum], [grad], [first], 2.0)
    (launch,) = emulation.launches()
    count = covered(launch)
    assert emulation.phantom_counts(to) == (0 if first else count, count, 0)
    assert emulation.phantom_counts(source) == (count, 0, 0)
    assert_ends_were_written(emulation, to)


@pytest.mark.parametrize("way", ["gradient", "buffer", "both"])
def test_step_beyond_31_bits(emulation, large, way):
    from fused_accum.rows import Rows
    from fused_accum.state import Hyper

    (param, p), (exp_avg, m), (exp_avg_sq, v) = large(torch.bfloat16), large(torch.float32), large(torch.float32)
    grad, g = large(torch.bfloat16) if way != "buffer" else (None, None)
    accum, a = large(torch.float32) if way != "gradient" else (None, None)
    cuda.BACKEND.adamw(Rows(
        params=[param], grads=[grad], accums=[accum], present=[accum is not None], accum_dtypes=[torch.float32],
        exp_avgs=[exp_avg], exp_avg_sqs=[exp_avg_sq], max_exp_avg_sqs=[None], steps=[torch.zeros(())], groups=[0],
        hypers=[Hyper(0.1, 0.9, 0.999, 1e-8, 0.1, False, False)], scale=1.0, coefficient=1.0,
    ))  # fmt: skip
    _, launch = emulation.launches()
    count = covered(launch)
    for written in (p, m, v, *([a] if a is not None else [])):
        assert emulation.phantom_counts(written) == (count, count, 0)
        assert_ends_were_written(emulation, written)
    if g is not None:
        assert emulation.phantom_counts(g) == (count, 0, 0)


def test_strided_rows_beyond_31_bits(emulation, large):
    """A gradient of stride 2, in a row that has as many elements: places beyond 2^32, of which none wraps around."""
    n = LARGE // 2
    accum, to = large(torch.float32)
    grad, source = large(torch.bfloat16)
    cuda.BACKEND.accumulate([accum[:n]], [grad[::2]], [True], 1.0)
    emulation.launches()
    read, _, _ = emulation.phantom_counts(source)
    _, written, again = emulation.phantom_counts(to)
    assert read == written > n // SAMPLE
    assert again == 0
    assert_ends_were_written(emulation, to, n)


def test_scattered_rows_beyond_31_bits(emulation, large):
    """The last row of a buffer, and all of a gradient, of more than 2^31 elements."""
    (accum, to), (grad, source) = large(torch.float32), large(torch.bfloat16)
    width = LARGE // 8
    index = torch.tensor([7, 3, 0, 6, 5, 4, 1, 2])
    cuda.BACKEND.scatter_rows(accum.view(8, width), index, grad.view(8, width), None)
    emulation.launches()
    count, _, _ = emulation.phantom_counts(source)
    assert count > LARGE // (2 * SAMPLE)
    assert emulation.phantom_counts(to) == (count, count, 0)
    assert_ends_were_written(emulation, to)


def assert_ends_were_written(emulation, phantom, numel=LARGE):
    for element in (0, numel - 1):
        assert emulation.phantom_was_written(phantom, element)
