"""Values that live on a device, where the tensors of a test are on the CPU: reading one is an error."""

from contextlib import contextmanager

from torch import Tensor

from fused_accum import skipping

WAYS = ("tolist", "item", "__float__", "__int__", "__bool__", "__index__", "cpu", "numpy")


def read(*_):
    raise AssertionError("the host has read a value that lives on the device")


def decide_there(monkeypatch):
    """Let all but backend "cpu" decide on the device, as on a GPU."""
    monkeypatch.setattr(skipping, "on_host", lambda _, buckets: buckets[0].backend.name == "cpu")


def nothing_read(monkeypatch):
    """A context in which no tensor may be read, but by kernels in Triton's interpreter."""

    @contextmanager
    def guard():
        with monkeypatch.context() as patch:
            own = {name: getattr(Tensor, name) for name in WAYS}
            for name in WAYS:
                patch.setattr(Tensor, name, read)
            _let_kernels_read(patch, own)
            yield

    return guard


def _let_kernels_read(patch, own):
    import os

    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime.interpreter import InterpretedFunction

    run = InterpretedFunction.run

    def reading(self, *arguments, **options):
        for name, method in own.items():
            setattr(Tensor, name, method)
        try:
            return run(self, *arguments, **options)
        finally:
            for name in WAYS:
                setattr(Tensor, name, read)

    patch.setattr(InterpretedFunction, "run", reading)
