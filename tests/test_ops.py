"""fused_accum.ops: torch.library ops, versions, full-graph compilation; the same lists into every backend."""


import pytest
import torch
from cases import DTYPES, HYPER, LAYOUT_SHAPE, SHAPES, SMALL_SHAPES
from harness import copies, in_layout, micro_batches, parameters, run_window, values
from lists import Lists, float64, hyper_tensor
from oracle import Micro, same_bits

from fused_accum import backends, ops
from fused_accum.rows import Rows
from fused_accum.state import Hyper

# ---- the ops against the oracle --------------------------------------------------------------------------


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_accumulate(dtype, first):
    shapes = [SHAPES[name] for name in SMALL_SHAPES]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    accums = [torch.full(s, float("nan"), dtype=wide) if first else values(s, wide) for s in shapes]
    grads = [values(s, dtype) for s in shapes]
    expected = [(0 if first else a) + wide_scale(0.3, wide) * g.to(wide) for a, g in zip(accums, grads)]
    ops.accumulate_(accums, grads, float64(0.3), first=first)
    for a, e in zip(accums, expected):
        torch.testing.assert_close(a, e, rtol=1e-6, atol=1e-6)


def wide_scale(x, dtype):
    return torch.tensor(x, dtype=dtype)


@pytest.mark.parametrize("given", ["grads", "accums", "both"])
@pytest.mark.parametrize("hyper", HYPER.values(), ids=HYPER)
def test_adamw(hyper, given):
    lists = Lists([(65,), (), (13, 17), (0,)], amsgrad=hyper.get("amsgrad", False), with_accum=given != "grads")
    oracle, group = lists.oracle(**hyper)
    grads = [] if given == "accums" else lists.grads
    micros = [Micro([a.clone() for a in lists.accums])] if lists.accums else []
    micros += [Micro(grads, 0.25)] if grads else []
    for micro in micros:
        micro.scale *= 0.5  # the coefficient, folded
    oracle.window(micros)
    ops.adamw_(
        lists.params, grads, lists.accums, lists.exp_avgs, lists.exp_avg_sqs, lists.max_exp_avg_sqs, lists.steps,
        hyper_tensor(group, 0.25, 0.5), maximize=hyper.get("maximize", False),
    )  # fmt: skip
    lists.check(oracle)
    assert all(a.count_nonzero() == 0 for a in lists.accums)


def test_hyper_names_its_elements():
    assert ops.HYPER == ("lr", "beta1", "beta2", "eps", "weight_decay", "scale", "coefficient")


@pytest.mark.parametrize("layout", ["transposed", "stepped", "misaligned", "channels_last"])
def test_strided_lists(layout):
    lists = Lists([LAYOUT_SHAPE], layout=layout)
    lists.grads = [in_layout(g, "sliced") for g in lists.grads]
    oracle, group = lists.oracle(lr=0.5)
    micros = [Micro([a.clone() for a in lists.accums]), Micro(lists.grads, 0.5)]
    oracle.window(micros)
    ops.adamw_(*lists.all(), hyper_tensor(group, 0.5))
    lists.check(oracle)


def test_versions_are_bumped_where_written_and_only_there():
    lists = Lists([(5,), (3,)], amsgrad=True)
    params, _, *others = lists.all()
    written = sum(others, params)
    before = [t._version for t in written]
    grad_versions = [g._version for g in lists.grads]
    _, group = lists.oracle()
    ops.adamw_(*lists.all(), hyper_tensor(group))
    assert all(t._version > v for t, v in zip(written, before))
    versions = [a._version for a in lists.accums]
    ops.accumulate_(lists.accums, lists.grads, float64(1.0))
    assert all(a._version > v for a, v in zip(lists.accums, versions))
    assert [g._version for g in lists.grads] == grad_versions


SAMPLES = {
    "fp32": {},
    "bf16": {"dtype": torch.bfloat16},
    "fp64-amsgrad": {"dtype": torch.float64, "amsgrad": True},
    "no-buffer": {"with_accum": False},
    "transposed": {"layout": "transposed"},
    "empty-list": {"shapes": []},
}


@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES)
def test_opcheck_adamw(sample):
    sample = dict(sample)
    lists = Lists(sample.pop("shapes", [(5, 3), (2, 2)]), **sample)
    hyper = float64(0.1, 0.9, 0.999, 1e-8, 0.1, 0.5, 1.0)
    torch.library.opcheck(torch.ops.fused_accum.adamw_.default, (*lists.all(), hyper))
    torch.library.opcheck(torch.ops.fused_accum.adamw_.default, (*lists.all(), hyper), {"maximize": True})


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES)
def test_opcheck_accumulate(sample, first):
    sample = dict(sample, with_accum=True)
    lists = Lists(sample.pop("shapes", [(5, 3), (2, 2)]), **sample)
    arguments = (lists.accums, lists.grads, float64(0.5))
    torch.library.opcheck(torch.ops.fused_accum.accumulate_.default, arguments, {"first": first})


@pytest.mark.parametrize(("name", "written"), [("accumulate_", {"accums"}), ("adamw_", {
    "params", "accums", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "steps"})])  # fmt: skip
def test_schema_marks_every_mutation(name, written):
    schema = getattr(torch.ops.fused_accum, name).default._schema
    marked = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    assert marked == written
    assert not schema.returns


REFUSALS = {
    "accums-short": (lambda t: t.accums.pop(), ValueError, ["accums", "1", "2"]),
    "moments-short": (lambda t: t.exp_avgs.pop(), ValueError, ["exp_avgs", "1", "2"]),
    "steps-short": (lambda t: t.steps.pop(), ValueError, ["steps", "1", "2"]),
    "shape": (lambda t: t.grads.__setitem__(1, torch.zeros(4)), RuntimeError, ["grads", "(4,)", "(3,)"]),
    "dtype": (lambda t: t.params.__setitem__(1, torch.zeros(3, dtype=torch.int32)), TypeError, ["params", "int32"]),
    "complex": (lambda t: t.grads.__setitem__(1, torch.zeros(3, dtype=torch.complex64)), TypeError, ["complex64"]),
    "sparse": (lambda t: t.grads.__setitem__(1, torch.eye(3)[0].to_sparse()), (TypeError, RuntimeError), ["grads"]),
    "steps-dtype": (
        lambda t: t.steps.__setitem__(1, torch.zeros((), dtype=torch.int64)), (TypeError, ValueError), ["step"],
    ),
    "nothing-to-step-from": (lambda t: (t.grads.clear(), t.accums.clear()), ValueError, ["grads", "accums"]),
}  # fmt: skip


@pytest.mark.parametrize(("spoil", "error", "words"), REFUSALS.values(), ids=REFUSALS)
def test_refused_lists_change_nothing(spoil, error, words):
    lists = Lists([(5,), (3,)])
    spoil(lists)
    before = [[t.clone() for t in tensors] for tensors in lists.all()]
    with pytest.raises(error) as caught:
        ops.adamw_(*lists.all(), float64(0.1, 0.9, 0.999, 1e-8, 0.1, 1.0, 1.0))
    for word in words:
        assert word in str(caught.value)
    for tensors, copied in zip(lists.all(), before):
        for t, c in zip(tensors, copied):
            assert t.layout != torch.strided or t.dtype == torch.complex64 or same_bits(t, c)


@pytest.mark.parametrize("hyper", [torch.zeros(7), torch.zeros(6, dtype=torch.float64)], ids=["fp32", "six"])
def test_refused_scalars(hyper):
    lists = Lists([(5,)])
    with pytest.raises(ValueError, match=r"hyper.*float64.*\(7,\)"):
        ops.adamw_(*lists.all(), hyper)
    with pytest.raises(ValueError, match=r"scale.*float64"):
        ops.accumulate_(lists.accums, lists.grads, torch.tensor(1.0))


def test_autograd_does_not_flow_through():
    """In place on leaves that require grad, under no_grad as torch's own in-place functions."""
    lists = Lists([(5,)])
    params = [torch.nn.Parameter(p) for p in lists.params]
    with torch.no_grad():
        ops.adamw_(params, *lists.all()[1:], float64(0.1, 0.9, 0.999, 1e-8, 0.1, 1.0, 1.0))
    assert params[0].requires_grad
    assert params[0].grad_fn is None


# ---- the same lists into every backend -------------------------------------------------------------------


def test_backends_take_lists_directly(on):
    """What other optimizers and the ops build on: Rows with gradients, buffers, both, several groups and dtypes."""
    name, device = on
    backend = backends.registry()[name]
    a, b = Lists([(65,), (3, 4)], device=device), Lists([(7,)], dtype=torch.bfloat16, device=device)
    oracles = [lists.oracle(**hyper) for lists, hyper in ((a, {"lr": 0.5}), (b, {"lr": 0.1, "maximize": True}))]
    for (oracle, _), lists, with_grads in zip(oracles, (a, b), (True, False)):
        micros = [Micro([x.clone() for x in lists.accums], 0.5)]
        oracle.window(micros + ([Micro(lists.grads, 0.125)] if with_grads else []))
    backend.adamw(
        Rows(
            params=[*a.params, *b.params],
            grads=[*a.grads, None],
            accums=[*a.accums, *b.accums],
            present=[1, 1, 1],
            accum_dtypes=[torch.float32] * 3,
            exp_avgs=[*a.exp_avgs, *b.exp_avgs],
            exp_avg_sqs=[*a.exp_avg_sqs, *b.exp_avg_sqs],
            max_exp_avg_sqs=[None] * 3,
            steps=[*a.steps, *b.steps],
            groups=[0, 0, 1],
            hypers=[Hyper(lr, 0.9, 0.999, 1e-8, 0.01, lr == 0.1, False) for lr in (0.5, 0.1)],
            scale=0.25,
            coefficient=0.5,
        )
    )
    for (oracle, _), lists in zip(oracles, (a, b)):
        lists.check(oracle)
        assert all(x.count_nonzero() == 0 for x in lists.accums)
    accum, grad = values((65,), device=device), values((65,), torch.bfloat16, device)
    first = torch.full((65,), float("nan"), device=device)
    expected = accum.double() + 0.3 * grad.double(), 0.3 * grad.double()
    backend.accumulate([accum, first], [grad, grad], [False, True], 0.3)
    for got, want in zip((accum, first), expected):
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)


def test_ops_and_optimizer_give_the_same_bits():
    """One set of kernels under both doors."""
    from fused_accum import FusedAccumAdamW

    params = parameters((65,), (3, 4))
    lists = Lists([(65,), (3, 4)])
    lists.params, lists.accums = [p.detach().clone() for p in params], [torch.empty(p.shape) for p in params]
    opt = FusedAccumAdamW(copies(params), lr=0.5, weight_decay=0.3)
    for n in range(3):
        micros = micro_batches(params, [(0.5, None), (0.25, None)])
        run_window(opt, micros)
        ops.accumulate_(lists.accums, micros[0].grads, float64(0.5), first=True)
        lists.grads = micros[1].grads
        ops.adamw_(*lists.all(), float64(0.5, 0.9, 0.999, 1e-8, 0.3, 0.25, 1.0))
        for i, p in enumerate(opt.param_groups[0]["params"]):
            assert same_bits(p, lists.params[i]), n
            assert same_bits(opt.state[p]["exp_avg_sq"], lists.exp_avg_sqs[i])
