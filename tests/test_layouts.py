"""Strides, storage offsets, shared storage: what is read and written is what the tensor shows, no byte more."""

from itertools import pairwise

import pytest
import torch
from cases import DTYPES, GRADIENT_LAYOUTS, LAYOUT_SHAPE, PARAMETER_LAYOUTS, WINDOWS
from harness import (
    buffers,
    give,
    in_layout,
    micro_batches,
    parameter,
    parameters,
    run_checked,
    run_window,
    surroundings,
    values,
)
from oracle import Micro, Oracle, within

pytestmark = pytest.mark.filterwarnings("error")


@pytest.mark.parametrize("grad_layout", GRADIENT_LAYOUTS)
@pytest.mark.parametrize("param_layout", PARAMETER_LAYOUTS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_pair_of_layouts(make, device, param_layout, grad_layout, dtype):
    dtype = DTYPES[dtype]
    p = parameter(values(LAYOUT_SHAPE, dtype, device), param_layout)
    plain = parameter(values((65,), dtype, device))
    opt = make([p, plain], lr=0.5, weight_decay=0.3)
    oracle = Oracle(opt)
    around, strides = surroundings(p), p.stride()
    for _ in range(2):
        micros = micro_batches([p, plain], WINDOWS["uneven"])
        for micro in micros:
            micro.grads[0] = in_layout(micro.grads[0], grad_layout)
        outside = [surroundings(m.grads[0]) for m in micros]
        run_checked(opt, oracle, micros)
        oracle.adopt()
        assert all(torch.equal(a, surroundings(m.grads[0])) for a, m in zip(outside, micros))
    assert torch.equal(around, surroundings(p))
    assert p.stride() == strides


@pytest.mark.parametrize("layout", PARAMETER_LAYOUTS)
def test_moments_and_buffer_show_the_parameters_shape(make, device, layout):
    p = parameter(values(LAYOUT_SHAPE, device=device), layout)
    opt = make([p], lr=0.5)
    oracle = Oracle(opt)
    micros = micro_batches([p], WINDOWS["uneven"])
    for micro in micros:
        p.grad = micro.grads[0]
        opt.accumulate(micro.scale)
    within("accum", buffers(opt)[0], oracle.accum(micros)[0], torch.float32)
    opt.step()
    state = opt.state[p]
    stock = torch.optim.AdamW([torch.nn.Parameter(p.detach())])
    stock.param_groups[0]["params"][0].grad = torch.zeros_like(p)
    stock.step()
    (theirs,) = stock.state.values()
    for name in ("exp_avg", "exp_avg_sq"):
        assert state[name].shape == p.shape
        assert state[name].stride() == theirs[name].stride()


@pytest.mark.parametrize("layout", ["transposed", "channels_last", "stepped", "misaligned"])
def test_layout_of_the_gradient_may_change_within_a_window(make, device, layout):
    p = parameter(values(LAYOUT_SHAPE, device=device), layout)
    opt = make([p], lr=0.5)
    oracle = Oracle(opt)
    micros = micro_batches([p], [(1 / 8, None)] * len(GRADIENT_LAYOUTS))
    for micro, grad_layout in zip(micros, GRADIENT_LAYOUTS):
        micro.grads[0] = in_layout(micro.grads[0], grad_layout)
    run_checked(opt, oracle, micros)


@pytest.mark.parametrize("layout", ["transposed", "sliced", "stepped", "misaligned"])
@pytest.mark.parametrize("shape", [(2, 3), (1, 7), (7, 1), (33, 65), (129, 513)], ids=str)
def test_strided_sizes(make, device, shape, layout):
    torch.set_num_threads(3)
    p = parameter(values(shape, device=device), layout)
    opt = make([p], lr=0.5)
    oracle = Oracle(opt)
    micros = micro_batches([p], WINDOWS["uneven"], layout="transposed" if layout != "transposed" else "stepped")
    run_checked(opt, oracle, micros)


@pytest.mark.parametrize("dims", [5, 6, 9])
def test_many_dimensions(make, device, dims):
    shape = (2,) * (dims - 1) + (3,)
    order = tuple(reversed(range(dims)))
    p = torch.nn.Parameter(values(shape, device=device).permute(order))
    opt = make([p], lr=0.5)
    oracle = Oracle(opt)
    micros = micro_batches([p], WINDOWS["sum"])
    micros[0].grads[0] = in_layout(micros[0].grads[0], "stepped")
    micros[1].grads[0] = micros[1].grads[0].sum(dim=2, keepdim=True).expand(p.shape)
    run_checked(opt, oracle, micros)


@pytest.mark.parametrize("offset", range(1, 17))
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_misalignment(make, device, dtype, offset):
    """Slices of one flat buffer, as flat-parameter trainers make them: vector heads and tails at any address."""
    flat = torch.randn(200).to(device, DTYPES[dtype])
    p = torch.nn.Parameter(flat[offset : offset + 83])
    opt = make([p], lr=0.5)
    oracle = Oracle(opt)
    around = surroundings(p)
    source = torch.randn(200).to(device, DTYPES[dtype])
    micros = [Micro([source[k : k + 83]], 0.5) for k in (17 - offset, 2 * offset)]
    run_checked(opt, oracle, micros)
    assert torch.equal(around, surroundings(p))


def test_chunks_of_one_gradient(make, device):
    """unbind/chunk/split views, as a fused qkv projection's backward gives."""
    params = parameters((4, 6), (4, 6), (4, 6), device=device)
    opt = make(params, lr=0.5)
    oracle = Oracle(opt)
    micros = [Micro(list(values((4, 18), device=device).chunk(3, dim=1)), 0.5) for _ in range(2)]
    run_checked(opt, oracle, micros)


# ---- shared storage --------------------------------------------------------------------------------------


class Shadow:
    """Sequential updates on shared memory, in float64: torch's for-loop AdamW on float64 twins of the views."""

    def __init__(self, storage: torch.Tensor, views, **hyper):
        self.flat = storage.detach().double().cpu()
        self.params = [torch.nn.Parameter(view(self.flat)) for view in views]
        self.opt = torch.optim.AdamW(self.params, foreach=False, **hyper)

    def window(self, micros):
        for i, p in enumerate(self.params):
            grads = [m.scale * m.grads[i].double().cpu() for m in micros if m.grads[i] is not None]
            p.grad = sum(grads) if grads else None
        self.opt.step()


ALIASES = {
    "identical": [lambda x: x[:640], lambda x: x[:640]],
    "transposed": [lambda x: x[:640].view(20, 32), lambda x: x[:640].view(20, 32).t()],
    "nested": [lambda x: x, lambda x: x[100:200], lambda x: x[150:700]],
    "shifted": [lambda x: x[:600], lambda x: x[1:601], lambda x: x[2:602]],
    "interleaved": [lambda x: x[::2], lambda x: x[1::2], lambda x: x[:500]],
}


def check_shared(make, device, n, views, window="N=1", tolerance=1e-5):
    """Three windows of parameters that are ``views`` of ``n`` elements."""
    flat = values((n,), device=device, spread=False)
    shadow = Shadow(flat, views, lr=0.3, weight_decay=0.3)
    params = [torch.nn.Parameter(view(flat)) for view in views]
    opt = make(params, lr=0.3, weight_decay=0.3)
    for _ in range(3):
        micros = micro_batches(params, WINDOWS[window])
        shadow.window(micros)
        run_window(opt, micros)
        torch.testing.assert_close(flat.double().cpu(), shadow.flat, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("window", ["N=1", "uneven"])
@pytest.mark.parametrize("views", ALIASES.values(), ids=ALIASES)
def test_parameters_that_share_storage_are_updated_one_after_the_other(make, device, views, window):
    check_shared(make, device, 700, views, window)


@pytest.mark.parametrize("n", [16_384, 32_768, 65_536])
def test_many_parameters_on_the_same_elements(make, device, n):
    """Parts of work that lie next to each other in the queue write the same memory."""
    torch.set_num_threads(3)
    check_shared(make, device, n, [lambda x: x] * 12, tolerance=1e-4)


def test_large_parameters_that_share_storage(make, device):
    """Beyond one chunk: a parallel update of both would race."""
    torch.set_num_threads(3)
    n = 300_000
    check_shared(make, device, n, [lambda x: x, lambda x: x[1:], lambda x: x[: n // 2]])


def test_parameters_that_come_to_share_storage(make, device):
    """The same first address, another stride: memory that was apart is shared from then on."""
    torch.set_num_threads(3)
    n = 200_000
    flat = values((2 * n,), device=device, spread=False)
    params = [torch.nn.Parameter(flat[:n]), torch.nn.Parameter(flat[n:])]
    opt = make(params, lr=0.3, weight_decay=0.3)
    run_window(opt, micro_batches(params, WINDOWS["N=1"]))
    for p in params:
        del opt.state[p]
    params[0].data = flat[::2]
    views = [lambda x: x[::2], lambda x: x[n:]]
    shadow = Shadow(flat, views, lr=0.3, weight_decay=0.3)
    for _ in range(10):
        micros = micro_batches(params, WINDOWS["N=1"])
        shadow.window(micros)
        run_window(opt, micros)
    torch.testing.assert_close(flat.double().cpu(), shadow.flat, rtol=1e-4, atol=1e-4)


def test_gradient_that_is_the_parameter_itself(make, device):
    """p.grad = p.detach(), as L2 experiments do: the gradient is read before the parameter is written."""
    (p,) = parameters((1000,), device=device)
    opt = make([p], lr=0.5, weight_decay=0.3)
    oracle = Oracle(opt)
    for _ in range(3):
        oracle.window([Micro([p.detach().clone()])])
        p.grad = p.detach()
        opt.step()
        oracle.check()


def test_neighbours_in_one_storage_do_not_touch_each_other(make, device):
    """Flat parameters whose views are adjacent but disjoint."""
    flat = values((1000,), device=device)
    cuts = [0, 1, 8, 71, 200, 203, 1000]
    params = [torch.nn.Parameter(flat[a:b]) for a, b in pairwise(cuts)]
    opt = make(params, lr=0.5, weight_decay=0.3)
    oracle = Oracle(opt)
    for _ in range(2):
        micros = micro_batches(params, WINDOWS["uneven"], absent={(k, 2) for k in range(3)})
        run_checked(opt, oracle, micros)


def test_a_parameter_listed_twice_is_one_parameter(make, device):
    """torch warns of a duplicate within a group; it is still counted and updated once."""
    (w,) = parameters((65,), device=device)
    other = torch.nn.Parameter(values((5,), device=device))
    with pytest.warns(UserWarning, match="duplicate"):
        opt = make([w, other, w], lr=0.5, weight_decay=0.3)
    oracle = Oracle(opt)
    for _ in range(2):
        micros = micro_batches([w, other], WINDOWS["uneven"])
        run_checked(opt, oracle, micros)
    assert sum(row.parameters for row in opt.backends) == 2


def test_a_parameter_in_two_groups_is_refused_as_in_torch(make, device):
    (w,) = parameters((5,), device=device)
    with pytest.raises(ValueError, match="more than one parameter group"):
        make([{"params": [w]}, {"params": [w]}])


def test_parameter_with_overlapping_elements_is_refused(make, device):
    w = torch.nn.Parameter(torch.zeros(1, device=device).expand(4))
    opt = make([w])
    w.grad = torch.ones(4, device=device)
    with pytest.raises(RuntimeError, match="clone"):
        opt.step()
    assert w.grad is not None


# ---- storage that changes between calls ------------------------------------------------------------------


def poison(x):
    x.fill_(float("nan"))


@pytest.mark.parametrize("when", ["between-windows", "mid-window"])
def test_data_swapped(make, device, when):
    """p.data = ... gives the same parameter other memory: pointers must not be remembered."""
    params = parameters((65,), (1000,), device=device)
    opt = make(params, lr=0.5)
    oracle = Oracle(opt)
    for _ in range(3):
        micros = micro_batches(params, WINDOWS["uneven"])
        oracle.window(micros)
        for k, micro in enumerate(micros):
            if k == (0 if when == "between-windows" else 1):
                for p in params:
                    old = p.data
                    p.data = p.data.clone()
                    poison(old)
            for p, g in zip(params, micro.grads):
                give(p, g)
            opt.step(scale=micro.scale) if k == 2 else opt.accumulate(micro.scale)
        oracle.check()


def test_state_tensors_replaced_between_windows(make, device):
    params = parameters((65,), device=device)
    opt = make(params, lr=0.5)
    oracle = Oracle(opt)
    for _ in range(3):
        micros = micro_batches(params, WINDOWS["N=1"])
        run_checked(opt, oracle, micros)
        state = opt.state[params[0]]
        for name in ("exp_avg", "exp_avg_sq", "step"):
            old = state[name]
            state[name] = old.clone()
            poison(old)


def test_gradient_memory_reused_by_the_allocator(make, device):
    """A freed gradient's address comes back for another shape, dtype or stride."""
    params = [*parameters((64,), (8, 8), device=device), *parameters((64,), dtype=torch.bfloat16, device=device)]
    opt = make(params, lr=0.5)
    oracle = Oracle(opt)
    pool = torch.empty(64 * 4, dtype=torch.uint8, device=device)
    for n in range(6):
        i = n % 3
        raw = pool[: 64 * params[i].element_size()].view(params[i].dtype)
        grad = raw.view(params[i].shape).t() if i == 1 else raw
        grad.copy_(values(params[i].shape, params[i].dtype, device))
        micro = Micro([None] * 3)
        micro.grads[i] = grad
        oracle.window([micro])
        run_window(opt, [micro])
        oracle.check()
        oracle.adopt()


def test_parameter_changes_layout_between_windows(make, device):
    """model.to(memory_format=channels_last) keeps the shape and changes the strides."""
    conv = torch.nn.Conv2d(4, 6, 3).to(device)
    params = list(conv.parameters())
    opt = make(params, lr=0.5)
    oracle = Oracle(opt)
    for memory_format in (torch.contiguous_format, torch.channels_last, torch.contiguous_format):
        conv.to(memory_format=memory_format)
        micros = micro_batches(params, WINDOWS["uneven"])
        run_checked(opt, oracle, micros)
