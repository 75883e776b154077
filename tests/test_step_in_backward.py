"""step_in_backward(): the explicit path's bits, parameter by parameter inside the last backward."""

from itertools import product

import pytest
import torch
from backwards import gradients, loss_with, run_backwards
from cases import DTYPES, SHAPES, SMALL_SHAPES
from harness import assert_same_run, copies, micro_batches, parameter, parameters, values
from oracle import Oracle, same_bits
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.filterwarnings("error")

LARGE = {"lr": 0.5, "weight_decay": 0.3}


def explicit(opt, params, micros):
    for k, micro in enumerate(micros):
        loss_with(params, micro.grads).backward()
        last = k == len(micros) - 1
        (opt.step if last else opt.accumulate)(scale=micro.scale, weight=micro.weight)


def in_backward(opt, params, micros):
    """Scales and weights by scale_loss, where there are any; accumulate() in explicit mode."""
    for k, micro in enumerate(micros):
        loss = loss_with(params, micro.grads)
        plain = micro.scale == 1.0 and micro.weight is None
        if k < len(micros) - 1 and opt._run.backward is None:
            loss.backward()
            opt.accumulate(micro.scale, weight=micro.weight)
        elif k < len(micros) - 1:
            (loss if plain else opt.scale_loss(loss, micro.scale, weight=micro.weight)).backward()
        else:
            with opt.step_in_backward():
                (loss if plain else opt.scale_loss(loss, micro.scale, weight=micro.weight)).backward()
    assert all(p.grad is None for p in params)
    assert opt.pending == (0, 0.0)


@pytest.mark.parametrize("mode", ["explicit", "in-backward"])
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_bit_equal_to_the_explicit_path(make, device, mode, count, dtype):
    params = parameters(*(SHAPES[name] for name in SMALL_SHAPES), dtype=dtype, device=device)
    opts = make(params, **LARGE), make(copies(params), **LARGE)
    if mode == "in-backward":
        opts[0].accumulate_in_backward()
    for n in range(3):
        # the second parameter has no gradient in the last micro-batch, the third none but there, the fourth none
        absent = {(count - 1, 1)} | {(k, 2) for k in range(count - 1)}
        absent |= {(k, 3) for k in range(count)} if n == 1 else set()
        micros = gradients(params, count, absent)
        in_backward(opts[0], params, micros)
        explicit(opts[1], opts[1].param_groups[0]["params"], micros)
        assert_same_run(*opts)


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        *product(["explicit", "in-backward"], [{"amsgrad": True}, {"maximize": True}]),
        ("explicit", {"accum_dtype": torch.bfloat16}),
        ("in-backward", {"accum_dtype": torch.bfloat16}),
    ],
    ids=str,
)
def test_options(make, device, mode, options):
    params = parameters((65,), (13, 17), device=device)
    opts = make(params, **LARGE, **options), make(copies(params), **LARGE, **options)
    if mode == "in-backward":
        opts[0].accumulate_in_backward()
    for _ in range(2):
        micros = gradients(params, 3)
        in_backward(opts[0], params, micros)
        explicit(opts[1], opts[1].param_groups[0]["params"], micros)
        assert_same_run(*opts)


@pytest.mark.parametrize("mode", ["explicit", "in-backward"])
@pytest.mark.parametrize("window", [[(0.5, None), (0.25, None)], [(1.0, 3), (1.0, 7)], [(2.0, 5)]], ids=str)
def test_scales_and_weights(make, device, mode, window):
    params = parameters((65,), (13, 17), device=device)
    opt = make(params, **LARGE)
    oracle = Oracle(opt)
    if mode == "in-backward":
        opt.accumulate_in_backward()
    for _ in range(2):
        micros = micro_batches(params, window)
        in_backward(opt, params, micros)
        oracle.window(micros)
        oracle.check()


@pytest.mark.parametrize("layout", ["transposed", "stepped", "misaligned"])
def test_strided_parameters(make, device, layout):
    params = [parameter(values((6, 5), device=device), layout), parameter(values((6, 5), device=device))]
    opts = make(params, **LARGE), make(copies(params), **LARGE)
    opts[0].accumulate_in_backward()
    for _ in range(2):
        micros = gradients(params, 3)
        in_backward(opts[0], params, micros)
        explicit(opts[1], opts[1].param_groups[0]["params"], micros)
        assert_same_run(*opts)


def test_each_parameter_moves_as_soon_as_its_gradient_is_complete(make, device):
    params = parameters((65,), (13, 17), device=device)
    opt = make(params, **LARGE)
    opt.accumulate_in_backward()
    run_backwards(params, gradients(params, 1))
    before = [p.detach().clone() for p in params]
    seen = []
    params[1].register_hook(lambda _: seen.append((same_bits(params[0], before[0]), params[0].grad)))
    with opt.step_in_backward():
        run_backwards(params, gradients(params, 1))
    assert seen == [(False, None)]
    assert not same_bits(params[1], before[1])


@pytest.mark.parametrize("wrap", ["plain", "checkpoint"])
def test_a_tied_weight_moves_after_its_last_use(make, device, wrap):
    weights = parameters((5, 5), (5, 5), device=device)
    own, twins = copies(weights), copies(weights)
    opt, other = make(own, lr=0.1), make(twins, lr=0.1)
    opt.accumulate_in_backward()

    def loss(params, x):
        for w in (params[0], params[1], params[0]):
            apply = lambda x, w=w: torch.tanh(x @ w)  # noqa: E731
            x = checkpoint(apply, x, use_reentrant=False) if wrap == "checkpoint" else apply(x)
        return x.square().sum()

    for _ in range(2):
        xs = [values((4, 5), device=device) for _ in range(3)]
        for k, x in enumerate(xs):
            loss(twins, x).backward()
            other.step() if k == 2 else other.accumulate()
            if k < 2:
                loss(own, x).backward()
        with opt.step_in_backward():
            loss(own, xs[2]).backward()
        assert_same_run(opt, other)


def test_edits_before_the_last_backward_count(make, device):
    params = parameters((65,), (13, 17), device=device)
    opts = make(params, **LARGE), make(copies(params), **LARGE)
    micros = gradients(params, 2)
    for opt, inside in zip(opts, (True, False)):
        own = opt.param_groups[0]["params"]
        opt.accumulate_in_backward()
        run_backwards(own, micros[:1])
        own[0].grad.mul_(3)
        own[1].grad = own[1].grad * 5
        if inside:
            with opt.step_in_backward():
                run_backwards(own, micros[1:])
        else:
            run_backwards(own, micros[1:])
            opt.step()
    assert_same_run(*opts)


def test_hooks_schedulers_and_an_empty_context(make, device):
    params = parameters((65,), device=device)
    opt = make(params, **LARGE)
    oracle = Oracle(opt)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5)
    calls = []
    opt.register_step_post_hook(lambda *_: calls.append(1))
    opt.accumulate_in_backward()
    for _ in range(2):
        micros = gradients(params, 2)
        in_backward(opt, params, micros)
        oracle.window(micros)
        oracle.check()
        scheduler.step()
    micros = gradients(params, 2)
    run_backwards(params, micros)
    with opt.step_in_backward():
        pass
    oracle.window(micros)
    oracle.check()
    opt.step()  # nothing left
    oracle.check()
    assert len(calls) == 4
