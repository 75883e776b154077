"""accumulate_in_backward(): exact sums, in all ways of autograd, and what the calls of explicit mode do then."""

import gc
import warnings

import pytest
import torch
from backwards import gradients, is_alias, loss_with, run_backwards, window
from cases import DTYPES, SHAPES, SMALL_SHAPES
from harness import assert_same_run, copies, live_storages, parameter, parameters, values
from oracle import Oracle, same_bits
from torch.utils.checkpoint import checkpoint

from fused_accum import FusedAccumAdamW

pytestmark = pytest.mark.filterwarnings("error")

LARGE = {"lr": 0.5, "weight_decay": 0.3}


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("options", [{}, {"accum_dtype": torch.bfloat16}, {"amsgrad": True}], ids=str)
def test_windows(make, device, dtype, options):
    params = parameters(*(SHAPES[name] for name in SMALL_SHAPES), dtype=dtype, device=device)
    opt = make(params, **LARGE, **options)
    oracle = Oracle(opt, accum_dtype=options.get("accum_dtype", torch.float32))
    with opt.accumulate_in_backward():
        for n in range(3):
            # one parameter joins late, one misses a micro-batch, one a whole window
            absent = {(0, 1), (1, 2)} | ({(k, 3) for k in range(3)} if n == 1 else set())
            window(opt, params, oracle, absent=absent)


@pytest.mark.parametrize("count", [1, 2, 8])
def test_bit_equal_to_the_explicit_path(make, device, count):
    params = parameters((65,), (13, 17), (), device=device)
    opts = make(params, **LARGE), make(copies(params), **LARGE)
    opts[0].accumulate_in_backward()
    twins = opts[1].param_groups[0]["params"]
    for _ in range(3):
        micros = gradients(params, count)
        run_backwards(params, micros)
        for k, micro in enumerate(micros):
            loss_with(twins, micro.grads).backward()
            opts[1].step() if k == count - 1 else opts[1].accumulate()
        opts[0].step()
        assert_same_run(*opts)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_p_grad_is_the_buffer(make, device, dtype):
    params = parameters((65,), (13, 17), dtype=dtype, device=device)
    opt = make(params)
    handle = opt.accumulate_in_backward()
    for _ in range(2):
        for k, micro in enumerate(gradients(params, 3), 1):
            loss_with(params, micro.grads).backward()
            assert all(is_alias(opt, p) for p in params)
            assert opt.pending == (k, 0.0)
        kept = [p.grad for p in params]
        opt.step()
        assert all(not g.any() for g in kept)
    handle.remove()


def test_gradients_are_freed_one_by_one(make, device):
    """After the first window no backward leaves anything behind but the buffers."""
    params = parameters((256, 256), (256, 256), device=device)
    opt = make(params)
    opt.accumulate_in_backward()
    window(opt, params, Oracle(opt))
    gc.collect()
    before = live_storages().keys()
    loss_with(params, [torch.ones_like(p) for p in params]).backward()
    assert live_storages().keys() <= before


@pytest.mark.parametrize("layout", ["transposed", "stepped", "misaligned"])
def test_strided_parameters(make, device, layout):
    params = [parameter(values((6, 5), device=device), layout)]
    opt = make(params, **LARGE)
    opt.accumulate_in_backward()
    window(opt, params, Oracle(opt))


# -- autograd's ways -------------------------------------------------------------------------------------------


def chain(params, x, wrap):
    for w in params:
        x = wrap(lambda x, w=w: torch.tanh(x @ w), x)
    return (x * x).sum()


WRAPS = {
    "plain": lambda f, x: f(x),
    "reentrant": lambda f, x: checkpoint(f, x, use_reentrant=True),
    "non-reentrant": lambda f, x: checkpoint(f, x, use_reentrant=False),
}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
@pytest.mark.parametrize("tied", [False, True])
def test_checkpoints_and_tied_weights(make, device, wrap, tied):
    """Against plain backwards, whose sums torch.optim.AdamW steps from."""
    weights = parameters((5, 5), (5, 5), device=device)
    own, twins = copies(weights), copies(weights)
    opt = make(own, lr=0.1)
    stock = torch.optim.AdamW(twins, lr=0.1)
    opt.accumulate_in_backward()
    for _ in range(2):
        for k in range(3):
            x = values((4, 5), device=device).requires_grad_()
            for params in (own, twins):
                used = [params[0], params[1], params[0]] if tied else params
                chain(used, x, wrap if params is own else WRAPS["plain"]).backward()
            assert opt.pending.microbatches == k + 1
        for p, q in zip(own, twins):
            torch.testing.assert_close(p.grad, q.grad)
            assert is_alias(opt, p)
        opt.step()
        stock.step()
        stock.zero_grad()
    for p, q in zip(own, twins):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def test_retain_graph_adds_twice(make, device):
    params = parameters((65,), device=device)
    opt = make(params, **LARGE)
    oracle = Oracle(opt)
    opt.accumulate_in_backward()
    (micro,) = gradients(params, 1)
    loss = loss_with(params, micro.grads)
    loss.backward(retain_graph=True)
    loss.backward()
    assert opt.pending.microbatches == 2
    oracle.window([micro, micro])
    opt.step()
    oracle.check()


def test_a_gradient_that_requires_grad_is_refused(make, device):
    params = parameters((65,), device=device)
    opt = make([("w", params[0])])
    opt.accumulate_in_backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(RuntimeError, match=r"'w' requires grad.*create_graph"):
            (params[0] ** 2).sum().backward(create_graph=True)


def test_a_sparse_gradient_is_refused_by_name(make, device):
    table = torch.nn.Embedding(9, 4, sparse=True, device=device)
    opt = make([("table", table.weight)])
    opt.accumulate_in_backward()
    with pytest.raises(TypeError, match="'table' is sparse"):
        table(torch.tensor([1, 2], device=device)).sum().backward()


def test_autograd_grad_leaves_the_window_alone(make, device):
    params = parameters((65,), device=device)
    opt = make(params)
    opt.accumulate_in_backward()
    torch.autograd.grad((params[0] ** 2).sum(), params)
    assert opt.pending == (0, 0.0)
    assert params[0].grad is None


# -- the calls of explicit mode --------------------------------------------------------------------------------


def test_accumulate_only_counts(make, device):
    params = parameters((65,), device=device)
    opt = make(params, **LARGE)
    oracle = Oracle(opt)
    opt.accumulate_in_backward()
    micros = gradients(params, 3)
    for micro in micros:
        loss_with(params, micro.grads).backward()
        opt.accumulate()
    assert opt.pending.microbatches == 3
    for call in (opt.accumulate, opt.step):
        for factor in ({"scale": 0.5}, {"weight": 3}):
            with pytest.raises(ValueError, match="scale_loss"):
                call(**factor)
    with pytest.raises(RuntimeError, match=r"zero_grad\(\)"):
        opt.discard_microbatch()
    oracle.window(micros)
    opt.step()
    oracle.check()


def test_a_closure_runs_the_backward(make, device):
    params = parameters((65,), device=device)
    opt = make(params, **LARGE)
    oracle = Oracle(opt)
    opt.accumulate_in_backward()
    micros = gradients(params, 2)

    def closure():
        opt.zero_grad()
        run_backwards(params, micros)
        return 7

    oracle.window(micros)
    assert opt.step(closure) == 7
    oracle.check()


def test_through_the_wrapper_of_lightning(make, device):
    """It runs the methods with another self, where attributes written would be lost."""
    params = parameters((65,), device=device)
    opt = make(params, **LARGE)

    class Wrapper(FusedAccumAdamW):
        def __init__(self, inner):
            self.__dict__.update({k: v for k, v in inner.__dict__.items() if k not in ("step", "__del__")})
            self._inner = inner

    wrapped = Wrapper(opt)
    oracle = Oracle(opt)
    wrapped.accumulate_in_backward()
    micros = gradients(params, 2)
    run_backwards(params, micros)
    assert opt.pending.microbatches == 2
    oracle.window(micros)
    wrapped.step()
    oracle.check()


def test_values_same_bits_in_any_thread(make, device):
    """A backward in another thread adds to the same window."""
    import threading

    params = parameters((65,), device=device)
    opt = make(params, **LARGE)
    opt.accumulate_in_backward()
    micros = gradients(params, 2)
    thread = threading.Thread(target=run_backwards, args=(params, micros))
    thread.start()
    thread.join()
    assert opt.pending.microbatches == 2
    assert same_bits(params[0].grad, micros[0].grads[0] + micros[1].grads[0])
