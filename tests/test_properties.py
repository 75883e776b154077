"""Property-based: arbitrary parameters, layouts, groups, windows and orders of calls follow the float64 oracle."""

import copy
import warnings

import hypothesis
import pytest
import torch
from cases import DTYPES
from harness import buffers, copies, give, in_layout, mid_window_state, params_of, values
from hypothesis import strategies as st
from oracle import Micro, Oracle, same_bits, within

# The same examples in every run: a failure here is a failure everywhere.
PROFILE = hypothesis.settings(
    derandomize=True, deadline=None, max_examples=150, database=None,
    suppress_health_check=list(hypothesis.HealthCheck), phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
)  # fmt: skip

shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)
layouts = st.sampled_from(["contiguous", "transposed", "misaligned", "stepped", "sliced"])
grad_layouts = st.one_of(layouts, st.sampled_from(["expanded", "expanded-all"]))
dtypes = st.sampled_from(list(DTYPES.values()))
factors = st.sampled_from([1.0, 0.25, 1 / 3, 0.0, 3.0, 1e-3, 1e3])
weights = st.sampled_from([1, 7, 512, 0, 0.5, 1e-6])


@st.composite
def hypers(draw):
    return {
        "lr": draw(st.sampled_from([0.0, 1e-6, 0.1, 1.0])),
        "betas": (draw(st.sampled_from([0.0, 0.5, 0.9])), draw(st.sampled_from([0.0, 0.6, 0.999]))),
        "eps": draw(st.sampled_from([1e-8, 1e-3])),
        "weight_decay": draw(st.sampled_from([0.0, 0.1, 0.5])),
        "amsgrad": draw(st.booleans()),
        "maximize": draw(st.booleans()),
    }


def fits(shape, layout):
    return "contiguous" if layout != "contiguous" and len(shape) < 2 and layout != "misaligned" else layout


@st.composite
def parameters(draw):
    shape, layout = draw(shapes), draw(layouts)
    return shape, draw(dtypes), fits(shape, layout)


def build(rows):
    return [torch.nn.Parameter(in_layout(values(shape, dtype), layout)) for shape, dtype, layout in rows]


class Run:
    """An optimizer, the oracle that follows it, and the window that both have open."""

    def __init__(self, make, groups, **options):
        self.params = [p for group in groups for p in group["params"]]
        self.opt = make(groups, **options)
        self.options = options
        self.oracle = Oracle(self.opt, **options)
        self.open: list[Micro] = []
        self.in_grad: Micro | None = None

    def backward(self, data, absent):
        """Puts gradients in place, added to what is there, as autograd does."""
        grads = []
        for i, p in enumerate(self.params):
            grad = None
            if i not in absent and p.grad is None:
                dtype = data.draw(dtypes) if data.draw(st.booleans()) else p.dtype
                grad = in_layout(values(p.shape, dtype), fits(p.shape, data.draw(grad_layouts)))
                give(p, grad)
            grads.append(p.grad)
        self.in_grad = Micro(grads)

    def take(self, scale, weight):
        if self.in_grad is not None and any(g is not None for g in self.in_grad.grads):
            self.open.append(Micro(self.in_grad.grads, scale, weight))
        self.in_grad = None

    def check_buffers(self):
        expected = self.oracle.accum(self.open)
        for i, (got, want) in enumerate(zip(buffers(self.opt), expected, strict=True)):
            assert (got is None) == (want is None)
            if want is not None:
                within(f"accum {i}", got, want, self.oracle.cells[self.params[i]].accum_dtype)
        total = sum(float(m.weight) for m in self.open if m.weight is not None)
        assert self.opt.pending == (len(self.open), pytest.approx(total))

    def step(self, scale, weight):
        self.take(scale, weight)
        self.oracle.window(self.open)
        self.open = []
        self.opt.step(scale=scale, weight=weight)
        self.oracle.check()
        self.oracle.adopt()
        assert self.opt.pending == (0, 0.0)


@hypothesis.given(data=st.data())
@PROFILE
def test_any_order_of_calls(make, data):
    rows = data.draw(st.lists(parameters(), min_size=1, max_size=4), label="parameters")
    torch.manual_seed(data.draw(st.integers(0, 1000), label="seed"))
    params = build(rows)
    cut = data.draw(st.integers(0, len(params)), label="cut")
    groups = [{"params": part, **data.draw(hypers())} for part in (params[:cut], params[cut:]) if part]
    options = {
        "accum_dtype": data.draw(st.sampled_from([torch.float32, torch.bfloat16])),
        "state_dtype": data.draw(st.sampled_from([torch.float32, torch.bfloat16])),
    }
    run = Run(make, groups, **options)
    calls = st.sampled_from(
        ["micro"] * 5 + ["step"] * 3 + ["again", "zero_grad", "discard", "reload", "deepcopy", "hyper", "swap"]
    )
    weighted = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in data.draw(st.lists(calls, min_size=3, max_size=14), label="calls"):
            if not run.open:
                weighted = data.draw(st.booleans())
            scale, weight = data.draw(factors), data.draw(weights) if weighted else None
            absent = data.draw(st.sets(st.integers(0, len(params) - 1)))
            if call == "micro":
                run.backward(data, absent)
                run.opt.accumulate(scale, weight=weight)
                run.take(scale, weight)
                run.check_buffers()
            elif call == "step":
                run.backward(data, absent)
                run.step(scale, weight)
            elif call == "again":
                run.opt.accumulate(scale, weight=weight)
                run.check_buffers()
            elif call == "zero_grad":
                run.opt.zero_grad()
                run.open = []
                run.check_buffers()
            elif call == "discard":
                run.backward(data, absent)
                run.opt.discard_microbatch()
                run.in_grad = None
                run.check_buffers()
            elif call in ("reload", "deepcopy"):
                run = moved(run, make, call)
            elif call == "hyper":
                for group in run.opt.param_groups:
                    group.update(data.draw(hypers()))
            elif call == "swap":
                for p in run.params:
                    old, p.data = p.data, p.detach().clone(memory_format=torch.preserve_format)
                    if 0 not in old.stride():
                        old.fill_(float("nan"))
        run.step(1.0, 1 if weighted and run.open else None)


def moved(run, make, how):
    """The same run in another optimizer over other parameters."""
    if how == "deepcopy":
        opt = copy.deepcopy(run.opt)
    else:
        state = copy.deepcopy(mid_window_state(run.opt))
        twins = iter(copies(run.params))
        for p in run.params:
            assert p.grad is None
        opt = make([{"params": [next(twins) for _ in g["params"]]} for g in run.opt.param_groups], **run.options)
        opt.load_state_dict(state)
    other = copy.copy(run)
    other.opt, other.params = opt, params_of(opt)
    other.oracle = copy.copy(run.oracle)
    other.oracle.opt = opt
    other.oracle.cells = dict(zip(other.params, run.oracle.cells.values()))
    other.check_buffers()
    return other


@hypothesis.given(data=st.data())
@PROFILE
def test_folding_the_last_microbatch_keeps_the_bits(make, data):
    """step(scale, weight=w) and accumulate(scale, weight=w); step(), for anything."""
    rows = data.draw(st.lists(parameters(), min_size=1, max_size=4))
    hyper, accum_dtype = data.draw(hypers()), data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    weighted = data.draw(st.booleans())
    window = data.draw(st.lists(st.tuples(factors, weights), min_size=1, max_size=4))
    absent = data.draw(st.sets(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=6))
    seed = data.draw(st.integers(0, 1000))
    runs = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for fold in (True, False):
            torch.manual_seed(seed)
            params = build(rows)
            opt = make(params, accum_dtype=accum_dtype, **hyper)
            for _ in range(2):
                for k, (scale, weight) in enumerate(window):
                    for i, p in enumerate(params):
                        p.grad = None if (k, i) in absent else values(p.shape, p.dtype)
                    last = fold and k == len(window) - 1
                    (opt.step if last else opt.accumulate)(scale=scale, weight=weight if weighted else None)
                if not fold:
                    opt.step()
            runs.append((opt, params))
    (a, left), (b, right) = runs
    for p, q in zip(left, right):
        assert same_bits(p, q)
        assert a.state.get(p, {}).keys() == b.state.get(q, {}).keys()
        assert all(same_bits(a.state[p][k], b.state[q][k]) for k in a.state.get(p, {}))
