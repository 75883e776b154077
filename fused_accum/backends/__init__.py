"""The registry of backends. A backend is one file and one line here, in order of preference."""

from __future__ import annotations

import importlib
import warnings
from functools import cache

import torch

from .base import Backend, Rows

__all__ = ["Backend", "Rows", "choose", "registry", "select"]

_MODULES = {
    "cuda": ".cuda",
    "triton": ".triton",
    "cpu": ".cpu",
    "reference": ".reference",
}


@cache
def registry() -> dict[str, Backend]:
    """Every backend by name, in order of preference, whether or not it works on this machine."""
    return {name: importlib.import_module(module, __name__).BACKEND for name, module in _MODULES.items()}


def select(name: str, device: torch.device | str) -> Backend:
    """The backend ``name`` for ``device``; raises RuntimeError with the reason when it does not work there."""
    backends = registry()
    if name not in backends:
        raise ValueError(f"backend is {name!r}; it must be 'auto' or one of {', '.join(map(repr, backends))}")
    reason = backends[name].why_not(torch.device(device))
    if reason is not None:
        raise RuntimeError(f"backend {name!r} does not work for {device} tensors: {reason}")
    return backends[name]


def choose(name: str, device: torch.device | str) -> tuple[Backend, str]:
    """The backend to use for ``device`` and why: ``name`` itself, or for "auto" the first that works."""
    if name != "auto":
        return select(name, device), "asked for"
    passed_over = []
    for backend in registry().values():
        if not backend.meant_for(torch.device(device)):
            continue
        reason = backend.why_not(torch.device(device))
        if reason is None:
            why = "; ".join(passed_over) or "the fastest for this device"
            if backend.name == "reference":
                _warn_once(f"fused_accum runs on its slow backend 'reference' for {device} tensors: {why}")
            return backend, why
        passed_over.append(f"not {backend.name}: {reason}")
    raise RuntimeError(f"no backend works for {device} tensors: {'; '.join(passed_over)}")


@cache
def _warn_once(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=2)
