"""Master weights when parameters are replaced from outside, and in checkpoints."""

import copy
import io

import pytest
import torch
from cases import WINDOWS
from harness import (
    assert_same_run,
    copies,
    micro_batches,
    mid_window_state,
    parameters,
    params_of,
    run_window,
    values,
)  # fmt: skip
from master_runs import SHAPES, check, every_kind, run_both, twin_in_fp32
from master_runs import make_fixture as _make  # noqa: F401
from oracle import same_bits

pytestmark = pytest.mark.filterwarnings("error")


# ---- parameters replaced from outside ------------------------------------------------------------------------


def by_load_state_dict(p, x):
    model = torch.nn.ParameterList([p])
    model.load_state_dict({"0": x})


def by_data(p, x):
    p.data = x.clone()


def by_copy(p, x):
    with torch.no_grad():
        p.copy_(x)


def through_data(p, x):
    p.data.copy_(x)  # no version counter sees it


WAYS = [by_load_state_dict, by_data, by_copy, through_data]


@pytest.mark.parametrize("replace", WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_replaced_parameters_refresh_the_masters(make, dtype, replace):
    """The next step starts from the new values, exactly; elements that were left alone keep their masters."""
    (p,) = parameters((65,), dtype=dtype)
    opt = make([p], lr=0.3, master_weights="fp32")
    p.grad = values((65,), dtype)
    opt.step()
    new = p.detach().clone()
    new[:40] = values((40,), dtype)
    start = torch.where(torch.arange(65) < 40, new.float(), opt.state[p]["master"])
    replace(p, new)
    twin = make([torch.nn.Parameter(start)], lr=0.3)
    state = copy.deepcopy(opt.state_dict())
    del state["state"][0]["master"]
    twin.load_state_dict(state)
    g = values((65,), dtype)
    p.grad, params_of(twin)[0].grad = g, g.float()
    opt.step()
    twin.step()
    assert same_bits(opt.state[p]["master"], params_of(twin)[0].detach())


@pytest.mark.parametrize("replace", WAYS)
def test_replaced_parameters_count_with_split_masters(make, replace):
    """As they are but for the missing half: the weight read rounds to the new parameter. 0 and infinity too."""
    (p,) = parameters((65,), dtype=torch.bfloat16)
    opt = make([p], lr=0.0, weight_decay=0.0, master_weights="split")
    opt.state[p]["master"] = torch.randint(-(2**15), 2**15, (65,)).to(torch.int16)
    new = values((65,), torch.bfloat16)
    new[:4] = torch.tensor([0.0, -0.0, float("inf"), -float("inf")])
    opt.state[p]["master"][:4] = torch.tensor([-5, -1, 7, 9], dtype=torch.int16)
    replace(p, new)
    p.grad = torch.ones_like(p)
    opt.step()
    assert torch.equal(p, new)


# ---- checkpoints -----------------------------------------------------------------------------------------------


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
@every_kind
def test_resumed_runs_have_the_same_bits(make, dtype, master, order):
    straight = make(parameters(*SHAPES, dtype=dtype), lr=0.3, master_weights=master)
    for name in ("uneven", "N=1"):
        run_window(straight, micro_batches(params_of(straight), WINDOWS[name]))
    state, weights = through_a_file((straight.state_dict(), [p.detach() for p in params_of(straight)]))
    assert all(s["master"].dtype == (torch.int16 if master == "split" else torch.float32)
               for s in state["state"].values())  # fmt: skip
    resumed = make([torch.nn.Parameter(torch.zeros_like(w)) for w in weights], lr=0.3, master_weights=master)

    def load_model():
        with torch.no_grad():
            for p, w in zip(params_of(resumed), weights):
                p.copy_(w)

    if order == "model first":
        load_model()
    resumed.load_state_dict(state)
    if order == "optimizer first":
        load_model()
    assert_same_run(straight, resumed)
    micros = micro_batches(params_of(straight), WINDOWS["mean-of-4"])
    for opt in (straight, resumed):
        run_window(opt, copy.deepcopy(micros))
    assert_same_run(straight, resumed)
    again = copy.deepcopy(straight)
    assert_same_run(straight, again)


@every_kind
def test_mid_window_checkpoint_before_any_update(make, dtype, master):
    params = parameters((65,), dtype=dtype)
    straight, broken = (make(copies(params), lr=0.3, master_weights=master) for _ in range(2))
    grads = [values((65,), dtype) for _ in range(2)]
    for opt in (straight, broken):
        params_of(opt)[0].grad = grads[0].clone()
        opt.accumulate()
    resumed = make(copies(params), lr=0.3, master_weights=master)
    resumed.load_state_dict(mid_window_state(broken))
    for opt in (straight, resumed):
        params_of(opt)[0].grad = grads[1].clone()
        opt.step()
    assert_same_run(straight, resumed)


@every_kind
def test_from_and_into_torch(make, dtype, master):
    """torch's checkpoint has no master: it is made from the parameter. torch takes ours and ignores the master."""
    stock_params = parameters((65,), dtype=dtype)
    stock = torch.optim.AdamW(stock_params, lr=0.01)
    stock_params[0].grad = values((65,), dtype)
    stock.step()
    opt = make(copies(stock_params), lr=0.01, master_weights=master)
    opt.load_state_dict(copy.deepcopy(stock.state_dict()))
    twin = twin_in_fp32(make, stock_params, lr=0.01)
    twin.load_state_dict(copy.deepcopy(stock.state_dict()))
    run_both(opt, twin, windows=("N=1",))
    check(opt, twin, master)
    torch.optim.AdamW(copies(stock_params), lr=0.01).load_state_dict(opt.state_dict())


def test_masters_nobody_keeps_are_dropped_with_a_warning(make):
    params = parameters((65,), dtype=torch.bfloat16)
    saved = make(params, master_weights="fp32")
    params[0].grad = torch.ones_like(params[0])
    saved.step()
    opt = make(copies(params))
    with pytest.warns(UserWarning, match=r"master weights of 1 parameter.*dropped.*master_weights="):
        opt.load_state_dict(saved.state_dict())
    assert "master" not in opt.state[params_of(opt)[0]]
    other = make(copies(params), master_weights="split")
    with pytest.raises(ValueError, match="master_weights='fp32', this optimizer has 'split'"):
        other.load_state_dict(saved.state_dict())
    assert not other.state


def test_split_refuses_fp16_before_anything_changes(make):
    params = [*parameters((5,), dtype=torch.bfloat16), *parameters((5,), dtype=torch.float16)]
    before = [p.detach().clone() for p in params]
    opt = make(params, master_weights="split")
    for p in params:
        p.grad = torch.ones_like(p)
    for call in (opt.accumulate, opt.step, lambda: opt.step_in_backward().__enter__()):
        with pytest.raises(TypeError, match=r"params'\]\[1\] is float16.*master_weights='fp32'"):
            call()
    assert all(same_bits(p, x) for p, x in zip(params, before))
