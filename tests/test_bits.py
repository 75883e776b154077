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

from fused_accum import FusedAccumAdamW
from fused_accum.backends import Backend, registry

pytestmark = pytest.mark.parametrize("on", KERNEL_PAIRS)

# Degenerate; below, on and above a block of Triton's (1024; 512 for float64) and of CUDA's (4096); several blocks.
SHAPES = [(0,), (), (1,), (7,), (13, 17), (512,), (1023,), (1024,), (1025,), (3000,), (4095,), (4096,), (4097,),
          (9000,)]  # fmt: skip


@pytest.fixture(autouse=True)
def _native():
    if reason := registry()["cpu"].why_not(torch.device("cpu")):
        pytest.fail(f"nothing to compare with: {reason}")


def elsewhere(t, device):
    """A copy of ``t`` on ``device``, its storage, strides and offset with it."""
    size = t.untyped_storage().nbytes() // t.element_size()
    whole = torch.empty(0, dtype=t.dtype).set_(t.detach().untyped_storage(), 0, (size,))
    return whole.clone().to(device).as_strided(t.shape, t.stride(), t.storage_offset())


def same_runs(on, start, gradients, windows=3, **options):
    """Run the windows that ``gradients(params)`` yields, on both backends; all that is kept must have equal bits.

    ``gradients`` gives, for one micro-batch, a gradient or None for every parameter.
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


def test_infinities_and_nans_go_where_they_go_on_the_cpu(on):
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-45, 3e38, -1e-40, 1.0])

    def gradients(params):
        return [odd.roll(int(torch.randint(9, ()))).to(p.dtype) for p in params]

    params = [torch.nn.Parameter(values((9,), dtype)) for dtype in DTYPES.values()]
    same_runs(on, params, gradients, lr=0.1, amsgrad=True, windows=4)


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


@pytest.mark.parametrize("count", [60, 61, 511, 512, 1000])
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
