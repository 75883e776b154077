"""accumulate_in_backward(): exact sums, p.grad as the authority, hooks that come and go with the parameters."""

import copy
import gc
import io
import pickle
import warnings
import weakref

import pytest
import torch
from backwards import buffers_read_zero, gradients, is_alias, loss_with, run_backwards
from cases import DTYPES, SHAPES, SMALL_SHAPES
from harness import assert_same_run, copies, live_storages, mid_window_state, parameter, parameters, values
from oracle import Micro, Oracle, same_bits
from torch.utils.checkpoint import checkpoint

from fused_accum import FusedAccumAdamW

pytestmark = pytest.mark.filterwarnings("error")

LARGE = {"lr": 0.5, "weight_decay": 0.3}


def window(opt, params, oracle, count=3, absent=()):
    micros = gradients(params, count, absent)
    run_backwards(params, micros)
    oracle.window(micros)
    opt.step()
    oracle.check()
    assert all(p.grad is None for p in params)
    assert buffers_read_zero(opt)
    assert opt.pending == (0, 0.0)


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


# -- p.grad is the authority -------------------------------------------------------------------------------------


def clip_norm(params):
    torch.nn.utils.clip_grad_norm_(params, 0.1)


def clip_value(params):
    torch.nn.utils.clip_grad_value_(params, 0.01)


def replace(params):
    for n, p in enumerate(params):
        p.grad = torch.full_like(p.grad, 0.25 * (n + 1))


def discard_one(params):
    params[0].grad = None


def multiply(params):
    params[0].grad.mul_(3)
    params[1].grad = params[1].grad * 5


def zero_in_place(params):
    for p in params:
        p.grad.zero_()


def swap_storage(params):
    for p in params:
        p.grad.data = p.grad.data.clone().mul_(2)


EDITS = [clip_norm, clip_value, replace, discard_one, multiply, zero_in_place, swap_storage]


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
@pytest.mark.parametrize("when", ["before-step", "in-mid-window"])
def test_edits_of_p_grad_count(make, device, edit, when):
    """Against torch.optim.AdamW, to which the same is done."""
    params = parameters((65,), (13, 17), device=device)
    twins = copies(params)
    opt, stock = make(params, lr=0.1, weight_decay=0.3), torch.optim.AdamW(twins, lr=0.1, weight_decay=0.3)
    opt.accumulate_in_backward()
    for _ in range(3):
        micros = gradients(params, 2)
        for own in (params, twins):
            for k, micro in enumerate(micros):
                loss_with(own, micro.grads).backward()
                if k == 1 or when == "in-mid-window":
                    edit(own)
        opt.step()
        stock.step()
        stock.zero_grad()
        for p, q in zip(params, twins):
            assert (p in opt.state) == (q in stock.state)
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)
            for name in opt.state.get(p, {}):
                torch.testing.assert_close(opt.state[p][name], stock.state[q][name], rtol=1e-5, atol=1e-6)
    assert buffers_read_zero(opt) or edit in (discard_one, replace, swap_storage, multiply)


@pytest.mark.parametrize("how", ["model", "model-zeros", "optimizer", "optimizer-zeros", "by hand"])
def test_discarding_the_window(make, device, how):
    model = torch.nn.Linear(5, 7).to(device)
    params = list(model.parameters())
    opt = make(params, **LARGE)
    oracle = Oracle(opt)
    opt.accumulate_in_backward()
    for _ in range(2):
        run_backwards(params, [Micro([torch.full_like(p, float("nan")) for p in params])])
        assert opt.pending.microbatches == 1
        if how == "by hand":
            for p in params:
                p.grad = None
        else:
            (model if "model" in how else opt).zero_grad(set_to_none="zeros" not in how)
        assert opt.pending.microbatches == (1 if how == "model-zeros" else 0)
        window(opt, params, oracle)


def test_nothing_happens_after_a_discard(make, device):
    params = parameters((65,), device=device)
    opt = make(params)
    opt.accumulate_in_backward()
    run_backwards(params, gradients(params, 2))
    params[0].grad = None
    opt.step()
    assert not opt.state
    assert opt.pending == (0, 0.0)


def test_pending_forgets_a_window_that_others_discarded(make, device):
    model = torch.nn.Linear(5, 7).to(device)
    params = list(model.parameters())
    opt = make(params)
    opt.accumulate_in_backward()
    run_backwards(params, gradients(params, 2))
    model.zero_grad()
    run_backwards(params, gradients(params, 1))
    assert opt.pending.microbatches == 1
    params[0].grad = None  # a part only
    run_backwards(params, gradients(params, 1))
    assert opt.pending.microbatches == 2


def test_a_gradient_kept_from_a_discarded_micro_batch_survives(make, device):
    """As methods do that combine the gradients of several losses: torch's are independent tensors, so are these."""
    params = parameters((65,), (13, 17), device=device)
    opt = make(params, **LARGE)
    oracle = Oracle(opt)
    opt.accumulate_in_backward()
    for _ in range(3):
        first, second = gradients(params, 2)
        kept = []
        for micro in (first, second):
            loss_with(params, micro.grads).backward()
            kept.append([p.grad for p in params])
            opt.zero_grad()
        for p, a, b in zip(params, *kept):
            p.grad = a + b
        oracle.window([first, second])
        opt.step()
        oracle.check()


@pytest.mark.parametrize("unscale", [False, True], ids=["plain", "unscale-and-clip"])
@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler(make, device, unscale, fused):
    params = parameters((65,), (5,), device=device)
    twins = copies(params)
    opt, stock = make(params, lr=0.1, fused=fused), torch.optim.AdamW(twins, lr=0.1, fused=fused)
    opt.accumulate_in_backward()
    scalers = [torch.amp.GradScaler(device, init_scale=2.0**12, growth_interval=2) for _ in range(2)]
    for n in range(6):
        micros = gradients(params, 3)
        for o, scaler, own in zip((opt, stock), scalers, (params, twins)):
            for micro in micros:
                scaler.scale(loss_with(own, micro.grads)).backward()
            if n == 3:
                own[1].grad[2] = float("inf")
            if unscale:
                scaler.unscale_(o)
                torch.nn.utils.clip_grad_norm_(own, 0.5)
            scaler.step(o)
            scaler.update()
            o.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale()
    for p, q in zip(params, twins):
        assert float(opt.state[p]["step"]) == 5
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


# -- autograd's ways ---------------------------------------------------------------------------------------------


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


# -- parameters that come, go, freeze and move -------------------------------------------------------------------


def test_parameters_added_later(make, device):
    params = parameters((65,), (13, 17), device=device)
    opt = make(params[:1], **LARGE)
    oracle = Oracle(opt)
    opt.accumulate_in_backward()
    micros = gradients(params[:1], 1)
    run_backwards(params[:1], micros)
    opt.add_param_group({"params": params[1:], "weight_decay": 0.1})
    oracle.watch()
    more = gradients(params, 2)
    run_backwards(params, more)
    assert all(is_alias(opt, p) for p in params)
    oracle.window([Micro([*micros[0].grads, None]), *more])
    opt.step()
    oracle.check()
    window(opt, params, oracle)


def test_freezing_and_unfreezing(make, device):
    params = parameters((65,), (13, 17), device=device)
    params[1].requires_grad_(False)
    opt = make(params, **LARGE)
    oracle = Oracle(opt)
    opt.accumulate_in_backward()
    assert not params[1].requires_grad
    micros = gradients(params, 3, absent={(0, 1), (2, 0)})
    run_backwards(params, micros[:1])
    params[1].requires_grad_(True)
    run_backwards(params, micros[1:2])
    params[0].requires_grad_(False)  # in mid-window: it steps with what it has
    run_backwards(params, micros[2:])
    assert all(is_alias(opt, p) for p in params)
    oracle.window(micros)
    opt.step()
    oracle.check()


def test_parameters_replaced_in_the_groups(make, device):
    """As FSDP2 and accelerate do: the new ones get hooks at the next call, the old ones lose theirs."""
    old, new = parameters((65,), (65,), device=device)
    opt = make([old], **LARGE)
    opt.accumulate_in_backward()
    opt.param_groups[0]["params"][0] = new
    opt.step()
    assert not old._post_accumulate_grad_hooks
    run_backwards([new], gradients([new], 1))
    assert is_alias(opt, new)


@pytest.mark.parametrize("when", ["between", "in-mid-window"])
@pytest.mark.parametrize("to", [torch.bfloat16, torch.float64], ids=str)
def test_a_model_that_is_cast_later(make, device, when, to):
    model = torch.nn.Linear(5, 7).to(device)
    params = list(model.parameters())
    opt = make(params, lr=0.1)
    opt.accumulate_in_backward()
    micros = gradients(params, 2)
    run_backwards(params, micros[:1])
    if when == "between":
        opt.step()
    model.to(to)
    for p in params:
        opt.state.pop(p, None)
    run_backwards(params, micros[1:])
    wide = torch.float64 if to == torch.float64 else torch.float32
    for i, p in enumerate(params):
        first = micros[0].grads[i].to(to) if when == "in-mid-window" else 0
        torch.testing.assert_close(p.grad, (first + micros[1].grads[i].to(to)).to(wide), rtol=1e-2, atol=1e-2)
        assert is_alias(opt, p)
        assert p.grad.dtype == wide
    opt.step()
    assert all(p.grad is None and p.dtype == to for p in params)


def test_a_parameter_cast_under_its_window_is_refused(make, device):
    """Not its gradient with it, as module.to() does."""
    params = parameters((65,), device=device)
    opt = make(params)
    opt.accumulate_in_backward()
    run_backwards(params, gradients(params, 1))
    params[0].data = params[0].data.double()
    with pytest.raises(RuntimeError, match="must not be cast or moved in mid-window"):
        opt.step()


def test_a_second_owner_is_refused(make, device):
    shared, own, other = parameters((65,), (5,), (7,), device=device)
    first, second = make([shared, own]), make([("w", other), ("tied", shared)])
    handle = first.accumulate_in_backward()
    with pytest.raises(RuntimeError, match=r"'tied' is already accumulated in backward by another"):
        second.accumulate_in_backward()
    assert not other._post_accumulate_grad_hooks
    third = make([other])
    third.accumulate_in_backward()
    with pytest.raises(RuntimeError, match="another FusedAccumAdamW"):
        third.add_param_group({"params": [own]})
    assert len(third.param_groups) == 1
    run_backwards([shared], gradients([shared], 1))
    first.step()
    handle.remove()
    second = make([shared])
    second.accumulate_in_backward()


def test_an_owner_that_is_gone_does_not_count(make, device):
    params = parameters((65,), device=device)
    make(params).accumulate_in_backward()
    opt = make(params, **LARGE)
    opt.accumulate_in_backward()
    window(opt, params, Oracle(opt))


def test_installing_twice_and_with_explicit_micro_batches_pending(make, device):
    params = parameters((65,), device=device)
    opt = make(params)
    handle = opt.accumulate_in_backward()
    with pytest.raises(RuntimeError, match=r"remove\(\) the first"):
        opt.accumulate_in_backward()
    handle.remove()
    handle.remove()
    params[0].grad = torch.ones_like(params[0])
    opt.accumulate()
    with pytest.raises(RuntimeError, match=r"1 explicit micro-batch.*step\(\) or zero_grad\(\)"):
        opt.accumulate_in_backward()
    opt.step()
    opt.accumulate_in_backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_removal_restores_everything(make, device, dtype):
    params = parameters((65,), dtype=dtype, device=device)
    opt = make(params, **LARGE)
    oracle = Oracle(opt)
    for mid_window in (False, True):
        with opt.accumulate_in_backward():
            window(opt, params, oracle)
            micros = gradients(params, 2) if mid_window else []
            run_backwards(params, micros)
        assert not params[0]._post_accumulate_grad_hooks
        if mid_window:  # p.grad is still the window
            torch.nn.utils.clip_grad_norm_(params, 1e9)
            assert opt.pending.microbatches == 2
            oracle.window(micros)
            opt.step()
            oracle.check()
        assert params[0].grad_dtype == dtype
        (micro,) = gradients(params, 1)
        loss_with(params, micro.grads).backward()
        assert params[0].grad.dtype == dtype
        opt.accumulate(weight=3)  # explicit again
        oracle.window([micro])
        opt.step()
        oracle.check()


def test_installing_again_while_the_last_window_is_open(make, device):
    params = parameters((65,), dtype=torch.bfloat16, device=device)
    opt = make(params, **LARGE)
    oracle = Oracle(opt)
    micros = gradients(params, 2)
    with opt.accumulate_in_backward():
        run_backwards(params, micros[:1])
    with opt.accumulate_in_backward():
        run_backwards(params, micros[1:])
        assert opt.pending.microbatches == 2
        oracle.window(micros)
        opt.step()
        oracle.check()


@pytest.mark.parametrize("mid_window", [False, True])
def test_nothing_keeps_memory(make, device, mid_window):
    """Optimizer, parameters and buffers die without the garbage collector, whichever goes first."""
    gc.collect()
    gc.disable()
    try:
        for first in ("optimizer", "parameters"):
            params = parameters((512, 512), device=device)
            opt = make(params)
            handle = opt.accumulate_in_backward()
            run_backwards(params, gradients(params, 2))
            if not mid_window:
                opt.step()
            runs, tensors = weakref.ref(opt._run), weakref.ref(params[0])
            del handle
            if first == "optimizer":
                del opt
                assert runs() is None
                assert not params[0]._post_accumulate_grad_hooks
                del params
            else:
                del params, opt
            assert tensors() is None
            assert runs() is None
    finally:
        gc.enable()


# -- copies and checkpoints --------------------------------------------------------------------------------------


def through_pickle(opt):
    return pickle.loads(pickle.dumps(opt))


@pytest.mark.parametrize("copier", [copy.deepcopy, through_pickle], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("done", [0, 2], ids=["between", "in-mid-window"])
def test_a_copy_continues_once_its_hooks_are_installed(make, device, copier, done):
    params = parameters((65,), (13, 17), device=device)
    opt = make(params, **LARGE)
    opt.accumulate_in_backward()
    run_backwards(params, gradients(params, 2))
    opt.step()
    micros = gradients(params, 3)
    run_backwards(params, micros[:done])
    other = copier(opt)
    twins = other.param_groups[0]["params"]
    assert other.pending == opt.pending
    for call in (other.step, other.accumulate):
        with pytest.raises(RuntimeError, match=r"copy.*accumulate_in_backward\(\)"):
            call()
    other.accumulate_in_backward()
    for own in (params, twins):
        run_backwards(own, micros[done:])
    assert_same_run(opt, other)
    opt.step()
    other.step()
    assert_same_run(opt, other)


@pytest.mark.parametrize("into", ["in-backward", "explicit"])
@pytest.mark.parametrize("replaced", [False, True], ids=["alias", "replaced"])
def test_a_checkpoint_in_mid_window(make, device, into, replaced):
    params = parameters((65,), (13, 17), dtype=torch.bfloat16, device=device)
    opt = make(params, **LARGE)
    opt.accumulate_in_backward()
    micros = gradients(params, 4)
    run_backwards(params, micros[:2])
    if replaced:
        params[0].grad = params[0].grad.clone()
    file = io.BytesIO()
    torch.save(mid_window_state(opt), file)
    file.seek(0)
    twins = copies(params)
    other = make(twins, **LARGE)
    if into == "in-backward":
        other.accumulate_in_backward()
    other.load_state_dict(torch.load(file))
    assert other.pending == opt.pending == (2, 0.0)
    run_backwards(params, micros[2:])
    for micro in micros[2:]:
        loss_with(twins, micro.grads).backward()
        if into == "explicit":
            other.accumulate()
    opt.step()
    other.step()
    assert_same_run(opt, other)


def test_loading_drops_the_open_window(make, device):
    params = parameters((65,), device=device)
    opt = make(params, **LARGE)
    oracle = Oracle(opt)
    opt.accumulate_in_backward()
    saved = copy.deepcopy(opt.state_dict())
    run_backwards(params, gradients(params, 2))
    with pytest.warns(UserWarning, match="dropped 2"):
        opt.load_state_dict(saved)
    assert params[0].grad is None
    window(opt, params, oracle)


# -- the calls of explicit mode ----------------------------------------------------------------------------------


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
