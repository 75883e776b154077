"""master_weights="fp32" and "split": the master is updated in fp32, the parameter is what it rounds to."""


import pytest
import torch
from cases import DTYPES, HYPER, LAYOUT_SHAPE, PARAMETER_LAYOUTS
from harness import assert_same_run, copies, parameter, parameters, params_of, values
from master_runs import SHAPES, check, every_kind, rounds_to, run_both, twin_in_fp32
from master_runs import make_fixture as _make  # noqa: F401
from oracle import same_bits

from fused_accum.state import LOW_PRECISION

pytestmark = pytest.mark.filterwarnings("error")


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
