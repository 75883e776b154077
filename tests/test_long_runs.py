"""1000 steps in every mode: still within the tolerance table of the float64 reference, with master weights too."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from backwards import loss_with
from cases import ROUNDOFF
from harness import values
from oracle import Micro, Oracle, same_bits, within
from torch import nn

from benchmarks.loops import MODES, begin
from fused_accum.backends import rounding

pytestmark = pytest.mark.filterwarnings("error")

STEPS, CHECKED = 1000, {1, 10, 50, 1000}
KINDS = {
    "fp32": (torch.float32, [None]),
    "bf16": (torch.bfloat16, ["fp32", "split"]),  # fp32 buffers
}


class Model(nn.Module):
    """A layer that direct_wgrad() covers and a parameter that it does not, both with gradients known exactly."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)
        self.gain = nn.Parameter(values((7,)))

    def loss(self, x, g, gain_grad):
        """Of gradients gain_grad, outer(g, x) and g, in the order of the parameters."""
        return loss_with([self.layer(x)], [g]) + loss_with([self.gain], [gain_grad])


def micro_batch(dtype):
    """What goes into ``Model.loss``, and the gradients: x of powers of two, so that their products are exact."""
    x = torch.randint(-3, 3, (1, 6)).float().exp2() * (torch.randint(0, 2, (1, 6)) * 2 - 1)
    g, gain_grad = values((1, 5), dtype), values((7,), dtype)
    return (x.to(dtype), g, gain_grad), [gain_grad, g.double().t() @ x.double(), g[0]]


class Run:
    """One mode, with one kind of master weights."""

    def __init__(self, make, mode, model, master, hyper):
        self.model, self.mode = copy.deepcopy(model), mode
        self.opt = make(self.model.parameters(), master_weights=master, **hyper)
        self.handle = begin(mode, self.opt, self.model)
        self.learn = MODES[mode]

    def weights(self):
        """The float32 weights, which parameters of 16 bits are rounded from."""
        for p in self.model.parameters():
            kept = self.opt.state[p].get("master")
            if kept is None:
                yield p.detach()
            elif kept.dtype == torch.int16:
                yield rounding.joined(p.detach(), kept)
                assert same_bits(rounding.joined(p.detach(), torch.zeros_like(kept)), p.detach().float())
            else:
                yield kept
                assert same_bits(kept.to(p.dtype), p)

    def check(self, oracle):
        for i, (p, weight, cell) in enumerate(zip(self.model.parameters(), self.weights(), oracle.cells.values())):
            state = self.opt.state[p]
            assert float(state["step"]) == cell.step
            for name in ("exp_avg", "exp_avg_sq"):
                within(f"{self.mode}: {name} of parameter {i}", state[name], getattr(cell, name), torch.float32)
            within(f"{self.mode}: parameter {i}", weight, cell.param, torch.float32)


@pytest.mark.parametrize(("dtype", "masters"), KINDS.values(), ids=KINDS)
def test_1000_steps(make, on, emulated, dtype, masters):
    """The reference sees each micro-batch's gradient, and never what a run has become."""
    model = Model().to(device=on[1], dtype=dtype)
    hyper = {"lr": 0.02, "betas": (0.9, 0.95), "weight_decay": 0.1}
    runs = [Run(make, mode, model, master, hyper) for mode in MODES for master in masters]
    wide = copy.deepcopy(model).float()
    followed = torch.optim.AdamW(wide.parameters(), **hyper)  # carries the hyper-parameters; is never stepped
    oracle = Oracle(followed)
    steps = 50 if on[0] == "reference" or emulated else STEPS  # each operation is torch's; each step is as on the CPU
    for step in range(1, steps + 1):
        lr = 0.02 * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        # Tokens: powers of two, by which bf16 gradients can be multiplied exactly.
        tokens = [2 ** int(k) for k in torch.randint(0, 6, (1 + (step % 4 == 0),))]
        micros = [micro_batch(dtype) for _ in tokens]
        followed.param_groups[0]["lr"] = lr
        oracle.window([Micro(grads, weight=n) for (_, grads), n in zip(micros, tokens)])
        for run in runs:
            run.opt.param_groups[0]["lr"] = lr
            for k, ((inputs, _), n) in enumerate(zip(micros, tokens)):
                loss = run.model.loss(*(t.to(on[1]) for t in inputs))
                run.learn(run.opt, loss, SimpleNamespace(tokens=n, ends_window=k == len(tokens) - 1))
            if step in CHECKED:
                run.check(oracle)
    for cell in oracle.cells.values():  # what was allowed is these steps' worth of roundings, not more
        assert cell.step == steps
        size = cell.param.value.abs().mean()
        assert float(cell.param.bound.mean() / size) < 10 * steps * ROUNDOFF[torch.float32]
