"""Direct writes on side streams come before what reads them: with recorded streams here, with real ones on a GPU."""

import pytest
import torch
from conftest import KERNEL_PAIRS
from oracle import same_bits
from torch import nn
from torch.utils.checkpoint import checkpoint

from fused_accum import FusedAccumAdamW, streams


class Stream:
    """Takes the place of a device's stream; ``waits`` are (who, for whom), in order."""

    def __init__(self, name, waits):
        self.name, self.waits, self.device = name, waits, torch.device("cpu")

    def wait_stream(self, other):
        self.waits.append((self.name, other.name))


class OnStream(torch.autograd.Function):
    """From here on the backward runs on another stream, as autograd has it for layers that ran there."""

    @staticmethod
    def forward(ctx, x, machine, name):
        ctx.machine, ctx.name = machine, name
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        ctx.machine.name = ctx.name
        return g, None, None


class Machine:
    def __init__(self):
        self.waits, self.name = [], "main"
        self.streams = {name: Stream(name, self.waits) for name in ("main", "side", "third")}

    def current(self, _):
        return self.streams[self.name]

    def back(self, _=None):
        self.name = "main"


@pytest.fixture
def machine(monkeypatch):
    machine = Machine()
    monkeypatch.setattr(streams, "current", machine.current)
    # As the engine does: before it calls back, the caller's streams are the current ones again.
    finish = streams.after_all
    monkeypatch.setattr(streams, "after_all", lambda found: (machine.back(), finish(found)))
    return machine


def direct():
    layers = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 3))
    opt = FusedAccumAdamW(layers.parameters())
    opt.direct_wgrad(layers)
    return layers, opt


def test_the_caller_waits_for_every_stream_that_was_written_on(machine):
    layers, opt = direct()
    hidden = OnStream.apply(layers[0](torch.tensor([1, 2])), machine, "third")  # the embedding's backward
    hidden = OnStream.apply(layers[1](hidden), machine, "side")  # the first Linear's
    layers[2](hidden).sum().backward()
    assert set(machine.waits) == {("main", "side"), ("main", "third")}
    assert opt.pending.microbatches == 1


def test_nobody_waits_where_all_is_on_one_stream(machine):
    layers, opt = direct()
    for _ in range(2):
        layers(torch.tensor([1, 2])).sum().backward()
    opt.step()
    assert machine.waits == []


def test_a_second_use_waits_for_the_first(machine):
    layers, opt = direct()
    x = torch.ones(2, 4, requires_grad=True)
    layers[1](OnStream.apply(layers[1](x), machine, "side")).sum().backward()
    assert machine.waits.count(("side", "main")) == 2  # weight and bias
    assert machine.waits[-1] == ("main", "side")
    assert opt.pending.microbatches == 1


def test_a_write_of_an_earlier_backward_is_waited_for(machine):
    layers, opt = direct()
    OnStream.apply(layers[1](torch.ones(2, 4)), machine, "side").sum().backward()
    machine.waits.clear()
    OnStream.apply(layers[1](torch.ones(2, 4)), machine, "third").sum().backward()
    assert machine.waits[:2] == [("third", "side")] * 2
    assert machine.waits[2:] == [("main", "third")]
    assert opt.pending.microbatches == 2


def test_an_update_inside_the_backward_waits_for_the_write(machine):
    layers, opt = direct()
    parameter = layers[1].weight
    nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in layers[1].parameters()]
    for node in nodes:
        node.register_prehook(machine.back)  # autograd's part may be on another stream than the layer's
    with opt.step_in_backward():
        OnStream.apply(layers[1](torch.ones(2, 4)), machine, "side").sum().backward()
    assert machine.waits[0] == ("main", "side")
    assert float(opt.state[parameter]["step"]) == 1


@pytest.mark.parametrize("uses", [1, 2])
def test_autograds_own_addition_waits_for_the_direct_one(machine, uses):
    """A weight that a covered layer and an ordinary operation use: autograd adds the latter's part to p.grad on the
    stream where the parameter was first used, maybe not the layer's. Once per backward, of a kept graph too."""
    layers, opt = direct()
    layer, before = layers[1], []
    twin = nn.Linear(4, 4)
    twin.load_state_dict(layer.state_dict())

    def loss_of(layer):
        hidden, ordinary = torch.ones(2, 4), layer.weight.square().sum()
        for _ in range(uses):
            hidden = OnStream.apply(layer(hidden), machine, "side")
        return hidden.sum() + ordinary

    loss = loss_of(layer)
    node = torch.autograd.graph.get_gradient_edge(layer.weight).node
    node.register_prehook(lambda _: setattr(machine, "name", "third"))  # where autograd adds
    layer.weight.register_post_accumulate_grad_hook(lambda p: before.append(machine.waits.count(("third", "side"))))
    for _ in range(3):
        machine.waits.clear()
        loss.backward(retain_graph=True)
        loss_of(twin).backward()
        machine.back()
    assert before == [1, 1, 1]
    torch.testing.assert_close(layer.weight.grad, twin.weight.grad)
    assert opt.pending.microbatches == 3


def test_streams_of_a_reentrant_checkpoint_are_waited_for(machine):
    layers, opt = direct()
    x = torch.ones(2, 4, requires_grad=True)

    def segment(x):
        return OnStream.apply(layers[1](x), machine, "side")

    y = checkpoint(segment, x * 1, use_reentrant=True)
    layers[2](y).sum().backward()
    assert machine.waits[-1] == ("main", "side")
    assert opt.pending.microbatches == 1


@pytest.mark.parametrize("on", KERNEL_PAIRS)
@pytest.mark.parametrize("inside", [False, True], ids=["step", "step-in-backward"])
def test_on_real_streams(on, inside):
    """Layers on a busy side stream, update on the default one. Not run on a GPU yet."""
    if on[1] != "cuda":
        pytest.skip("needs a GPU")
    torch.manual_seed(0)
    plain, layers = (nn.Sequential(*[nn.Linear(512, 512) for _ in range(3)]).cuda() for _ in range(2))
    layers.load_state_dict(plain.state_dict())
    opts = [FusedAccumAdamW(m.parameters(), lr=1e-3, backend=on[0]) for m in (plain, layers)]
    handles = [opt.direct_wgrad(m) for opt, m in zip(opts, (plain, layers))]
    side, x = torch.cuda.Stream(), torch.randn(64, 512, device="cuda")
    for k in range(40):
        plain(x).square().mean().backward()
        if k % 4 == 3:
            opts[0].step()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(1_000_000)
            hidden = layers[1](layers[0](x))
        torch.cuda.current_stream().wait_stream(side)
        loss = layers[2](hidden).square().mean()
        if k % 4 < 3:
            loss.backward()
        elif inside:
            with opts[1].step_in_backward():
                loss.backward()
        else:
            loss.backward()
            opts[1].step()
        hidden.record_stream(torch.cuda.current_stream())
    torch.cuda.synchronize()
    for handle in handles:
        handle.remove()
    assert all(same_bits(p, q) for p, q in zip(plain.parameters(), layers.parameters()))
