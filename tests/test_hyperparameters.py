"""Groups and hyper-parameters: read from the group at every step, as torch.optim.AdamW does."""


import pytest
import torch
from cases import WINDOWS
from harness import micro_batches, parameters, params_of, run_checked, run_window
from oracle import Oracle, same_bits

pytestmark = pytest.mark.filterwarnings("error")


# ---- groups and hyper-parameters -------------------------------------------------------------------------


def test_groups_have_their_own_hyperparameters(make, device):
    params = parameters((65,), (33,), (17,), (9,), device=device)
    opt = make(
        [
            {"params": params[:1], "lr": 0.9, "weight_decay": 0.0},
            {"params": params[1:2], "betas": (0.5, 0.6), "eps": 0.01},
            {"params": params[2:3], "amsgrad": True, "maximize": True},
            {"params": params[3:]},
        ],
        lr=0.3,
        weight_decay=0.4,
    )
    oracle = Oracle(opt)
    for n in range(4):
        opt.param_groups[0]["lr"] = 0.9 / (n + 1)  # read anew at every step
        opt.param_groups[1]["betas"] = (0.5 + 0.1 * n, 0.6 + 0.1 * n)
        opt.param_groups[3]["weight_decay"] = 0.1 * n
        opt.param_groups[3]["eps"] = 10.0 ** (-2 * n)
        micros = micro_batches(params, WINDOWS["uneven"])
        run_checked(opt, oracle, micros)


def test_defaults_are_those_of_torch():
    import inspect

    from fused_accum import FusedAccumAdamW

    ours = inspect.signature(FusedAccumAdamW.__init__).parameters
    theirs = inspect.signature(torch.optim.AdamW.__init__).parameters
    for name, parameter in theirs.items():
        assert ours[name].default == parameter.default, name
        assert ours[name].kind == parameter.kind, name
    assert issubclass(FusedAccumAdamW, torch.optim.AdamW)


def test_a_group_holds_what_was_given(make, device):
    given = {"lr": 0.3, "betas": (0.6, 0.7), "eps": 1e-3, "weight_decay": 0.2, "amsgrad": True, "maximize": True}
    opt = make(parameters((3,), device=device), **given)
    assert {key: opt.param_groups[0][key] for key in given} == given
    stock = torch.optim.AdamW(parameters((3,)), **given)
    assert opt.param_groups[0].keys() == stock.param_groups[0].keys()
    assert opt.defaults.keys() == stock.defaults.keys()


@pytest.mark.parametrize("lr_dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_tensor_lr_and_betas(make, device, lr_dtype):
    params = parameters((65,), device=device)
    lr = torch.tensor(0.5, dtype=lr_dtype, device=device)
    beta1, beta2 = torch.tensor(0.8, device=device), torch.tensor(0.9, device=device)
    # foreach=False: what torch asks for tensor betas
    opt = make(params, lr=lr, betas=(beta1, beta2), weight_decay=0.3, foreach=False)
    oracle = Oracle(opt)
    for n in range(3):
        lr.fill_(0.5 / (n + 1))
        beta1.fill_(0.8 - 0.2 * n)
        micros = micro_batches(params, WINDOWS["N=1"])
        run_checked(opt, oracle, micros)
    assert opt.param_groups[0]["lr"] is lr


def test_amsgrad_switched_on_and_off(make, device):
    """Switched on later the maximum starts from zero (torch raises KeyError); off, it is kept as it was."""
    params = parameters((300,), device=device)
    opt = make(params, lr=0.5, betas=(0.5, 0.5), weight_decay=0.3)
    oracle = Oracle(opt)
    for amsgrad in (False, False, True, True, False, True):
        opt.param_groups[0]["amsgrad"] = amsgrad
        micros = micro_batches(params, WINDOWS["sum"])
        run_checked(opt, oracle, micros)
    state = opt.state[params[0]]
    assert (state["max_exp_avg_sq"] > state["exp_avg_sq"]).any()


def test_maximize_can_be_switched(make, device):
    params = parameters((300,), device=device)
    opt = make(params, lr=0.5)
    oracle = Oracle(opt)
    for maximize in (False, True, False):
        opt.param_groups[0]["maximize"] = maximize
        micros = micro_batches(params, WINDOWS["sum"])
        run_checked(opt, oracle, micros)


@pytest.mark.parametrize(
    "options",
    [{"foreach": True}, {"foreach": False}, {"fused": True}, {"fused": False}, {"capturable": True}],
    ids=str,
)
def test_torch_switches_are_accepted_and_change_nothing(make, device, options):
    runs = []
    for extra in ({}, options):
        torch.manual_seed(5)
        params = parameters((65,), (9,), device=device)
        opt = make(params, lr=0.5, **extra)
        for _ in range(2):
            run_window(opt, micro_batches(params, WINDOWS["uneven"]))
        runs.append(opt)
    for p, q in zip(*map(params_of, runs)):
        assert same_bits(p, q)
