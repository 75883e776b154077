"""torch.compile: ops in a full graph, the optimizer with at most one break, nothing compiled twice."""

import warnings

import pytest
import torch
from harness import parameters, values
from lists import Lists, float64
from oracle import same_bits

from fused_accum import ops


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


def test_compiled_training_step(fresh_dynamo, make, device):
    """A whole step compiled, with accumulate(): the optimizer breaks the graph and stays right."""
    runs = []
    for compile_it in (False, True):
        torch.manual_seed(3)
        model = torch.nn.Linear(4, 3).to(device)
        opt = make(model.parameters(), lr=0.1)

        def train(x, last, model=model, opt=opt):
            model(x).square().mean().backward()
            (opt.step if last else opt.accumulate)(scale=0.5)

        step = torch.compile(train, backend="aot_eager") if compile_it else train
        for n in range(6):
            step(values((2, 4), device=device), n % 2 == 1)
        runs.append(list(model.parameters()))
    for p, q in zip(*runs):
        torch.testing.assert_close(p, q)
