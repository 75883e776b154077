"""The Triton kernels in Triton's interpreter, bit for bit against backend "cpu". Run by test_triton.py."""

import pytest
import torch
from cases import DTYPES, GRADIENT_LAYOUTS, HYPER, LAYOUT_SHAPE, PARAMETER_LAYOUTS
from harness import copies, give, in_layout, parameter, params_of, values
from oracle import same_bits

from fused_accum import FusedAccumAdamW
from fused_accum.backends import registry, triton_kernels

# Below, on and above a block (1024; 512 for float64), several blocks, degenerate ones.
SHAPES = [(0,), (), (1,), (7,), (13, 17), (512,), (1023,), (1024,), (1025,), (3000,)]


@pytest.fixture(autouse=True)
def _native():
    if reason := registry()["cpu"].why_not(torch.device("cpu")):
        pytest.fail(f"nothing to compare with: {reason}")


def same_runs(start, gradients, windows=3, **options):
    """Run the windows that ``gradients(params)`` yields, on both backends; all that is kept must have equal bits.

    ``gradients`` gives, for one micro-batch, a gradient or None for every parameter.
    """
    plan = [[gradients(start) for _ in range(3)] for _ in range(windows)]
    runs = []
    for backend in ("cpu", "triton"):
        params = copies(start)
        opt = FusedAccumAdamW(params, backend=backend, **options)
        for micros in plan:
            for k, grads in enumerate(micros):
                for p, g in zip(params, grads):
                    give(p, g)
                opt.step(scale=0.4) if k == 2 else opt.accumulate(0.3)
        runs.append(opt)
    for p, q in zip(params_of(runs[0]), params_of(runs[1])):
        assert equal(p, q)
        assert runs[0].state[p].keys() == runs[1].state[q].keys()
        for name, value in runs[0].state[p].items():
            assert equal(value, runs[1].state[q][name]), (name, tuple(p.shape), p.dtype)


def equal(a, b) -> bool:
    """Equal bits, but for which NaN it is."""
    a, b = a.detach(), b.detach()
    return torch.equal(a.isnan(), b.isnan()) and same_bits(a.nan_to_num(0), b.nan_to_num(0))


def dense(dtype=None):
    return lambda params: [values(p.shape, dtype or p.dtype) for p in params]


@pytest.mark.parametrize("hyper", HYPER.values(), ids=HYPER)
@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_hyperparameters(dtype, hyper):
    same_runs([torch.nn.Parameter(values((40,), DTYPES[dtype]))], dense(), **hyper)


@pytest.mark.parametrize("amsgrad", [False, True], ids=["", "amsgrad"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_sizes(dtype, amsgrad):
    same_runs([torch.nn.Parameter(values(s, dtype)) for s in SHAPES], dense(), lr=0.1, amsgrad=amsgrad, windows=2)


@pytest.mark.parametrize("accum_dtype", [torch.float32, torch.bfloat16], ids=["accum-fp32", "accum-bf16"])
@pytest.mark.parametrize("state_dtype", [torch.float32, None], ids=["state-fp32", "state-param"])
@pytest.mark.parametrize("grad", DTYPES.values(), ids=[f"grad-{name}" for name in DTYPES])
def test_dtypes(grad, state_dtype, accum_dtype):
    """Every parameter dtype at once, with gradients of one: rounding happens in the same places."""
    params = [torch.nn.Parameter(values((65,), dtype)) for dtype in DTYPES.values()]
    same_runs(params, dense(grad), lr=0.3, amsgrad=True, state_dtype=state_dtype, accum_dtype=accum_dtype)


@pytest.mark.parametrize("grad_layout", GRADIENT_LAYOUTS)
def test_layouts(grad_layout):
    params = [parameter(values(LAYOUT_SHAPE, torch.bfloat16), layout) for layout in PARAMETER_LAYOUTS]
    same_runs(params, lambda ps: [in_layout(values(p.shape, p.dtype), grad_layout) for p in ps], windows=2, lr=0.1)


def test_some_parameters_miss_some_micro_batches():
    """Step from the gradient, from the buffer, from both, in one call."""
    params = [torch.nn.Parameter(values((50,))) for _ in range(7)]
    turn = iter(range(100))

    def gradients(params):
        k = next(turn) % 3
        return [values(p.shape) if (i + 1) >> k & 1 else None for i, p in enumerate(params)]

    same_runs(params, gradients, lr=0.1)


def test_infinities_and_nans_go_where_they_go_on_the_cpu():
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-45, 3e38, -1e-40, 1.0])

    def gradients(params):
        return [odd.roll(int(torch.randint(9, ()))).to(p.dtype) for p in params]

    params = [torch.nn.Parameter(values((9,), dtype)) for dtype in DTYPES.values()]
    same_runs(params, gradients, lr=0.1, amsgrad=True, windows=4)


def test_buffers_that_were_read_are_zero_afterwards():
    params = [torch.nn.Parameter(values((1030,), dtype)) for dtype in DTYPES.values()]
    opt = FusedAccumAdamW(params, backend="triton")
    odd = torch.ones(1030)
    odd[:3] = torch.tensor([float("nan"), float("inf"), -1.0])
    kept = []
    for call in (opt.accumulate, opt.step):
        for p in params:
            p.grad = odd.to(p.dtype)
        call()
        kept = kept or [buffer for _, buffer in opt._run.contributions()]
    assert len(kept) == len(params)
    assert all(same_bits(a, torch.zeros_like(a)) for a in kept)


def test_element_offsets_beyond_31_bits():
    """A row whose first block is so far below program 0 that it works past element 2**31 (and byte 2**32)."""
    block, far = 1024, 1 << 31
    accum, grad = torch.zeros(block), torch.ones(block)
    pointers = [0, grad.data_ptr() - 4 * far, accum.data_ptr() - 4 * far, 0, 0, 0]
    rows = torch.tensor([[*pointers, far + block, -(far // block), 0]])
    f32 = triton_kernels.tl.float32
    triton_kernels.accumulate_kernel[(1,)](
        rows, torch.zeros(1, dtype=torch.int32), torch.tensor([2.5]), f32, f32, f32, False, True, BLOCK=block
    )
    assert (accum == 2.5).all()


def test_rows_beyond_31_bits_of_programs():
    """``first_block`` is 64 bits wide: two rows, the second at a block number no int32 holds."""
    block, far = 1024, 1 << 33
    accum, grad = torch.zeros(block), torch.ones(block)
    base = [0, grad.data_ptr() - 4 * block * far, accum.data_ptr() - 4 * block * far, 0, 0, 0]
    rows = torch.tensor([[0] * 9, [*base, block * far + 5, -far, 0]])
    f32 = triton_kernels.tl.float32
    triton_kernels.accumulate_kernel[(1,)](
        rows, torch.ones(1, dtype=torch.int32), torch.tensor([2.5]), f32, f32, f32, False, True, BLOCK=block
    )
    assert accum.tolist() == [2.5] * 5 + [0.0] * (block - 5)
