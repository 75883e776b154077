"""The code of master_weights="split", and the ops with masters."""

import copy

import numpy
import pytest
import torch
from cases import LAYOUT_SHAPE
from harness import in_layout, parameter, values
from lists import Lists, float64
from master_runs import every_kind, masters, rounds_to
from master_runs import make_fixture as _make  # noqa: F401
from oracle import same_bits

from fused_accum import ops
from fused_accum.backends import rounding

pytestmark = pytest.mark.filterwarnings("error")


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
