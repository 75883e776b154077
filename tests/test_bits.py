"""Every backend with kernels of its own, bit for bit against backend "cpu".

Where there is no GPU these are skipped here, but run with Triton's interpreter (test_triton.py) and with the CUDA
kernels on an emulator (test_cuda_emulated.py).
"""

import pytest
import torch
from cases import DTYPES, GRADIENT_LAYOUTS, HYPER, LAYOUT_SHAPE, PARAMETER_LAYOUTS
from conftest import KERNEL_PAIRS
from harness import give, in_layout, parameter, params_of, values
from oracle import same_bits

from fused_accum import FusedAccumAdamW, norms
from fused_accum.backends import Backend, registry

pytestmark = pytest.mark.parametrize("on", KERNEL_PAIRS)

# Degenerate; below, on and above a block of Triton's (1024; 512 for float64) and of CUDA's (4096); several blocks.
SHAPES = [(0,), (), (1,), (7,), (13, 17), (512,), (1023,), (1024,), (1025,), (3000,), (4095,), (4096,), (4097,),
          (9000,)]  # fmt: skip

WEIGHTS = {
    "bf16-fp32": (torch.bfloat16, {"master_weights": "fp32"}),
    "fp16-fp32": (torch.float16, {"master_weights": "fp32"}),
    "bf16-split": (torch.bfloat16, {"master_weights": "split"}),
    "bf16-chance": (torch.bfloat16, {"stochastic_rounding": True, "rounding_seed": 2**63 + 12345}),
    "fp16-chance": (torch.float16, {"stochastic_rounding": True}),
}


@pytest.fixture(autouse=True)
def _native():
    if reason := registry()["cpu"].why_not(torch.device("cpu")):
        pytest.fail(f"nothing to compare with: {reason}")


def elsewhere(t, device):
    """A copy of ``t`` on ``device``, its storage, strides and offset with it."""
    size = t.untyped_storage().nbytes() // t.element_size()
    whole = torch.empty(0, dtype=t.dtype).set_(t.detach().untyped_storage(), 0, (size,))
    return whole.clone().to(device).as_strided(t.shape, t.stride(), t.storage_offset())


def same_runs(on, start, gradients, windows=3, late=0, **options):
    """Run the windows that ``gradients(params)`` yields, on both backends; all that is kept must have equal bits.

    ``gradients`` gives, for one micro-batch, a gradient or None for every parameter. After the first window ``late``
    steps are counted without being taken.
    """
    plan = [[gradients(start) for _ in range(3)] for _ in range(windows)]
    runs = []
    for backend, device in (("cpu", "cpu"), on):
        params = [torch.nn.Parameter(elsewhere(p, device)) for p in start]
        opt = FusedAccumAdamW(params, backend=backend, **options)
        for micros in plan:
            for k, grads in enumerate(micros):
                for p, g in zip(params, grads):
                    give(p, None if g is None else elsewhere(g, device))
                opt.step(scale=0.4) if k == 2 else opt.accumulate(0.3)
            if micros is plan[0]:
                for p in params:
                    opt.state[p]["step"] += late
        runs.append(opt)
    for p, q in zip(params_of(runs[0]), params_of(runs[1])):
        assert equal(p, q)
        assert runs[0].state[p].keys() == runs[1].state[q].keys()
        for name, value in runs[0].state[p].items():
            assert equal(value, runs[1].state[q][name]), (name, tuple(p.shape), p.dtype)


def equal(a, b) -> bool:
    """Equal bits, but for which NaN it is."""
    a, b = a.detach().cpu(), b.detach().cpu()
    return torch.equal(a.isnan(), b.isnan()) and same_bits(a.nan_to_num(0), b.nan_to_num(0))


def dense(dtype=None):
    return lambda params: [values(p.shape, dtype or p.dtype) for p in params]


@pytest.mark.parametrize("hyper", HYPER.values(), ids=HYPER)
@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_hyperparameters(on, dtype, hyper):
    same_runs(on, [torch.nn.Parameter(values((40,), DTYPES[dtype]))], dense(), **hyper)


@pytest.mark.parametrize("late", [99, 997, 123_456, 2**24 - 9])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
def test_late_steps(on, dtype, late):
    """The corrections of long runs, and of the longest."""
    same_runs(on, [torch.nn.Parameter(values((40,), DTYPES[dtype]))], dense(), late=late, lr=0.1, betas=(0.9, 0.9999))


@pytest.mark.parametrize("amsgrad", [False, True], ids=["", "amsgrad"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_sizes(on, dtype, amsgrad):
    start = [torch.nn.Parameter(values(s, dtype)) for s in SHAPES]
    same_runs(on, start, dense(), lr=0.1, amsgrad=amsgrad, windows=2)


@pytest.mark.parametrize("accum_dtype", [torch.float32, torch.bfloat16], ids=["accum-fp32", "accum-bf16"])
@pytest.mark.parametrize("state_dtype", [torch.float32, None], ids=["state-fp32", "state-param"])
@pytest.mark.parametrize("grad", DTYPES.values(), ids=[f"grad-{name}" for name in DTYPES])
def test_dtypes(on, grad, state_dtype, accum_dtype):
    """Every parameter dtype at once, with gradients of one: rounding happens in the same places."""
    params = [torch.nn.Parameter(values((65,), dtype)) for dtype in DTYPES.values()]
    same_runs(on, params, dense(grad), lr=0.3, amsgrad=True, state_dtype=state_dtype, accum_dtype=accum_dtype)


@pytest.mark.parametrize("grad_layout", GRADIENT_LAYOUTS)
def test_layouts(on, grad_layout):
    params = [parameter(values(LAYOUT_SHAPE, torch.bfloat16), layout) for layout in PARAMETER_LAYOUTS]

    def gradients(params):
        return [in_layout(values(p.shape, p.dtype), grad_layout) for p in params]

    same_runs(on, params, gradients, windows=2, lr=0.1)


def test_some_parameters_miss_some_micro_batches(on):
    """Step from the gradient, from the buffer, from both, in one call."""
    params = [torch.nn.Parameter(values((50,))) for _ in range(7)]
    turn = iter(range(100))

    def gradients(params):
        k = next(turn) % 3
        return [values(p.shape) if (i + 1) >> k & 1 else None for i, p in enumerate(params)]

    same_runs(on, params, gradients, lr=0.1)


@pytest.mark.parametrize("grad_layout", ["contiguous", "transposed", "misaligned"])
@pytest.mark.parametrize(("dtype", "options"), WEIGHTS.values(), ids=WEIGHTS)
def test_master_weights_and_stochastic_rounding(on, dtype, options, grad_layout):
    """From the gradient, from the buffer and from both; all layouts of a parameter; other dtypes among them."""
    params = [parameter(values(LAYOUT_SHAPE, dtype), layout) for layout in PARAMETER_LAYOUTS]
    params += [torch.nn.Parameter(values(s, d)) for s, d in [((), dtype), ((1030,), dtype), ((5,), torch.float32)]]
    turn = iter(range(100))

    def gradients(params):
        k = next(turn) % 3
        grads = [in_layout(values(p.shape, p.dtype), grad_layout if p.dim() == 4 else "contiguous") for p in params]
        return [g if (i % 3 + 1) >> k & 1 or (i + k) % 3 else None for i, g in enumerate(grads)]

    same_runs(on, params, gradients, windows=2, lr=0.3, amsgrad=grad_layout == "contiguous", **options)


def test_infinities_and_nans_go_where_they_go_on_the_cpu(on):
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-45, 3e38, -1e-40, 1.0])

    def gradients(params):
        return [odd.roll(int(torch.randint(9, ()))).to(p.dtype) for p in params]

    params = [torch.nn.Parameter(values((9,), dtype)) for dtype in DTYPES.values()]
    same_runs(on, params, gradients, lr=0.1, amsgrad=True, windows=4)
    for dtype, options in WEIGHTS.values():
        same_runs(on, [torch.nn.Parameter(values((9,), dtype))], gradients, lr=0.1, windows=4, **options)


def test_buffers_that_were_read_are_zero_afterwards(on):
    backend, device = on
    params = [torch.nn.Parameter(values((1030,), dtype, device)) for dtype in DTYPES.values()]
    opt = FusedAccumAdamW(params, backend=backend)
    odd = torch.ones(1030, device=device)
    odd[:3] = torch.tensor([float("nan"), float("inf"), -1.0])
    kept = []
    for call in (opt.accumulate, opt.step):
        for p in params:
            p.grad = odd.to(p.dtype)
        call()
        kept = kept or [buffer for _, buffer in opt._run.contributions()]
    assert len(kept) == len(params)
    assert all(same_bits(a, torch.zeros_like(a)) for a in kept)


KEPT = {"fp32": {"master_weights": "fp32"}, "split": {"master_weights": "split"},
        "chance": {"stochastic_rounding": True, "rounding_seed": 2**63 + 5}}  # fmt: skip
every_way_to_keep = pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT)


def low_precision(kept, *shapes):
    dtypes = (torch.bfloat16,) if kept.get("master_weights") == "split" else (torch.bfloat16, torch.float16)
    return [torch.nn.Parameter(values(shape, dtype)) for dtype in dtypes for shape in shapes]


@pytest.mark.parametrize("amsgrad", [False, True], ids=["", "amsgrad"])
@every_way_to_keep
def test_kept_weights(on, kept, amsgrad):
    """From the gradient, the buffer, and both."""
    turn = iter(range(100))

    def gradients(params):
        k = next(turn) % 9
        return [values(p.shape, p.dtype) if k != i % 3 and (k != 8 or i % 2) else None for i, p in enumerate(params)]

    start = low_precision(kept, *SHAPES)
    start.append(torch.nn.Parameter(values((65,))))  # has none
    same_runs(on, start, gradients, lr=0.1, weight_decay=0.2, amsgrad=amsgrad, maximize=amsgrad, **kept)


@pytest.mark.parametrize("grad", [torch.float32, torch.float64], ids=["grad-fp32", "grad-fp64"])
@every_way_to_keep
def test_kept_weights_with_other_dtypes(on, kept, grad):
    options = {"accum_dtype": torch.bfloat16, "state_dtype": None, "lr": 0.3}
    same_runs(on, low_precision(kept, (65,), (4100,)), dense(grad), windows=2, **options, **kept)


@every_way_to_keep
def test_kept_weights_in_layouts(on, kept):
    params = [parameter(values(LAYOUT_SHAPE, torch.bfloat16), layout) for layout in PARAMETER_LAYOUTS]
    same_runs(on, params, dense(), windows=2, lr=0.1, amsgrad=True, **kept)


@pytest.mark.parametrize("accum_dtype", [torch.float32, torch.bfloat16], ids=["accum-fp32", "accum-bf16"])
@pytest.mark.filterwarnings("ignore:the scales of this window")
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_sums_of_squares(on, dtype, accum_dtype, monkeypatch):
    """Of buffers as they are written, of those that miss the last micro-batch, and of gradients (N=1)."""
    if on[0] == "triton":
        pytest.skip("it adds squares up in an order of its own: see triton_interpreted.py")
    start = [torch.nn.Parameter(values(s, dtype)) for s in SHAPES]
    if dtype == torch.float32 == accum_dtype:
        start.append(torch.nn.Parameter(values((300_007,))))  # more blocks than a row has lanes
    start += [parameter(values(LAYOUT_SHAPE, dtype), layout) for layout in PARAMETER_LAYOUTS]
    plan = [[[None if (i + k) % 3 == 2 else values(p.shape, p.dtype) for i, p in enumerate(start)] for k in range(n)]
            for n in (3, 1)]  # fmt: skip
    plan[1][0][8] = in_layout(values(SHAPES[8], dtype), "stepped")
    found = []
    for backend, device in (("cpu", "cpu"), on):
        params = [torch.nn.Parameter(elsewhere(p, device)) for p in start]
        opt = FusedAccumAdamW(params, backend=backend, accum_dtype=accum_dtype, max_grad_norm=1e9)
        monkeypatch.setattr(norms, "norms_of", None)
        sums = []
        for micros in plan:
            for k, grads in enumerate(micros):
                for p, g in zip(params, grads):
                    p.grad = None if g is None else elsewhere(g, device)
                opt.step(scale=0.4) if k + 1 == len(micros) else opt.accumulate(0.3)
            ((_, _, rows, squares),) = opt._run.norms.parts
            sums.append((list(rows), squares.tolist()))
        found.append(sums)
    assert found[0] == found[1]


@pytest.mark.parametrize("count", [56, 57, 454, 455, 1000])
def test_many_tensors_in_one_call(on, count):
    """Around the sizes of CUDA's tables of rows, with an empty tensor in every tenth place."""
    start = [torch.nn.Parameter(values((0 if i % 10 == 9 else 3 + i % 5,))) for i in range(count)]
    same_runs(on, start, dense(), windows=1, lr=0.1)


@pytest.mark.parametrize(("accum", "grad"), [
    ("fp32", "fp32"), ("fp32", "bf16"), ("bf16", "fp16"), ("fp64", "fp32"), ("fp32", "fp64"),
])  # fmt: skip
@pytest.mark.parametrize("width", [33, 64])
def test_rows_added_by_index(on, accum, grad, width):
    """Each sum in the order of its tokens, rounded once; a row that is left out."""
    name, device = on
    if type(registry()[name]).scatter_rows is Backend.scatter_rows:
        pytest.skip("it has no kernel of its own for that")
    total, given = values((9, width), DTYPES[accum]), values((100, width), DTYPES[grad])
    index = torch.randint(9, (100,))
    ours = total.to(device)
    registry()["cpu"].scatter_rows(total, index, given, 4)
    registry()[name].scatter_rows(ours, index.to(device), given.to(device), 4)
    assert same_bits(ours.cpu(), total)
