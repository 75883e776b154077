"""An open window survives state_dict, deepcopy and pickle: what resumes from it is bit-identical."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from cases import DTYPES, WINDOWS
from harness import (
    assert_same_run,
    buffers,
    copies,
    feed,
    micro_batches,
    mid_window_state,
    parameters,
    params_of,
    run_checked,
    run_window,
)
from oracle import Oracle, same_bits

pytestmark = pytest.mark.filterwarnings("error")


def through_file(opt, make, **options):
    file = io.BytesIO()
    torch.save(mid_window_state(opt), file)
    file.seek(0)
    fresh = make(copies(params_of(opt)), **options)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    return fresh


def through_memory(opt, make, **options):
    fresh = make(copies(params_of(opt)), **options)
    fresh.load_state_dict(copy.deepcopy(mid_window_state(opt)))
    return fresh


def through_deepcopy(opt, make, **options):
    return copy.deepcopy(opt)


def through_pickle(opt, make, **options):
    return pickle.loads(pickle.dumps(opt))


ROADS = [through_file, through_memory, through_deepcopy, through_pickle]


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("window", ["mean-of-4", "tokens-scaled", "tokens-zero"])
@pytest.mark.parametrize("road", ROADS, ids=lambda f: f.__name__)
def test_resume_in_every_place_of_a_window(make, device, road, window, steps_before):
    """Parameters with a contribution already, only later, and never; moments old or not yet made."""
    options = {"lr": 0.5, "weight_decay": 0.3, "amsgrad": True, "betas": (0.5, 0.6)}
    window = WINDOWS[window]
    for place in range(1, len(window) + 1):
        torch.manual_seed(place)
        params = parameters((65,), (), (13, 17), (5,), (0,), device=device)
        opt = make(params, **options)
        for _ in range(steps_before):
            run_window(opt, micro_batches(params, window))
        absent = {(k, 1) for k in range(place)} | {(k, 3) for k in range(len(window))}
        micros = micro_batches(params, window, absent=absent)
        for micro in micros[:place]:
            feed(opt, micro)
        fresh = road(opt, make, **options)
        assert fresh.pending == opt.pending
        assert_same_run(opt, fresh)
        for o in (opt, fresh):
            for micro in micros[place:]:
                feed(o, micro, last=micro is micros[-1])
            o.step()
        assert_same_run(opt, fresh)
        assert opt.pending == (0, 0.0)
        for micro in micro_batches(params, [(0.5, None)] * 2):  # the next window starts from nothing
            for o in (opt, fresh):
                feed(o, micro)
        assert_same_run(opt, fresh)


@pytest.mark.parametrize("accum_dtype", [torch.float32, torch.bfloat16], ids=["accum-fp32", "accum-bf16"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("road", ROADS, ids=lambda f: f.__name__)
def test_dtypes_of_an_open_window_survive(make, device, road, dtype, accum_dtype):
    options = {"lr": 0.1, "accum_dtype": accum_dtype}
    params = parameters((65,), (5,), dtype=dtype, device=device)
    opt = make(params, **options)
    run_window(opt, micro_batches(params, WINDOWS["uneven"]))
    micros = micro_batches(params, WINDOWS["uneven"])
    feed(opt, micros[0])
    fresh = road(opt, make, **options)
    expected = torch.float64 if dtype == torch.float64 else accum_dtype
    assert [b.dtype for b in buffers(fresh)] == [expected] * 2
    for o in (opt, fresh):
        feed(o, micros[1])
        feed(o, micros[2], last=True)
    assert_same_run(opt, fresh)


def test_a_copy_is_independent(make, device):
    params = parameters((65,), device=device)
    opt = make(params, lr=0.5)
    micros = micro_batches(params, WINDOWS["mean-of-4"])
    feed(opt, micros[0])
    for other in (copy.deepcopy(opt), through_memory(opt, make, lr=0.5)):
        before = buffers(opt)[0].clone()
        feed(other, micros[1])
        feed(other, micros[2], last=True)
        assert same_bits(buffers(opt)[0], before)
        assert opt.pending == (1, 0.0)
        assert other.pending == (0, 0.0)


def test_deepcopy_of_model_and_optimizer_together(make, device):
    model = torch.nn.Linear(3, 2).to(device)
    opt = make(model.named_parameters(), lr=0.5)
    micros = micro_batches(list(model.parameters()), WINDOWS["mean-of-4"])
    feed(opt, micros[0])
    model2, opt2 = copy.deepcopy((model, opt))
    assert params_of(opt2)[0] is model2.weight
    for o in (opt, opt2):
        feed(o, micros[1], last=True)
    assert same_bits(model.weight, model2.weight)
    assert_same_run(opt, opt2)


def test_a_copy_keeps_options_and_public_attributes(make, on, device):
    params = parameters((65,), dtype=torch.bfloat16, device=device)
    opt = make(params, lr=0.5, accum_dtype=torch.bfloat16, state_dtype=None, fused=True)
    for other in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        assert other.defaults == opt.defaults
        assert other._step_supports_amp_scaling is opt._step_supports_amp_scaling is True
        assert {row.backend for row in other.backends} == {on[0]}
        public = {name for name in vars(opt) if not name.startswith("_")}
        assert public == {name for name in vars(other) if not name.startswith("_")}
        torch.manual_seed(2)
        for micro in micro_batches(params, [(1.0, None)]):
            feed(other, micro)
        assert buffers(other)[0].dtype == torch.bfloat16
        feed(other, micro, last=True)
        assert other.state[params_of(other)[0]]["exp_avg"].dtype == torch.bfloat16


def test_a_copy_remembers_the_last_sum_of_scales(make, device):
    """The warning about short windows works across a resume in memory."""
    params = parameters((5,), device=device)
    opt = make(params)
    run_window(opt, micro_batches(params, WINDOWS["mean-of-4"]))
    other = copy.deepcopy(opt)
    for o in (opt, other):
        with pytest.warns(UserWarning, match="weight="):
            run_window(o, micro_batches(params, WINDOWS["mean-of-4"][:2]))


def test_mid_window_state_dict(make, device):
    """What design section 2 says it holds, beside complete moments, and the one warning."""
    params = parameters((65,), (5,), device=device)
    opt = make(params, lr=0.5, amsgrad=True)
    oracle = Oracle(opt)
    micros = micro_batches(params, WINDOWS["tokens"], absent={(0, 1), (1, 1)})
    for micro in micros:
        feed(opt, micro)
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        state = opt.state_dict()
        opt.state_dict()
    assert len(record) == 1
    assert "2 micro-batch" in str(record[0].message)
    assert set(state["state"][0]) == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "accum"}
    assert float(state["state"][0]["step"]) == 0
    assert not state["state"][0]["exp_avg"].any()
    assert "accum" not in state["state"].get(1, {})
    group = state["param_groups"][0]
    assert (group["accum_microbatches"], group["accum_weight"], group["accum_weighted"]) == (2, 10.0, True)
    assert not any(key.startswith("accum") for key in opt.param_groups[0])
    assert "accum" not in opt.state.get(params[0], {})
    saved = state["state"][0]["accum"].clone()
    oracle.window(micros)
    opt.step()  # the window goes on unharmed, and its saved sum does not change under it
    oracle.check()
    assert same_bits(saved, state["state"][0]["accum"])
    assert not any(key.startswith("accum") for key in opt.state_dict()["param_groups"][0])
    assert "accum" not in opt.state_dict()["state"][0]


def test_stock_adamw_loads_a_mid_window_state(make, device):
    """It loses the window, which the warning says, but nothing else breaks."""
    params = parameters((65,), (5,), device=device)
    opt = make(params, lr=0.5)
    run_window(opt, micro_batches(params, WINDOWS["uneven"]))
    feed(opt, micro_batches(params, WINDOWS["uneven"])[0])
    stock = torch.optim.AdamW(copies(params))
    stock.load_state_dict(copy.deepcopy(mid_window_state(opt)))
    for p in params_of(stock):
        p.grad = torch.ones_like(p)
    stock.step()


def test_a_mid_window_state_that_went_through_stock_adamw_comes_back(make, device):
    """torch's AdamW carries entries it does not know along: a detour through it keeps an fp32 window."""
    params = parameters((65,), device=device)
    opt = make(params, lr=0.5)
    micros = micro_batches(params, WINDOWS["mean-of-4"])
    feed(opt, micros[0])
    stock = torch.optim.AdamW(copies(params))
    stock.load_state_dict(copy.deepcopy(mid_window_state(opt)))
    fresh = make(copies(params), lr=0.5)
    fresh.load_state_dict(copy.deepcopy(stock.state_dict()))
    assert fresh.pending == (1, 0.0)
    for o in (opt, fresh):
        feed(o, micros[1], last=True)
    assert_same_run(opt, fresh)


def test_load_in_mid_window_discards_it_and_warns(make, device):
    params = parameters((65,), device=device)
    opt = make(params, lr=0.5)
    run_window(opt, micro_batches(params, WINDOWS["mean-of-4"]))
    saved = copy.deepcopy(opt.state_dict())
    for micro in micro_batches(params, WINDOWS["mean-of-4"])[:3]:
        feed(opt, micro)
    with pytest.warns(UserWarning, match=r"3 accumulated"):
        opt.load_state_dict(saved)
    assert opt.pending == (0, 0.0)
    oracle = Oracle(opt)
    oracle.adopt()
    before = params[0].detach().clone()
    opt.step()
    assert same_bits(params[0], before)
    micros = micro_batches(params, WINDOWS["mean-of-4"])
    run_checked(opt, oracle, micros)


def test_loading_a_window_into_an_open_window_replaces_it(make, device):
    params = parameters((65,), device=device)
    opt, other = make(params, lr=0.5), make(copies(params), lr=0.5)
    micros = micro_batches(params, WINDOWS["mean-of-4"])
    feed(opt, micros[0])
    for micro in micros[1:3]:
        feed(other, micro)
    with pytest.warns(UserWarning, match="2 accumulated"):
        other.load_state_dict(copy.deepcopy(mid_window_state(opt)))
    assert other.pending == (1, 0.0)
    assert_same_run(opt, other)


def test_groups_of_a_mid_window_state(make, device):
    a, b = parameters((65,), (5,), device=device)
    opt = make([{"params": [a], "lr": 0.5}, {"params": [b], "lr": 0.1}])
    micros = micro_batches([a, b], WINDOWS["tokens-scaled"], absent={(0, 0)})
    feed(opt, micros[0])
    x, y = copies([a, b])
    fresh = make([{"params": [x]}, {"params": [y]}])
    fresh.load_state_dict(copy.deepcopy(mid_window_state(opt)))
    for o in (opt, fresh):
        feed(o, micros[1])
        feed(o, micros[2], last=True)
    assert_same_run(opt, fresh)


def test_a_window_that_went_through_stock_adamw_is_dropped(make, device):
    """torch.optim.AdamW carries the unknown entries along while it trains on: they are no window any more."""
    opt = make(parameters((5,), device=device), lr=0.5)
    params_of(opt)[0].grad = torch.ones(5, device=device)
    opt.step()
    params_of(opt)[0].grad = torch.ones(5, device=device)
    opt.accumulate()
    stock = torch.optim.AdamW(copies(params_of(opt)), lr=0.5)
    stock.load_state_dict(mid_window_state(opt))
    untouched = make(copies(params_of(opt)), lr=0.5)
    untouched.load_state_dict(stock.state_dict())
    assert untouched.pending == (1, 0.0)
    params_of(stock)[0].grad = torch.ones(5, device=device)
    stock.step()
    fresh = make(copies(params_of(stock)), lr=0.5)
    with pytest.warns(UserWarning, match="open window from before its last updates"):
        fresh.load_state_dict(stock.state_dict())
    assert fresh.pending == (0, 0.0)
    assert "accum" not in fresh.state[params_of(fresh)[0]]
    assert not any(key.startswith("accum_") for key in fresh.param_groups[0])
