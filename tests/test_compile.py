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
