"""The hook of a parameter that backward accumulates: when it must look closer, in native code and in Python."""

import gc
import weakref

import pytest
import torch

from fused_accum import FusedAccumAdamW, slots

KINDS = {"plain": (slots.PlainPulse, slots.PlainHook), "native": (slots.Pulse, slots.Hook)}


@pytest.fixture(params=KINDS)
def kind(request):
    pulse, hook = KINDS[request.param]
    if request.param == "native" and hook is slots.PlainHook:
        pytest.skip("there is no native code")
    return pulse, hook


class Parameter:
    """One under a hook of ``kind``, with its gradient in place; ``calls`` of the hook's slow way."""

    def __init__(self, kind):
        pulse, base = kind
        self.calls = calls = []

        class Noting(base):
            def slow(self, p):
                calls.append(p)
                self.pulse.task = slots.current_task_id()

        self.pulse = pulse()
        self.hook = Noting(self.pulse)
        self.tensor = torch.nn.Parameter(torch.ones(4))
        self.tensor.grad = torch.zeros(4)
        self.hook.ptr = self.tensor.grad.data_ptr()

    def slow(self, between=lambda: None):
        """How many of two calls of the hook in one backward went the slow way; ``between`` runs between them."""
        before = len(self.calls)

        def body(_):
            self.hook(self.tensor)
            between()
            self.hook(self.tensor)

        x = torch.ones((), requires_grad=True) * 1
        x.register_hook(body)
        x.backward()
        return len(self.calls) - before


@pytest.fixture
def parameter(kind):
    return Parameter(kind)


def test_only_the_first_call_of_a_backward_looks_closer(parameter):
    assert [parameter.slow() for _ in range(3)] == [1, 1, 1]
    assert all(p is parameter.tensor for p in parameter.calls)


@pytest.mark.parametrize(("grad", "calls"), [
    (lambda: torch.zeros(4), 2), (lambda: torch.zeros(4).to_sparse(), 2), (lambda: None, 1),
], ids=["elsewhere", "sparse", "none"])  # fmt: skip
def test_another_gradient_is_looked_at_and_none_is_not(parameter, grad, calls):
    def replace():
        parameter.tensor.grad = grad()

    assert parameter.slow(replace) == calls


def test_all_calls_are_slow_while_watched(parameter):
    parameter.pulse.watch = slots.ALL
    assert parameter.slow() == 2
    parameter.pulse.watch = slots.NOTHING
    assert parameter.slow() == 1


@pytest.mark.parametrize(("additions", "calls"), [(0, 1), (1, 1), (2, 2)])
def test_versions_are_noted_and_a_leap_is_looked_at(parameter, additions, calls):
    grad = parameter.tensor.grad
    parameter.pulse.watch, parameter.hook.version = slots.VERSIONS, grad._version

    def add():
        for _ in range(additions):
            grad.add_(1)

    assert parameter.slow(add) == calls
    assert parameter.hook.version == (grad._version if calls == 1 else 0)


def test_outside_a_backward_every_call_looks_closer(parameter):
    parameter.pulse.task = slots.NO_TASK
    parameter.hook(parameter.tensor)
    assert len(parameter.calls) == 1


def test_errors_of_the_slow_way_arrive(kind):
    pulse, base = kind

    class Failing(base):
        def slow(self, p):
            raise KeyError("no")

    p = torch.nn.Parameter(torch.ones(2))
    p.register_post_accumulate_grad_hook(Failing(pulse()))
    with pytest.raises(KeyError, match="no"):
        p.sum().backward()


def test_a_hook_needs_a_pulse_and_a_parameter(kind):
    with pytest.raises((TypeError, AttributeError)):
        kind[1]()
    with pytest.raises(TypeError):
        kind[1](kind[0]())()


def test_hooks_and_what_they_know_die_with_the_optimizer():
    p = torch.nn.Parameter(torch.ones(3))
    opt = FusedAccumAdamW([p])
    opt.accumulate_in_backward()
    p.sum().backward()
    slot = weakref.ref(next(iter(opt._run.backward.slots.values())))
    pulse = slot().pulse
    del opt
    gc.collect()
    assert slot() is None
    assert gc.get_referrers(pulse) == []
    assert not p._post_accumulate_grad_hooks
