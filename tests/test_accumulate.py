"""accumulate(): equation (1), what it consumes and what it leaves alone."""

import pytest
import torch
from cases import DTYPES, SHAPES, SMALL_SHAPES, WINDOWS
from harness import (
    buffers,
    give,
    in_layout,
    live_storages,
    micro_batches,
    parameter,
    parameters,
    run_checked,
    run_window,
    values,
)
from oracle import Oracle, same_bits, within

pytestmark = pytest.mark.filterwarnings("error")


def accumulate_all(opt, params, micros):
    for micro in micros:
        for p, g in zip(params, micro.grads):
            give(p, g)
        opt.accumulate(micro.scale, weight=micro.weight)


def check_buffers(opt, oracle, micros, dtype):
    for i, (got, want) in enumerate(zip(buffers(opt), oracle.accum(micros), strict=True)):
        if want is None:
            assert got is None, f"parameter {i} has a buffer but no contribution"
        else:
            within(f"accum of parameter {i}", got, want, dtype)


@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
def test_buffers_hold_the_scaled_sum(make, device, window):
    params = parameters(*(SHAPES[name] for name in SMALL_SHAPES), device=device)
    opt = make(params)
    oracle = Oracle(opt)
    # The first parameter with elements misses one micro-batch, the last one has a gradient in the last only.
    absent = {(0, 1)} | {(k, len(params) - 1) for k in range(len(window) - 1)}
    micros = micro_batches(params, window, absent=absent)
    for n in range(1, len(micros) + 1):
        accumulate_all(opt, params, micros[n - 1 : n])
        check_buffers(opt, oracle, micros[:n], torch.float32)
    assert opt.pending.microbatches == len(window)
    assert opt.pending.weight == pytest.approx(sum(w or 0 for _, w in window))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_size_and_dtype(make, device, shape, dtype):
    torch.set_num_threads(3)
    p = torch.nn.Parameter(values(shape, dtype, device, spread=False))
    opt = make([p])
    oracle = Oracle(opt)
    micros = micro_batches([p], WINDOWS["uneven"])
    accumulate_all(opt, [p], micros)
    check_buffers(opt, oracle, micros, torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("grad_dtype", DTYPES.values(), ids=lambda d: f"grad-{d}".replace("torch.", ""))
@pytest.mark.parametrize("param_dtype", DTYPES.values(), ids=lambda d: f"param-{d}".replace("torch.", ""))
@pytest.mark.parametrize("accum_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_every_pair_of_dtypes(make, device, accum_dtype, param_dtype, grad_dtype):
    params = parameters((7,), (65,), (13, 17), dtype=param_dtype, device=device)
    opt = make(params, accum_dtype=accum_dtype)
    oracle = Oracle(opt, accum_dtype=accum_dtype)
    micros = micro_batches(params, WINDOWS["uneven"], dtype=grad_dtype)
    accumulate_all(opt, params, micros)
    check_buffers(opt, oracle, micros, torch.float64 if param_dtype == torch.float64 else accum_dtype)


def test_first_contribution_does_not_read_the_buffer(make, device):
    """A buffer that held NaN and inf starts the next window like a new one, whether discarded or stepped."""
    params = parameters((65,), (17,), device=device)
    opt = make(params)
    accumulate_all(opt, params, micro_batches(params, WINDOWS["sum"]))
    for p in params:
        p.grad = torch.full_like(p, float("nan"))
        p.grad[0] = float("inf")
    opt.accumulate()
    with pytest.warns(UserWarning, match="3"):
        opt.zero_grad()
    micros = micro_batches(params, WINDOWS["mean-of-4"])
    accumulate_all(opt, params, micros)
    check_buffers(opt, Oracle(opt), micros, torch.float32)


def test_nan_and_inf_arrive_in_the_buffer(make, device):
    (p,) = parameters((65,), device=device)
    opt = make([p])
    for bad in (1.0, float("nan"), float("inf"), -float("inf")):
        p.grad = torch.ones_like(p)
        p.grad[int(p.numel() * 0.5)] = bad
        opt.accumulate()
        (buffer,) = buffers(opt)
        assert (buffer.isfinite().sum() == p.numel() - (0 if bad == 1.0 else 1)).item()


def test_second_call_without_a_backward_adds_nothing(make, device):
    params = parameters((65,), (), device=device)
    opt = make(params)
    accumulate_all(opt, params, micro_batches(params, [(0.5, 2.0)]))
    before, pending = [b.clone() for b in buffers(opt)], opt.pending
    opt.accumulate(3.0, weight=7.0)
    assert all(same_bits(a, b) for a, b in zip(before, buffers(opt)))
    assert opt.pending == pending == (1, 2.0)


def test_without_any_gradient_nothing_is_counted(make, device):
    params = parameters((65,), device=device)
    opt = make(params)
    with pytest.warns(UserWarning, match=r"accumulate\(\) found no gradient"):
        opt.accumulate(0.5)
    opt.accumulate(weight=4)
    opt.step(weight=3)
    assert opt.pending == (0, 0.0)
    assert len(opt.state) == 0
    accumulate_all(opt, params, micro_batches(params, [(1.0, None)]))  # no weight recorded: not a mix
    assert opt.pending == (1, 0.0)


def test_gradient_shared_by_two_parameters(make, device):
    params = parameters((13, 17), (13, 17), device=device)
    opt = make(params)
    shared = values((13, 17), device=device)
    for _ in range(2):
        params[0].grad = params[1].grad = shared
        opt.accumulate(0.5)
    assert same_bits(*buffers(opt))
    torch.testing.assert_close(buffers(opt)[0], shared)


def test_gradient_that_is_a_view_of_another_tensor_is_not_written(make, device):
    """autograd may hand out views (of a saved output, of a flat bucket)."""
    (p,) = parameters((64,), device=device)
    flat = values((200,), device=device)
    before = flat.clone()
    opt = make([p], lr=0.5)
    p.grad = flat[3:67]
    opt.accumulate()
    p.grad = flat[100:164]
    opt.step()
    assert same_bits(flat, before)


def test_conjugate_and_negative_views_are_read_as_they_look(make, device):
    """`.imag` of a conjugated tensor is lazily negated: its bits are not its values. So may a contiguous one be."""
    (p,) = parameters((9,), device=device)
    opt = make([p])
    for n, contiguous in enumerate((False, True), 1):
        strided = torch.complex(values((9,)), torch.arange(9.0)).to(device).conj().imag
        p.grad = torch._neg_view(torch.arange(9.0, device=device)) if contiguous else strided
        assert p.grad.is_neg()
        opt.accumulate()
        torch.testing.assert_close(buffers(opt)[0].cpu(), -n * torch.arange(9.0), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["python", "numpy", "fp32", "fp64", "bf16", "int64"])
def test_scale_and_weight_may_be_tensors(make, device, kind):
    import numpy

    convert = {
        "python": float,
        "numpy": numpy.float32,
        "fp32": lambda x: torch.tensor(float(x), device=device),
        "fp64": lambda x: torch.tensor(float(x), device=device, dtype=torch.float64),
        "bf16": lambda x: torch.tensor(float(x), device=device, dtype=torch.bfloat16),
        "int64": lambda x: torch.tensor(int(x), device=device),
    }[kind]
    runs = []
    for number in (float, convert):
        torch.manual_seed(1)
        params = parameters((65,), device=device)
        opt = make(params, lr=0.5)
        window = [(number(2), number(3)), (number(1), number(5))]
        run_window(opt, micro_batches(params, window))
        runs.append(params[0])
    assert same_bits(*runs)


def test_requires_grad_is_not_needed_for_a_gradient_to_count(make, device):
    """As in torch, presence is `p.grad is not None`."""
    (p,) = parameters((7,), device=device)
    p.requires_grad_(False)
    opt = make([p])
    p.grad = torch.ones_like(p)
    opt.accumulate()
    assert opt.pending.microbatches == 1
    torch.testing.assert_close(buffers(opt)[0], torch.ones_like(p), rtol=0, atol=0)


def live_bytes() -> int:
    return sum(storage.nbytes() for storage in live_storages().values())


def test_no_buffer_without_accumulate(make, device):
    """A plain step allocates moments only; the first accumulate() then adds exactly the buffer."""
    shape, size = (512, 512), 4 * 512 * 512
    p = torch.nn.Parameter(torch.zeros(shape, device=device))
    opt = make([p])
    start = live_bytes()
    for _ in range(2):
        p.grad = torch.ones_like(p)
        opt.step()
    assert live_bytes() - start == pytest.approx(2 * size, rel=0.01)
    p.grad = torch.ones_like(p)
    opt.accumulate()
    assert live_bytes() - start == pytest.approx(3 * size, rel=0.01)


def test_buffers_only_for_parameters_with_a_contribution(make, device):
    big = torch.nn.Parameter(torch.zeros(512, 512, device=device))
    frozen = torch.nn.Parameter(torch.zeros(512, 512, device=device), requires_grad=False)
    small = torch.nn.Parameter(torch.zeros(8, device=device))
    opt = make([big, frozen, small])
    start = live_bytes()
    small.grad = torch.ones_like(small)
    opt.accumulate()
    assert live_bytes() - start < 65536
    assert buffers(opt)[:2] == [None, None]


def test_buffers_do_not_move_while_pending(make, device):
    """A buffer found by one backward is still the buffer at the step (design section 5)."""
    params = parameters((1000,), (70,), (0,), device=device)
    opt = make(params)
    oracle = Oracle(opt)
    micros = micro_batches(params, WINDOWS["mean-of-4"], absent={(0, 1), (1, 1), (0, 2)})
    accumulate_all(opt, params, micros)  # the second and third parameter get theirs later
    check_buffers(opt, oracle, micros, torch.float32)


@pytest.mark.parametrize("position", [0, 1, 2])
def test_empty_tensor_in_every_position(make, device, position):
    shapes = [(65,), (33,)]
    shapes.insert(position, (0,))
    params = parameters(*shapes, device=device)
    opt = make(params, lr=0.3)
    oracle = Oracle(opt)
    micros = micro_batches(params, WINDOWS["sum"])
    run_checked(opt, oracle, micros)


def test_only_empty_tensors(make, device):
    params = parameters((0,), (3, 0, 5), device=device)
    opt = make(params)
    run_window(opt, micro_batches(params, WINDOWS["sum"]))
    assert [float(opt.state[p]["step"]) for p in params] == [1.0, 1.0]


def test_strided_parameter_keeps_its_buffer_in_its_own_order(make, device):
    p = parameter(values((6, 5), device=device), "transposed")
    opt = make([p])
    g = values((6, 5), device=device)
    p.grad = in_layout(g, "stepped")
    opt.accumulate()
    torch.testing.assert_close(buffers(opt)[0], g, rtol=0, atol=0)
