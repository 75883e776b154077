"""torch.compile: ops in a full graph, the optimizer with at most one break, nothing compiled twice."""

import warnings

import pytest
import torch
from conftest import DEVICES
from harness import parameters, values
from lists import Lists, float64
from oracle import same_bits

from fused_accum import FusedAccumAdamW, ops


@pytest.fixture
def fresh_dynamo():
    import torch._dynamo

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield torch._dynamo
    torch._dynamo.reset()


def test_ops_compile_in_a_full_graph_once(fresh_dynamo):
    """A training step's tail as one graph; a new lr or scale every call is data, not a reason to compile again."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")

    def tail(lists, hyper, scale):
        ops.accumulate_(lists[2], lists[1], scale)
        ops.adamw_(*lists, hyper)
        return [p * 2 for p in lists[0]]

    compiled = torch.compile(tail, backend=counter, fullgraph=True)
    torch.manual_seed(1)
    eager, graph = Lists([(65,), (3, 4)]), None
    torch.manual_seed(1)
    graph = Lists([(65,), (3, 4)])
    for n in range(10):
        hyper, scale = float64(0.5 / (n + 1), 0.9, 0.999, 1e-8, 0.1, 0.5, 1.0), float64(0.1 * (n + 1))
        expected, got = tail(eager.all(), hyper, scale), compiled(graph.all(), hyper, scale)
        assert all(map(same_bits, expected, got))
        if n == 0:
            frames = counter.frame_count  # torch may restart its analysis within the first call
    for ours, theirs in zip(eager.all(), graph.all()):
        assert all(map(same_bits, ours, theirs))
    assert counter.frame_count == frames
    assert fresh_dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_compiled_step_has_one_graph_break_at_most_and_no_recompilation(fresh_dynamo, make, device):
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    runs = []
    for compile_it in (False, True):
        torch.manual_seed(2)
        params = parameters((65,), (3, 4), device=device)
        opt = make(params, lr=0.5, weight_decay=0.3)
        step = torch.compile(opt.step, backend=counter) if compile_it else opt.step
        for n in range(50):
            opt.param_groups[0]["lr"] = 0.5 / (n + 1)
            for p in params:
                p.grad = values(p.shape, device=device)
            step()
            if n == 2:
                frames = counter.frame_count
                unique = fresh_dynamo.utils.counters["stats"].get("unique_graphs", 0)
        runs.append(params)
    assert all(map(same_bits, *runs))
    assert counter.frame_count == frames, "recompiled while only lr changed"
    assert fresh_dynamo.utils.counters["stats"].get("unique_graphs", 0) == unique
    assert sum(fresh_dynamo.utils.counters["graph_break"].values()) <= 1
    assert not fresh_dynamo.utils.counters["recompiles"]


ROWS = [  # the mode; how lr, and each micro-batch's scale or weight, come, always with a new value
    ("explicit", float, "scale", torch.tensor),
    ("explicit", "fill_", "weight", float),
    ("in-backward", torch.tensor, "scale", float),
    ("direct", "fill_", "weight", torch.tensor),
    ("update in backward", lambda x: round(10 * x), "scale", float),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("mode", "lr_kind", "name", "kind"), ROWS, ids=[f"{row[0]}-{row[2]}" for row in ROWS])
def test_a_compiled_training_step_is_compiled_once(fresh_dynamo, device, mode, lr_kind, name, kind):
    """Case 17: forward, backward and the optimizer's calls in one compiled function, 50 calls. The optimizer breaks
    the graph, its hooks are not compiled, and no value is compiled in, so that Python numbers need no remedy."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter, frames, runs = CompileCounterWithBackend("aot_eager"), [], []
    for compile_it in (False, True):
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2)).to(device)
        opt = FusedAccumAdamW(model.parameters(), lr=torch.tensor(0.1) if lr_kind == "fill_" else 0.1)
        if mode == "direct":
            opt.direct_wgrad(model)
        elif mode != "explicit":
            opt.accumulate_in_backward()

        def train(x, factor, last, model=model, opt=opt):
            loss = model(x).square().mean()
            if mode == "explicit":
                loss.backward()
                (opt.step if last else opt.accumulate)(**{name: factor})
            elif last and mode == "update in backward":
                with opt.step_in_backward():
                    opt.scale_loss(loss, **{name: factor}).backward()
            else:
                opt.scale_loss(loss, **{name: factor}).backward()
                if last:
                    opt.step()

        call = torch.compile(train, backend=counter) if compile_it else train
        for n in range(50):
            lr = 0.5 / (n + 1)
            if lr_kind == "fill_":
                opt.param_groups[0]["lr"].fill_(lr)
            else:
                opt.param_groups[0]["lr"] = lr_kind(lr)
            call(values((2, 4), device=device), kind(0.1 * (n + 1)), n % 2 == 1)
            frames.append(counter.frame_count)
        runs.append(list(model.parameters()))
    assert frames[-1] == frames[50 + 4], "recompiled while only numbers changed"
    assert frames[-1] <= 12  # what the parts of the function need, with floats first taken for constants
    for p, q in zip(*runs):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("name", ["scale", "weight"])
def test_a_python_float_scale_or_weight_in_a_compiled_step_needs_no_remedy(fresh_dynamo, name):
    """accumulate() and step() with a new Python float at each of 50 calls: nothing is compiled anew for it, and the
    bits are those of the plain function."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter, frames, runs = CompileCounterWithBackend("eager"), [], []
    for compile_it in (False, True):
        torch.manual_seed(3)
        model = torch.nn.Linear(4, 2)
        opt = FusedAccumAdamW(model.parameters(), lr=0.1)

        def train(x, first, last, model=model, opt=opt):
            model(x[0]).square().mean().backward()
            opt.accumulate(**{name: first})
            model(x[1]).square().mean().backward()
            opt.step(**{name: last})

        call = torch.compile(train, backend=counter) if compile_it else train
        for n in range(50):
            call(values((2, 3, 4)), 0.1 * (n + 1), 0.37 / (n + 1))
            frames.append(counter.frame_count)
        runs.append([*model.parameters(), *(opt.state[p]["exp_avg"] for p in model.parameters())])
    assert all(map(same_bits, *runs))
    assert frames[-1] == frames[50 + 2], "recompiled while only numbers changed"
    assert 0 < frames[-1] <= 6  # two forwards, with the floats first taken for constants
    assert not fresh_dynamo.utils.counters["frames"].get("recompile_limit", 0)


@pytest.mark.parametrize("call", ["accumulate", "step", "scale_loss", "zero_grad"])
def test_a_full_graph_with_a_call_of_the_optimizer_says_what_to_do(fresh_dynamo, call):
    model = torch.nn.Linear(4, 2)
    opt = FusedAccumAdamW(model.parameters(), lr=0.1)

    @torch.compile(backend="eager", fullgraph=True)
    def train(x):
        loss = model(x).sum()
        getattr(opt, call)(*([loss] if call == "scale_loss" else []))

    refusal = r"methods are not compiled.*only the model.*leave fullgraph"
    with pytest.raises(fresh_dynamo.exc.Unsupported, match=refusal):
        train(torch.ones(3, 4))


@pytest.mark.parametrize("mode", ["in-backward", "direct", "weight"])
def test_compiled_autograd_is_refused_where_backward_accumulates(fresh_dynamo, mode):
    """It calls the hooks, but never says that a backward is over."""
    model = torch.nn.Linear(4, 2)
    opt = FusedAccumAdamW(model.parameters(), lr=0.1)
    opt.direct_wgrad(model) if mode == "direct" else opt.accumulate_in_backward()
    before = [p.detach().clone() for p in model.parameters()]
    loss = model(torch.ones(3, 4)).sum()
    if mode == "weight":
        loss = opt.scale_loss(loss, weight=3)
    compiled = fresh_dynamo.compiled_autograd._enable(torch.compile(backend="eager"))
    with compiled, pytest.raises(RuntimeError, match=r"within compiled autograd.*Switch it off.*explicit mode"):
        loss.backward()
    if any(p.grad is not None for p in model.parameters()):
        with pytest.raises(RuntimeError, match="did not finish"):
            opt.step()
    opt.zero_grad()
    assert all(map(same_bits, model.parameters(), before))
    model(torch.ones(3, 4)).sum().backward()
    assert opt.pending.microbatches == 1
    opt.step()


def test_compiled_autograd_works_in_explicit_mode(fresh_dynamo):
    runs = []
    for compiled in (False, True):
        torch.manual_seed(3)
        model = torch.nn.Linear(4, 2)
        opt = FusedAccumAdamW(model.parameters(), lr=0.1)
        for n in range(4):
            loss = model(values((3, 4))).square().mean()
            if compiled:
                with fresh_dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
                    loss.backward()
            else:
                loss.backward()
            (opt.step if n % 2 else opt.accumulate)(weight=n + 1)
        runs.append(list(model.parameters()))
    assert all(map(same_bits, *runs))
