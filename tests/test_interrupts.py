"""A KeyboardInterrupt at any line of a call: that has happened or has not, or the optimizer says what to do."""

import copy
import sys
import warnings

import pytest
import torch
from harness import copies, mid_window_state, parameters, values

import fused_accum

PACKAGE = fused_accum.__path__[0]
# (call, number of the micro-batch put into p.grad before it or None, scale, weight) of one window.
FOLDED = [("accumulate", 0, 0.5, 3.0), ("accumulate", 1, 1.0, 0.0), ("step", 2, 1.0, 5.0)]
APART = [("accumulate", 0, 0.5, 3.0), ("accumulate", 2, 1.0, 5.0), ("step", None, 1.0, None)]
SCALED = [("accumulate", 0, 0.25, None), ("accumulate", 1, 0.25, None), ("step", 2, 0.5, None)]
REJECTED = [("accumulate", 0, 1.0, 3.0), ("accumulate", 3, 1.0, 2.0), ("step", 2, 1.0, 5.0)]
LAST_REJECTED = [("accumulate", 0, 1.0, 3.0), ("step", 3, 1.0, 2.0)]
# Options, the calls, which of them are interrupted, and whether the optimizer is a new one every time.
CASES = {
    "first-window": ({}, FOLDED, (0, 2), True),
    "no-weight": ({}, FOLDED, (1,), False),
    "apart": ({}, APART, (2,), False),
    "scales-fp32-masters": ({"master_weights": "fp32", "amsgrad": True}, SCALED, (2,), False),
    "clip": ({"max_grad_norm": 0.1}, FOLDED, (2,), False),
    "clip-apart": ({"max_grad_norm": 0.1}, APART, (2,), False),
    "skip-step": ({"skip_nonfinite": "step"}, LAST_REJECTED, (1,), False),
    "skip-microbatch": ({"skip_nonfinite": "microbatch"}, REJECTED, (1,), False),
    "skip-last-microbatch": ({"skip_nonfinite": "microbatch"}, LAST_REJECTED, (1,), False),
}


class Stop:
    """Raises KeyboardInterrupt at the k-th line that is run in the package; ``at``: which that was."""

    def __init__(self, k: int) -> None:
        self.left, self.at = k, None

    def trace(self, frame, event, arg):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            self.left -= 1
            if not self.left:
                sys.settrace(None)
                self.at = f"{frame.f_code.co_filename.removeprefix(PACKAGE)}:{frame.f_lineno} {frame.f_code.co_name}"
                raise KeyboardInterrupt
        return self.trace

    def during(self, call) -> bool:
        """Whether it came to that before ``call`` was over."""
        sys.settrace(self.trace)
        try:
            call()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        return self.at is not None


class Run:
    """One optimizer, and what is known to be right; ``loud``: the last error it has answered an interrupt with."""

    def __init__(self, make, start, options, keeps=False) -> None:
        params, self.micros = start
        self.params, self.keeps = copies(params), keeps
        self.opt = make(self.params, lr=0.1, weight_decay=0.1, **options)

    def call(self, name, number, scale, weight) -> None:
        if number is not None:
            for p, g in zip(self.params, self.micros[number]):
                p.grad = None if g is None else g.clone()
        getattr(self.opt, name)(scale=scale, weight=weight)

    def window(self, calls, stopped=None, stop=None) -> bool:
        """The calls of one window, of which number ``stopped`` is interrupted. Whether it was."""
        self.loud = None
        if self.keeps:
            kept = [p.detach().clone() for p in self.params], copy.deepcopy(self.opt.state_dict())
        for n, call in enumerate(calls):
            if n != stopped:
                self.call(*call)
                continue
            if not stop.during(lambda call=call: self.call(*call)):
                return False
            try:
                self.go_on(*call)
            except RuntimeError as error:
                self.loud = str(error)
            if self.loud is not None:
                if "load_state_dict()" in self.loud:
                    self.load(*kept)
                else:
                    assert "call zero_grad() to drop it" in self.loud
                    mid_window_state(self.opt)
                self.opt.zero_grad()
                for again in calls:
                    self.call(*again)
                break
        return stopped is not None

    def go_on(self, name, number, scale, weight) -> None:
        """What a user does: saves, and calls again where there is something left to do."""
        mid_window_state(self.opt)
        if any(p.grad is not None for p in self.params):
            getattr(self.opt, name)(scale=scale, weight=weight)
        elif name == "step" and self.opt.pending.microbatches:
            self.opt.step()
        self.opt.discard_microbatch()  # nothing; refused where the next call would be

    def load(self, weights, saved) -> None:
        with torch.no_grad():
            for p, x in zip(self.params, weights):
                p.copy_(x)
        self.opt.load_state_dict(saved)

    def result(self) -> torch.Tensor:
        held = [t for p in self.params for _, t in sorted(self.opt.state[p].items())]
        held += [*self.params, torch.tensor(self.opt.pending)]
        return torch.cat([t.detach().double().flatten() for t in held])

    def skipped(self) -> tuple[int, int]:
        return self.opt.skipped_microbatches, self.opt.skipped_steps


@pytest.fixture
def start(device):
    """Parameters, and four micro-batches: the second without one gradient, the last not finite."""
    params = parameters((5,), (3, 2), device=device)
    micros = [[values(p.shape, device=device, spread=False) for p in params] for _ in range(4)]
    micros[1][0] = None
    micros[3][1][0, 1] = float("inf")
    warnings.simplefilter("ignore")  # of saving in mid-window; pytest restores it
    return params, micros


@pytest.mark.parametrize("case", CASES)
def test_at_every_line(make, on, start, case):
    """Saved or reset, repeated or gone on with: the result is right, then and in the window after it. (Backends
    of many lines: at every seventh.)"""
    options, calls, interrupted, fresh = CASES[case]
    native = on[0] not in ("reference", "triton")  # others have kernels of Python, which may stop half way
    for stopped in interrupted:
        run, other = Run(make, start, options, not native), Run(make, start, options)
        for k in range(1, 5000, 1 if native else 7):
            if fresh:
                run, other = Run(make, start, options, not native), Run(make, start, options)
            stop, skipped, others = Stop(k), run.skipped(), other.skipped()
            if not run.window(calls, stopped, stop):
                break
            other.window(calls)
            loud = run.loud
            assert loud is None or not native, f"{loud} after an interrupt at {stop.at}"
            if loud is None:
                counted = [now - before for now, before in zip(run.skipped(), skipped)]
                assert counted == [now - before for now, before in zip(other.skipped(), others)], stop.at
            for each in (run, other):
                each.window(FOLDED)
            close = torch.isclose(run.result(), other.result(), rtol=1e-5, atol=1e-7)
            assert close.all(), f"wrong after an interrupt at {stop.at}"
        assert k > 50
