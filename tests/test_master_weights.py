"""master_weights="fp32" and "split": the master is updated in fp32, the parameter is what it rounds to."""

import copy
import io

import numpy
import pytest
import torch
from cases import DTYPES, HYPER, LAYOUT_SHAPE, PARAMETER_LAYOUTS, WINDOWS
from harness import (
    assert_same_run,
    copies,
    in_layout,
    micro_batches,
    mid_window_state,
    parameter,
    parameters,
    params_of,
    run_window,
    values,
)  # fmt: skip
from lists import Lists, float64
from oracle import same_bits

from fused_accum import FusedAccumAdamW, backends, ops
from fused_accum.backends import rounding
from fused_accum.state import LOW_PRECISION

pytestmark = pytest.mark.filterwarnings("error")

KINDS = {"bf16-fp32": (torch.bfloat16, "fp32"), "fp16-fp32": (torch.float16, "fp32"),
         "bf16-split": (torch.bfloat16, "split")}  # fmt: skip
every_kind = pytest.mark.parametrize(("dtype", "master"), KINDS.values(), ids=KINDS)
SHAPES = ((0,), (), (1,), (65,), (13, 17), (1025,))


@pytest.fixture
def make(on):
    """FusedAccumAdamW on the backend under test; skips those that refuse master weights."""
    if not backends.registry()[on[0]].keeps_weights:
        pytest.skip(f"{on[0]} refuses master weights")
    if on[1] != "cpu":
        pytest.skip("these are CPU tensors; test_bits.py compares a GPU's with them")
    return lambda params, **options: FusedAccumAdamW(params, backend=on[0], **options)


def masters(opt):
    """The float32 master of every parameter."""
    found = []
    for p in params_of(opt):
        kept = opt.state[p]["master"]
        found.append(rounding.joined(p.detach(), kept) if kept.dtype == torch.int16 else kept)
    return found


def rounds_to(master, dtype, kind):
    return rounding.split(master)[0] if kind == "split" else master.to(dtype)


def twin_in_fp32(make, params, **options):
    """The same optimizer on float32 copies: what the masters must be, bit for bit."""
    return make([torch.nn.Parameter(p.detach().float()) for p in params], **options)


def run_both(opt, twin, windows=("uneven", "N=1", "mean-of-4"), layout=None, grad_dtype=None):
    for name in windows:
        micros = micro_batches(params_of(opt), WINDOWS[name], dtype=grad_dtype, layout=layout)
        copy_of = copy.deepcopy(micros)
        for micro in copy_of:
            micro.grads = [g.float() for g in micro.grads]
        run_window(opt, micros)
        run_window(twin, copy_of)


def check(opt, twin, kind):
    for p, q, master in zip(params_of(opt), params_of(twin), masters(opt)):
        assert same_bits(master, q)
        assert same_bits(p, rounds_to(master, p.dtype, kind))
        for name in opt.state[p].keys() - {"master"}:
            assert same_bits(opt.state[p][name], twin.state[q][name]), name


@pytest.mark.parametrize("hyper", HYPER.values(), ids=HYPER)
@every_kind
def test_masters_are_the_weights_of_an_fp32_run(make, dtype, master, hyper):
    """Bit for bit, in every equation; the parameter is the rounded master."""
    params = parameters(*SHAPES, dtype=dtype)
    twin = twin_in_fp32(make, params, **hyper)
    opt = make(params, master_weights=master, **hyper)
    run_both(opt, twin)
    check(opt, twin, master)


@pytest.mark.parametrize("options", [{"accum_dtype": torch.bfloat16}, {"state_dtype": torch.bfloat16}], ids=str)
@every_kind
def test_narrow_buffers_and_moments(make, dtype, master, options):
    params = parameters(*SHAPES, dtype=dtype)
    twin = twin_in_fp32(make, params, lr=0.3, **options)
    opt = make(params, master_weights=master, lr=0.3, **options)
    run_both(opt, twin)
    check(opt, twin, master)


@pytest.mark.parametrize("grad", DTYPES)
@every_kind
def test_gradients_of_any_dtype(make, dtype, master, grad):
    params = parameters(*SHAPES, dtype=dtype)
    twin = twin_in_fp32(make, params, lr=0.3)
    opt = make(params, master_weights=master, lr=0.3)
    run_both(opt, twin, grad_dtype=DTYPES[grad]) if grad != "fp64" else run_both(opt, twin)
    check(opt, twin, master)


@pytest.mark.parametrize("layout", PARAMETER_LAYOUTS)
@every_kind
def test_layouts(make, dtype, master, layout):
    params = [parameter(values(LAYOUT_SHAPE, dtype), layout)]
    twin = twin_in_fp32(make, params, lr=0.3, amsgrad=True)
    opt = make(params, master_weights=master, lr=0.3, amsgrad=True)
    run_both(opt, twin, layout="transposed")
    check(opt, twin, master)


@every_kind
def test_everything_at_once(make, dtype, master):
    """amsgrad, maximize, tensor lr, capturable, groups; parameters of other dtypes have no master."""
    options = {"amsgrad": True, "maximize": True, "lr": torch.tensor(0.2), "capturable": True}
    params = [*parameters((65,), (33,), dtype=dtype), *parameters((17,)), *parameters((9,), dtype=torch.float64)]
    groups = [{"params": params[:1], "weight_decay": 0.5}, {"params": params[1:], "betas": (0.5, 0.6)}]
    opt = make(groups, master_weights=master, **options)
    others = [torch.nn.Parameter(p.detach().float() if p.dtype == dtype else p.detach().clone()) for p in params]
    groups = [{"params": others[:1], "weight_decay": 0.5}, {"params": others[1:], "betas": (0.5, 0.6)}]
    twin = make(groups, **options)
    for _ in range(3):
        for p, q in zip(params, others):
            p.grad = values(p.shape, p.dtype)
            q.grad = p.grad.to(q.dtype)
        opt.step()
        twin.step()
    for p, q in zip(params, others):
        assert ("master" in opt.state[p]) == (p.dtype in LOW_PRECISION)
        assert same_bits(rounds_to(q, dtype, master) if p.dtype == dtype else q, p)
        assert same_bits(opt.state[p]["exp_avg"], twin.state[q]["exp_avg"])


@every_kind
def test_step_in_backward(make, dtype, master):
    params = parameters((65,), (13, 17), dtype=dtype)
    explicit, inside = (make(copies(params), lr=0.3, master_weights=master) for _ in range(2))
    for _ in range(3):
        factors = [values(p.shape, dtype) for p in params]
        for opt in (explicit, inside):
            for k in range(3):
                loss = sum((p * f).sum() * (k + 1) for p, f in zip(params_of(opt), factors))
                if k < 2:
                    loss.backward()
                    opt.accumulate()
                elif opt is explicit:
                    loss.backward()
                    opt.step()
                else:
                    with opt.step_in_backward():
                        loss.backward()
    assert_same_run(explicit, inside)


@every_kind
def test_versions_of_masters_are_bumped(make, dtype, master):
    (p,) = parameters((65,), dtype=dtype)
    opt = make([p], master_weights=master)
    for _ in range(2):
        p.grad = torch.ones_like(p)
        before = opt.state[p]["master"]._version if p in opt.state else None
        opt.step()
    assert opt.state[p]["master"]._version > before


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


# ---- the code of "split" -----------------------------------------------------------------------------------------


def every_kind_of_pattern():
    """All low halves beside edges of the high one, and a sample of everything."""
    high = [0x0000, 0x0001, 0x007F, 0x0080, 0x3F80, 0x7F7E, 0x7F7F, 0x8000, 0x8001, 0xBF80, 0xFF7F]
    edges = (numpy.array(high, dtype=numpy.uint32)[:, None] << 16) + numpy.arange(2**16, dtype=numpy.uint32)
    every = numpy.concatenate([edges.ravel(), numpy.arange(0, 2**32, 4099, dtype=numpy.uint64).astype(numpy.uint32),
                               numpy.array([0x7F800000, 0xFF800000], dtype=numpy.uint32)])  # fmt: skip
    return every[~numpy.isnan(every.view(numpy.float32))]


def test_split_is_exact_and_rounds_ties_away(make):
    """Through a step that changes nothing, against arithmetic in numpy."""
    bits = every_kind_of_pattern()
    x = torch.from_numpy(bits.view(numpy.float32).copy())
    high, low = rounding.split(x)
    assert same_bits(rounding.joined(high, low), x)
    up = (bits.astype(numpy.uint64) + 0x8000) >> 16
    assert numpy.array_equal(high.view(torch.int16).numpy().view(numpy.uint16), up.astype(numpy.uint16))
    finite = x.isfinite() & high.isfinite()
    opt = make([p := torch.nn.Parameter(high[finite])], lr=0.0, weight_decay=0.0, master_weights="split")
    opt.state[p]["master"] = low[finite].clone()
    p.grad = torch.zeros_like(p)
    opt.step()
    assert same_bits(masters(opt)[0][x[finite] != 0], x[finite][x[finite] != 0])
    assert torch.equal(masters(opt)[0], x[finite])


def test_split_of_nan():
    high, low = rounding.split(torch.tensor([0x7FFFFFFF, 0x7F800001], dtype=torch.int32).view(torch.float32))
    assert high.view(torch.int16).tolist() == [0x7FC0] * 2
    assert low.tolist() == [0, 0]
    assert rounding.joined(high, low).isnan().all()


def test_in_layouts_the_master_has_the_parameters_strides(make):
    p = parameter(in_layout(values(LAYOUT_SHAPE, torch.bfloat16), "channels_last"), "channels_last")
    opt = make([p], master_weights="fp32")
    p.grad = torch.ones_like(p)
    opt.step()
    assert opt.state[p]["master"].stride() == p.stride()


# ---- ops -----------------------------------------------------------------------------------------------------------


def lists_with_masters(dtype, master):
    shapes = [(65,), (), (13, 17), (0,)]
    lists = Lists(shapes, dtype=dtype, amsgrad=True)
    for name in ("accums", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"):
        setattr(lists, name, [t.float() for t in getattr(lists, name)])
    exact = [torch.randn(s) for s in shapes]
    parts = [rounding.split(x) if master == "split" else (x.to(dtype), x.clone()) for x in exact]
    lists.params, kept = [p for p, _ in parts], [k for _, k in parts]
    return lists, kept, exact


@every_kind
def test_ops(dtype, master):
    """The same as without masters on float32 parameters."""
    lists, kept, exact = lists_with_masters(dtype, master)
    twin = copy.deepcopy(lists)
    twin.params, twin.grads = exact, [g.float() for g in lists.grads]
    hyper = float64(0.3, 0.9, 0.99, 1e-8, 0.2, 0.5, 0.7)
    versions = [t._version for t in kept]
    ops.adamw_(*lists.all(), hyper, masters=kept)
    ops.adamw_(*twin.all(), hyper)
    assert all(t._version > v for t, v in zip(kept, versions))
    for p, k, q in zip(lists.params, kept, twin.params):
        assert same_bits(rounding.joined(p, k) if master == "split" else k, q)
        assert same_bits(p, rounds_to(q, dtype, master))


def test_ops_refuse():
    lists, kept, _ = lists_with_masters(torch.float16, "fp32")
    hyper = float64(0.3, 0.9, 0.99, 1e-8, 0.2, 0.5, 0.7)
    with pytest.raises(ValueError, match="masters has 1 tensors, params 4"):
        ops.adamw_(*lists.all(), hyper, masters=kept[:1])
    with pytest.raises(TypeError, match=r"masters\[0\] is int16 for float16"):
        ops.adamw_(*lists.all(), hyper, masters=[k.to(torch.int16) for k in kept])
    with pytest.raises(RuntimeError, match=r"masters\[0\] is .*\(3,\)"):
        ops.adamw_(*lists.all(), hyper, masters=[torch.zeros(3), *kept[1:]])


@every_kind
def test_opcheck(dtype, master):
    lists, kept, _ = lists_with_masters(dtype, master)
    arguments = (*lists.all(), kept, float64(0.3, 0.9, 0.99, 1e-8, 0.2, 0.5, 0.7))
    torch.library.opcheck(torch.ops.fused_accum.adamw_masters_.default, arguments, test_utils=(
        "test_schema", "test_faketensor"))  # fmt: skip
