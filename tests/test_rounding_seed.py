"""stochastic_rounding: the generator's state is the seed and ``step``, and both are in the checkpoint."""

import copy
import io
import pickle

import pytest
import torch
from harness import assert_names, assert_same_run, copies, mid_window_state, parameters, params_of, values
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from fused_accum import FusedAccumAdamW, backends

pytestmark = pytest.mark.filterwarnings("error")
every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


@pytest.fixture
def make(on):
    """FusedAccumAdamW on the backend under test; skips those that refuse stochastic rounding."""
    if on[1] != "cpu" or not backends.registry()[on[0]].keeps_weights:
        pytest.skip(f"{on[0]} on {on[1]} does not round CPU tensors by chance")
    return lambda params, **options: FusedAccumAdamW(
        params, **{"backend": on[0], "stochastic_rounding": True, **options}
    )


def run(make, params, windows=3, **options):
    opt = make(params, lr=0.1, weight_decay=0.3, **options)
    for k in range(3 * windows):
        for p in params:
            p.grad = values(p.shape, p.dtype)
        opt.step(weight=1) if k % 3 == 2 else opt.accumulate(weight=1)
    return opt


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("open_window", [False, True], ids=["between windows", "in mid-window"])
@every_dtype
def test_resumed_runs_have_the_same_bits(make, dtype, open_window):
    """Constructed without the seed: it comes from the checkpoint, as lr does."""
    straight = run(make, parameters((65,), dtype=dtype), rounding_seed=3)

    def feed(opts, call):
        g = values((65,), dtype)
        for opt in opts:
            params_of(opt)[0].grad = g.clone()
            call(opt, weight=1)

    if open_window:
        feed([straight], FusedAccumAdamW.accumulate)
    resumed = make(copies(params_of(straight)))
    run(lambda params, **_: resumed, params_of(resumed), windows=1)  # its rows are made, with another seed
    with torch.no_grad():
        params_of(resumed)[0].copy_(params_of(straight)[0])
    resumed.load_state_dict(through_a_file(mid_window_state(straight)))
    for _ in range(2):
        feed((straight, resumed), FusedAccumAdamW.step)
    feed((straight, resumed), FusedAccumAdamW.accumulate)
    assert_same_run(straight, resumed)
    assert mid_window_state(resumed)["param_groups"][0]["rounding_seed"] == 3


def test_the_seed_is_in_saved_groups_alone(make):
    opt = run(make, parameters((65,), dtype=torch.bfloat16), rounding_seed=2**64 - 1)
    state = opt.state_dict()
    assert set(state["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}
    plain = run(make, parameters((65,), dtype=torch.bfloat16), stochastic_rounding=False)
    assert state["param_groups"] == [{**plain.state_dict()["param_groups"][0], "rounding_seed": 2**64 - 1}]
    other = make(parameters((65,), dtype=torch.bfloat16))
    other.load_state_dict(state)
    plain.load_state_dict(state)
    stock = torch.optim.AdamW(copies(params_of(opt)))
    stock.load_state_dict(state)
    assert stock.state_dict()["param_groups"] == state["param_groups"]  # on the way through torch's it is kept
    for each in (opt, other, plain):
        assert each.param_groups[0].keys() == torch.optim.AdamW(params_of(each)).param_groups[0].keys()
    assert "rounding_seed" not in plain.state_dict()["param_groups"][0]
    for again in (copy.deepcopy(other), pickle.loads(pickle.dumps(other))):
        assert again.state_dict()["param_groups"] == state["param_groups"]


def test_a_checkpoint_without_a_seed_leaves_the_constructors(make):
    opt = run(make, parameters((65,), dtype=torch.bfloat16), rounding_seed=5)
    state = opt.state_dict()
    del state["param_groups"][0]["rounding_seed"]
    opt.load_state_dict(state)
    assert opt.state_dict()["param_groups"][0]["rounding_seed"] == 5


@pytest.mark.parametrize(("seeds", "words"), [((1, 2), ["rounding_seed 1, 2", "has one"]),
                                              ((-1, -1), ["rounding_seed is -1", "2**64"]),
                                              (("3", "3"), ["rounding_seed is '3'"])])  # fmt: skip
def test_what_is_no_seed_is_refused_before_anything_is_loaded(make, seeds, words):
    params = parameters((65,), (5,), dtype=torch.bfloat16)
    opt = make([{"params": params[:1]}, {"params": params[1:]}], rounding_seed=5)
    state = copy.deepcopy(opt.state_dict())
    for group, seed in zip(state["param_groups"], seeds):
        group.update(rounding_seed=seed, lr=123.0)
    with pytest.raises(ValueError, match="rounding_seed") as caught:
        opt.load_state_dict(state)
    assert_names(caught.value, words)
    assert [group["lr"] for group in opt.param_groups] == [1e-3] * 2
    assert opt.state_dict()["param_groups"][0]["rounding_seed"] == 5


@pytest.mark.parametrize("flatten", [False, True], ids=["plain", "flattened"])
def test_distributed_checkpoint_state_dicts(make, flatten):
    """A flattened one has the entries of the groups that torch knows: there the seed must be given again."""
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model, twin = (torch.nn.Linear(4, 3).bfloat16() for _ in range(2))
    opt = run(make, list(model.parameters()), rounding_seed=7)
    other = make(twin.parameters(), rounding_seed=7 if flatten else 0)
    saved = copy.deepcopy(get_optimizer_state_dict(model, opt, options=options))
    set_optimizer_state_dict(twin, other, saved, options=options)
    assert other.state_dict()["param_groups"] == opt.state_dict()["param_groups"]
