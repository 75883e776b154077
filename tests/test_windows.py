"""Windows: tails, weights, what is counted, what is discarded, what is warned of."""

import warnings

import pytest
import torch
from cases import WINDOWS
from harness import assert_same_run, buffers, micro_batches, parameters, put, run_window
from oracle import Oracle, same_bits

pytestmark = pytest.mark.filterwarnings("error")


def messages(record) -> list[str]:
    return [str(w.message) for w in record]


# ---- counting --------------------------------------------------------------------------------------------


def test_pending_counts_microbatches_with_a_gradient(make, device):
    params = parameters((5,), (3,), device=device)
    opt = make(params)
    assert opt.pending == (0, 0.0)
    assert opt.pending._fields == ("microbatches", "weight")
    for n in range(1, 4):
        params[n % 2].grad = torch.ones_like(params[n % 2])
        opt.accumulate(weight=2.5)
        assert opt.pending == (n, 2.5 * n)
    opt.accumulate(weight=9)
    assert opt.pending == (3, 7.5)
    opt.step()
    assert opt.pending == (0, 0.0)


def test_pending_cannot_be_assigned(make, device):
    opt = make(parameters((5,), device=device))
    with pytest.raises(AttributeError):
        opt.pending = (1, 1.0)


def test_weights_are_summed_in_float64(make, device):
    params = parameters((5,), device=device)
    opt = make(params, lr=0.5)
    for weight in (2**24, 1, 1, 1):
        params[0].grad = torch.ones_like(params[0])
        opt.accumulate(weight=weight)
    assert opt.pending.weight == 2**24 + 3


# ---- tails and weights -----------------------------------------------------------------------------------


def test_short_window_without_weights_is_the_sum_of_what_came(make, device):
    """K=4 with scale 1/4, but 2 micro-batches came: their scaled sum, and a warning that says how to do better."""
    params = parameters((65,), device=device)
    opt = make(params, lr=0.5)
    oracle = Oracle(opt)
    micros = micro_batches(params, WINDOWS["mean-of-4"])
    oracle.window(micros)
    run_window(opt, micros)
    for micro in micros[:2]:
        put(params, micro)
        opt.accumulate(0.25)
    oracle.window(micros[:2])
    with pytest.warns(UserWarning, match="weight="):
        opt.step()
    oracle.check()


def test_short_window_with_weights_is_the_mean_of_what_came(make, device):
    params = parameters((65,), device=device)
    opt = make(params, lr=0.5)
    oracle = Oracle(opt)
    for count in (4, 2, 1, 4):
        micros = micro_batches(params, [(1.0, 1)] * count)
        oracle.window(micros)
        run_window(opt, micros)
        oracle.check()
        mean = sum(m.grads[0].double() for m in micros) / count
        if oracle.cells[params[0]].step == 1:
            torch.testing.assert_close(opt.state[params[0]]["exp_avg"].double(), 0.1 * mean, rtol=1e-5, atol=1e-7)


def test_weights_do_not_warn_of_uneven_windows(make, device):
    params = parameters((65,), device=device)
    opt = make(params, lr=0.5)
    for window in ("tokens", "tokens-scaled", "tokens-N=1", "tokens-zero"):
        run_window(opt, micro_batches(params, WINDOWS[window]))  # warnings are errors here


def test_weight_scale_and_divisor_do_not_change_the_mean(make, device):
    """Only ratios of weights matter: tokens, millions of tokens, fractions."""
    runs = []
    for unit in (1.0, 2.0**20, 2.0**-30):
        torch.manual_seed(2)
        params = parameters((65,), device=device)
        opt = make(params, lr=0.5)
        run_window(opt, micro_batches(params, [(1.0, 3 * unit), (1.0, 5 * unit)]))
        runs.append(params[0])
    assert same_bits(runs[0], runs[1])
    assert same_bits(runs[0], runs[2])


def test_zero_weight_skips_even_nan(make, device):
    params = parameters((65,), (5,), device=device)
    opt = make(params, lr=0.5, weight_decay=0.5)
    oracle = Oracle(opt)
    micros = micro_batches(params, [(1.0, 2), (1.0, 0), (1.0, 3)], absent={(0, 1), (2, 1)})
    for g in micros[1].grads:
        g.fill_(float("nan"))
    for fold in (True, False):
        oracle.window(micros)
        run_window(opt, micros, fold=fold)
        oracle.check()
    assert params[1] not in opt.state  # its only gradient had weight 0: no contribution


@pytest.mark.parametrize("kind", ["scale", "weight", "weight-tensor"])
def test_zero_for_the_last_microbatch(make, device, kind):
    params = parameters((65,), (5,), device=device)
    opt = make(params, lr=0.5)
    oracle = Oracle(opt)
    last = {
        "scale": (0.0, None), "weight": (1.0, 0), "weight-tensor": (1.0, torch.tensor(0.0, device=device)),
    }[kind]  # fmt: skip
    micros = micro_batches(params, [(1.0, None if kind == "scale" else 4), last], absent={(0, 1)})
    for g in micros[1].grads:
        g.fill_(float("nan"))
    oracle.window(micros)
    run_window(opt, micros)
    oracle.check()
    assert params[0].isfinite().all()
    assert params[1] not in opt.state


def test_scale_zero_counts_as_a_microbatch(make, device):
    params = parameters((65,), device=device)
    opt = make(params)
    params[0].grad = torch.full_like(params[0], float("nan"))
    opt.accumulate(0.0)
    assert opt.pending.microbatches == 1
    assert params[0].grad is None
    assert buffers(opt) == [None]


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("count", [1, 3])
def test_window_of_weight_zero_updates_nothing_and_warns(make, device, count, fold):
    params = parameters((65,), (5,), device=device)
    opt = make(params, lr=0.5, weight_decay=0.5)
    oracle = Oracle(opt)
    warm = micro_batches(params, WINDOWS["tokens"])
    oracle.window(warm)
    run_window(opt, warm)
    micros = micro_batches(params, [(1.0, 0)] * count)
    micros[0].grads[0].fill_(float("nan"))
    oracle.window(micros)
    with pytest.warns(UserWarning, match="weight") as record:
        run_window(opt, micros, fold=fold)
    assert len(record) == 1
    oracle.check()
    assert opt.pending == (0, 0.0)
    more = micro_batches(params, WINDOWS["tokens"])
    oracle.window(more)
    run_window(opt, more)
    oracle.check()


def test_window_of_weight_zero_on_a_fresh_optimizer_makes_no_state(make, device):
    params = parameters((65,), device=device)
    opt = make(params, lr=0.5)
    with pytest.warns(UserWarning, match="weight"):
        run_window(opt, micro_batches(params, [(1.0, 0.0)]))
    assert len(opt.state) == 0


def test_tiny_and_huge_weights(make, device):
    params = parameters((65,), device=device)
    opt = make(params, lr=0.5)
    oracle = Oracle(opt)
    for weights in ([1e-12, 3e-12], [1e12, 5e11], [1e-6, 1e6]):
        micros = micro_batches(params, [(1.0, w) for w in weights])
        oracle.window(micros)
        run_window(opt, micros)
        oracle.check()


# ---- mixing ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [None, 3.0])
@pytest.mark.parametrize("call", ["accumulate", "step"])
def test_mixing_weights_and_none_raises(make, device, first, call):
    params = parameters((65,), device=device)
    opt = make(params)
    put(params, micro_batches(params, [(1.0, None)])[0])
    opt.accumulate(weight=first)
    put(params, micro_batches(params, [(1.0, None)])[0])
    before, grad = [b.clone() for b in buffers(opt)], params[0].grad
    with pytest.raises(ValueError, match=r"weight"):
        getattr(opt, call)(weight=None if first else 2.0)
    assert params[0].grad is grad
    assert all(map(same_bits, before, buffers(opt)))
    assert opt.pending == (1, first or 0.0)
    getattr(opt, call)(weight=first)  # the way out


@pytest.mark.parametrize("first", [None, 3.0])
def test_step_alone_needs_no_weight(make, device, first):
    """step() with nothing in p.grad is not a micro-batch, so it mixes nothing."""
    params = parameters((65,), device=device)
    opt = make(params, lr=0.5)
    oracle = Oracle(opt)
    micros = micro_batches(params, [(1.0, first)])
    oracle.window(micros)
    run_window(opt, micros, fold=False)
    oracle.check()


def test_weight_of_a_step_without_gradients_is_unused(make, device):
    """Nothing in p.grad: nothing counted, so no weight joins the divisor either."""
    params = parameters((65,), device=device)
    opt = make(params, lr=0.5)
    oracle = Oracle(opt)
    micros = micro_batches(params, WINDOWS["tokens"])
    oracle.window(micros)
    for micro in micros:
        put(params, micro)
        opt.accumulate(weight=micro.weight)
    opt.step(weight=1000)
    oracle.check()


def test_windows_may_switch_between_weights_and_none(make, device):
    params = parameters((65,), device=device)
    opt = make(params, lr=0.5)
    oracle = Oracle(opt)
    for window in ("tokens", "mean-of-4", "tokens-N=1", "uneven"):
        micros = micro_batches(params, WINDOWS[window])
        oracle.window(micros)
        run_window(opt, micros)
        oracle.check()


# ---- the warning about changing sums of scales -----------------------------------------------------------


def run_scales(opt, params, scales):
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        run_window(opt, micro_batches(params, [(s, None) for s in scales]))
    return messages(record)


def test_changed_sum_of_scales_warns_once(make, device):
    params = parameters((5,), device=device)
    opt = make(params, lr=0.1)
    assert run_scales(opt, params, [0.25] * 4) == []
    assert run_scales(opt, params, [0.25] * 4) == []
    (message,) = run_scales(opt, params, [0.25] * 2)
    assert "weight=" in message
    assert "0.5" in message
    assert run_scales(opt, params, [0.25] * 4) == []
    assert run_scales(opt, params, [0.25] * 2) == []
    # per optimizer, not per process
    other = make(parameters((5,), device=device))
    assert run_scales(other, other.param_groups[0]["params"], [1.0]) == []
    assert len(run_scales(other, other.param_groups[0]["params"], [0.5])) == 1


def test_the_same_sum_in_other_pieces_does_not_warn(make, device):
    params = parameters((5,), device=device)
    opt = make(params, lr=0.1)
    for scales in ([0.1] * 10, [0.5] * 2, [1 / 3] * 3, [1.0], [0.7, 0.3]):
        assert run_scales(opt, params, scales) == []


def test_discarded_and_weighted_windows_are_not_compared(make, device):
    params = parameters((5,), device=device)
    opt = make(params, lr=0.1)
    assert run_scales(opt, params, [0.5] * 2) == []
    run_window(opt, micro_batches(params, WINDOWS["tokens"]))
    put(params, micro_batches(params, [(1.0, None)])[0])
    opt.accumulate(7.0)
    with pytest.warns(UserWarning, match="zero_grad"):
        opt.zero_grad()
    opt.step()
    assert run_scales(opt, params, [0.5] * 2) == []


# ---- long and interleaved --------------------------------------------------------------------------------


def test_long_window(make, device):
    params = parameters((257,), device=device)
    opt = make(params, lr=0.5)
    oracle = Oracle(opt)
    micros = micro_batches(params, [(1 / 200, None)] * 200)
    oracle.window(micros)
    run_window(opt, micros)
    oracle.check()


def test_two_optimizers_do_not_share_windows(make, device):
    runs = []
    for interleaved in (True, False):
        torch.manual_seed(4)
        both = [parameters((65,), device=device) for _ in range(2)]
        opts = [make(params, lr=0.5) for params in both]
        micros = [micro_batches(params, WINDOWS["mean-of-4"]) for params in both]
        order = [(k, i) for k in range(4) for i in range(2)]
        for k, i in order if interleaved else sorted(order, key=lambda pair: pair[1]):
            put(both[i], micros[i][k])
            opts[i].accumulate(0.25)
        for opt in opts:
            opt.step()
        runs.append(opts)
    for a, b in zip(*runs):
        assert_same_run(a, b)
