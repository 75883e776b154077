"""state_dict, load_state_dict: between windows exactly torch.optim.AdamW's, both ways."""

import copy
import io

import pytest
import torch
from cases import DTYPES, HYPER, WINDOWS
from harness import assert_same_run, copies, micro_batches, parameters, params_of, run_checked, run_window, values
from oracle import Oracle, same_bits

pytestmark = pytest.mark.filterwarnings("error")


def saved_and_loaded(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def stock_step(opt, micros) -> None:
    for i, p in enumerate(params_of(opt)):
        grads = [m.scale * m.grads[i] for m in micros if m.grads[i] is not None]
        p.grad = sum(grads).to(p.dtype) if grads else None
    opt.step()


@pytest.mark.parametrize("hyper", ["default", "amsgrad", "maximize"])
def test_keys_are_those_of_torch(make, device, hyper):
    params = parameters((5,), (), (0,), (3,), device=device)
    ours, stock = make(params, **HYPER[hyper]), torch.optim.AdamW(copies(params), **HYPER[hyper])
    assert ours.state_dict() == stock.state_dict()
    micros = micro_batches(params, [(1.0, None)], absent={(0, 3)})
    stock_step(stock, micros)
    run_window(ours, micros)
    a, b = ours.state_dict(), stock.state_dict()
    assert a["param_groups"] == b["param_groups"]
    assert a.keys() == b.keys()
    assert a["state"].keys() == b["state"].keys() == {0, 1, 2}
    for i, entries in b["state"].items():
        assert list(a["state"][i]) == list(entries)
        for name, value in entries.items():
            mine = a["state"][i][name]
            assert (mine.dtype, mine.shape, mine.device.type) == (value.dtype, value.shape, value.device.type), name


@pytest.mark.parametrize("through_file", [False, True], ids=["memory", "file"])
@pytest.mark.parametrize("hyper", ["default", "betas", "amsgrad", "maximize", "large-eps"])
@pytest.mark.parametrize("stock_options", [{"foreach": True}, {"fused": True}, {"foreach": False}], ids=str)
def test_from_torch(make, device, hyper, stock_options, through_file):
    """A run begun with torch.optim.AdamW goes on with ours as if it had been ours."""
    params = parameters((65,), (), (13, 17), device=device)
    stock = torch.optim.AdamW(params, **HYPER[hyper], **stock_options)
    for n in range(5):
        stock_step(stock, micro_batches(params, WINDOWS["mean-of-4"], absent={(k, 1) for k in range(4) if n}))
    state = copy.deepcopy(stock.state_dict())
    opt = make(copies(params), lr=123.0)
    opt.load_state_dict(saved_and_loaded(state) if through_file else state)
    for p, q in zip(params, params_of(opt)):
        for name, value in stock.state[p].items():
            assert same_bits(opt.state[q][name].cpu(), value.cpu()), name
    oracle = Oracle(opt)
    oracle.adopt()
    assert [cell.step for cell in oracle.cells.values()] == [5, 1, 5]
    for _ in range(3):
        micros = micro_batches(params, WINDOWS["uneven"])
        run_checked(opt, oracle, micros)
    given = {key: HYPER[hyper][key] for key in HYPER[hyper]}
    assert {key: opt.param_groups[0][key] for key in given} == given


@pytest.mark.parametrize("hyper", ["default", "betas", "amsgrad", "maximize", "large-eps"])
@pytest.mark.parametrize("stock_options", [{"foreach": True}, {"fused": True}, {"foreach": False}], ids=str)
def test_into_torch(make, device, hyper, stock_options):
    params = parameters((65,), (), (13, 17), device=device)
    opt = make(params, **HYPER[hyper])
    for n in range(5):
        run_window(opt, micro_batches(params, WINDOWS["uneven"], absent={(k, 1) for k in range(3) if n}))
    stock = torch.optim.AdamW(copies(params), lr=123.0, **stock_options)
    stock.load_state_dict(saved_and_loaded(opt.state_dict()))
    for p, q in zip(params, params_of(stock)):
        for name, value in opt.state[p].items():
            assert same_bits(stock.state[q][name], value), name
    oracle = Oracle(stock)
    oracle.adopt()
    for _ in range(3):
        micros = micro_batches(params, [(1.0, None)])
        oracle.window(micros)
        stock_step(stock, micros)
        oracle.check()


def test_loading_keeps_our_own_options(make, device):
    """accum_dtype and state_dtype are constructor options, never group keys: a checkpoint cannot change them."""
    params = parameters((65,), dtype=torch.bfloat16, device=device)
    stock = torch.optim.AdamW(copies(params))
    stock_step(stock, micro_batches(params, [(1.0, None)]))
    opt = make(params, accum_dtype=torch.bfloat16, state_dtype=None, lr=0.5)
    opt.load_state_dict(stock.state_dict())
    ours = {"accum_dtype", "state_dtype", "backend"}
    assert not ours & opt.param_groups[0].keys()
    assert not ours & opt.defaults.keys()
    oracle = Oracle(opt, accum_dtype=torch.bfloat16, state_dtype=None)
    oracle.adopt()
    micros = micro_batches(params, WINDOWS["uneven"])
    run_checked(opt, oracle, micros)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, None], ids=["fp32", "bf16", "param"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("amsgrad", [False, True])
def test_dtypes_survive_loading_bit_for_bit(make, device, dtype, state_dtype, amsgrad):
    """torch's load casts state to the parameter's dtype; moments in fp32 of bf16 parameters must not be."""
    params = parameters((65,), (), dtype=dtype, device=device)
    opt = make(params, lr=0.1, amsgrad=amsgrad, state_dtype=state_dtype)
    for _ in range(2):
        run_window(opt, micro_batches(params, WINDOWS["uneven"]))
    fresh = make(copies(params), lr=0.9, state_dtype=state_dtype)
    fresh.load_state_dict(saved_and_loaded(opt.state_dict()))
    expected = dtype if dtype == torch.float64 or state_dtype is None else state_dtype
    for state in fresh.state.values():
        assert {state[k].dtype for k in state if k != "step"} == {expected}
    assert_same_run(opt, fresh)
    for o in (opt, fresh):
        torch.manual_seed(9)
        run_window(o, micro_batches(params, WINDOWS["mean-of-4"], dtype=dtype)) if dtype != torch.float16 else None
    assert_same_run(opt, fresh)


def test_bf16_moments_of_torch_continue(make, device):
    """torch keeps bf16 moments for bf16 parameters; loaded here they go on in state_dtype without another loss."""
    params = parameters((65,), dtype=torch.bfloat16, device=device)
    stock = torch.optim.AdamW(params, lr=0.1, fused=True)
    for _ in range(3):
        stock_step(stock, micro_batches(params, [(1.0, None)]))
    opt = make(copies(params), lr=0.1)
    opt.load_state_dict(copy.deepcopy(stock.state_dict()))
    loaded = opt.state[params_of(opt)[0]]
    for name in ("exp_avg", "exp_avg_sq"):
        assert same_bits(loaded[name].bfloat16(), stock.state[params[0]][name])
    oracle = Oracle(opt, state_dtype=loaded["exp_avg"].dtype)
    oracle.adopt()
    micros = micro_batches(params, WINDOWS["mean-of-4"])
    run_checked(opt, oracle, micros)


@pytest.mark.parametrize("step", [3, 3.0, torch.tensor(3), torch.tensor(3, dtype=torch.float64), torch.tensor([3.0])],
                         ids=["int", "float", "int-tensor", "fp64-tensor", "1-element"])  # fmt: skip
def test_step_of_an_older_checkpoint(make, device, step):
    params = parameters((65,), device=device)
    opt = make(params, lr=0.5)
    for _ in range(3):
        run_window(opt, micro_batches(params, [(1.0, None)]))
    state = copy.deepcopy(opt.state_dict())
    state["state"][0]["step"] = copy.deepcopy(step)
    fresh = make(copies(params), lr=0.5)
    fresh.load_state_dict(state)
    oracle = Oracle(fresh)
    oracle.adopt()
    assert oracle.cells[params_of(fresh)[0]].step == 3
    micros = micro_batches(params, WINDOWS["sum"])
    oracle.window(micros)
    run_window(fresh, micros)
    oracle.check()


def test_older_checkpoint_without_newer_group_keys(make, device):
    params = parameters((65,), device=device)
    opt = make(params, lr=0.5, weight_decay=0.3)
    run_window(opt, micro_batches(params, [(1.0, None)]))
    state = copy.deepcopy(opt.state_dict())
    for key in ("maximize", "foreach", "capturable", "differentiable", "fused", "amsgrad", "decoupled_weight_decay"):
        del state["param_groups"][0][key]
    fresh = make(copies(params), lr=0.5)
    fresh.load_state_dict(state)
    oracle = Oracle(fresh)
    oracle.adopt()
    micros = micro_batches(params, WINDOWS["sum"])
    oracle.window(micros)
    run_window(fresh, micros)
    oracle.check()


def test_checkpoint_of_another_setting_of_fused(make, device):
    """Group entries come from the checkpoint; `fused` of a CUDA run must not break a CPU one."""
    params = parameters((65,), device=device)
    stock = torch.optim.AdamW(params, lr=0.5, fused=True)
    stock_step(stock, micro_batches(params, [(1.0, None)]))
    state = copy.deepcopy(stock.state_dict())
    state["param_groups"][0]["capturable"] = True
    opt = make(copies(params))
    opt.load_state_dict(state)
    oracle = Oracle(opt)
    oracle.adopt()
    micros = micro_batches(params, WINDOWS["sum"])
    run_checked(opt, oracle, micros)


def test_named_parameters(make, device):
    model = torch.nn.Linear(4, 3).to(device)
    named, plain = make(model.named_parameters(), lr=0.5), make(copies(model.parameters()), lr=0.5)
    stock = torch.optim.AdamW(model.named_parameters(), lr=0.5)
    assert named.state_dict() == stock.state_dict()
    assert named.param_groups[0]["param_names"] == ["weight", "bias"]
    micros = micro_batches(params_of(named), WINDOWS["uneven"])
    for opt in (named, plain):
        run_window(opt, micros)
    plain.load_state_dict(copy.deepcopy(named.state_dict()))
    named.load_state_dict(copy.deepcopy(plain.state_dict()))
    micros = micro_batches(params_of(named), WINDOWS["uneven"])
    for opt in (named, plain):
        run_window(opt, micros)
    for p, q in zip(params_of(named), params_of(plain)):
        assert same_bits(p, q)


def test_foreign_state_and_group_keys_are_kept(make, device):
    """Schedulers, averagers and tests write keys of their own."""
    params = parameters((65,), (5,), device=device)
    opt = make(params, lr=0.5)
    oracle = Oracle(opt)
    opt.state["note"] = "not a parameter"
    opt.state[params[0]]["number"] = 1
    opt.state[params[0]]["tensor"] = torch.tensor([1, 2], device=device)
    opt.param_groups[0].update(initial_lr=0.5, swa_lr=0.1, tag=["x"])
    micros = micro_batches(params, WINDOWS["uneven"])
    run_checked(opt, oracle, micros)
    state = copy.deepcopy(opt.state_dict())
    assert state["state"]["note"] == "not a parameter"
    fresh = make(copies(params))
    fresh.load_state_dict(state)
    q = params_of(fresh)[0]
    assert fresh.state["note"] == "not a parameter"
    assert fresh.state[q]["number"] == 1
    assert fresh.state[q]["tensor"].tolist() == [1, 2]
    assert fresh.param_groups[0]["tag"] == ["x"]


def test_state_dict_is_deterministic_and_harmless(make, device):
    params = parameters((65,), device=device)
    opt = make(params, lr=0.5)
    run_window(opt, micro_batches(params, WINDOWS["uneven"]))
    first, second = opt.state_dict(), opt.state_dict()
    assert list(first["state"]) == list(second["state"])
    assert first["param_groups"] == second["param_groups"]
    # references, as torch gives: no copy of the moments
    assert first["state"][0]["exp_avg"] is opt.state[params[0]]["exp_avg"]


def test_state_dict_hooks(make, device):
    params = parameters((65,), device=device)
    opt = make(params, lr=0.5)
    run_window(opt, micro_batches(params, WINDOWS["uneven"]))
    seen = []
    opt.register_state_dict_pre_hook(lambda o: seen.append("save-pre"))
    opt.register_state_dict_post_hook(lambda o, state: {**state, "extra": 1})
    state = opt.state_dict()
    assert state["extra"] == 1
    fresh = make(copies(params))

    def halve(_, incoming):
        seen.append("load-pre")
        incoming = copy.deepcopy(incoming)
        incoming["state"][0]["exp_avg"] *= 0.5
        return incoming

    fresh.register_load_state_dict_pre_hook(halve)
    fresh.register_load_state_dict_post_hook(lambda o: seen.append("load-post"))
    fresh.load_state_dict(state)
    assert seen == ["save-pre", "load-pre", "load-post"]
    q = params_of(fresh)[0]
    torch.testing.assert_close(fresh.state[q]["exp_avg"], opt.state[params[0]]["exp_avg"] * 0.5)


def test_a_state_dict_that_does_not_fit_is_refused_and_changes_nothing(make, device):
    params = parameters((65,), (5,), device=device)
    opt = make(params, lr=0.5)
    run_window(opt, micro_batches(params, WINDOWS["uneven"]))
    state = copy.deepcopy(opt.state_dict())
    smaller = make(parameters((65,), device=device), lr=0.25)
    with pytest.raises(ValueError, match="size of optimizer's group"):
        smaller.load_state_dict(state)
    assert smaller.param_groups[0]["lr"] == 0.25
    assert len(smaller.state) == 0
    run_window(smaller, micro_batches(params_of(smaller), WINDOWS["uneven"]))


def test_moments_of_another_shape_are_refused_by_name(make, device):
    opt = make([("first", torch.nn.Parameter(values((65,), device=device)))], lr=0.5)
    params = params_of(opt)
    run_window(opt, micro_batches(params, [(1.0, None)]))
    opt.state[params[0]]["exp_avg"] = torch.zeros(64, device=device)
    before = params[0].detach().clone()
    params[0].grad = torch.ones_like(params[0])
    with pytest.raises(RuntimeError, match=r"exp_avg.*first.*64.*65"):
        opt.step()
    assert same_bits(params[0], before)
    assert params[0].grad is not None


def test_its_own_state_dict_loads_at_once(make, device):
    """accelerate saves and loads it right after construction."""
    params = parameters((65,), dtype=torch.bfloat16, device=device)
    opt = make(params, lr=0.1)
    oracle = Oracle(opt)
    opt.load_state_dict(opt.state_dict())
    for _ in range(2):
        micros = micro_batches(params, WINDOWS["uneven"])
        run_checked(opt, oracle, micros)
        oracle.adopt()
        opt.load_state_dict(opt.state_dict())
