"""Fixtures: one set of tests for every backend that works on this machine."""

import pytest
import torch

from fused_accum import FusedAccumAdamW, backends

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
# Every (backend, device) pair the registry knows; those that do not work here skip with their reason.
PAIRS = [(name, device) for device in DEVICES for name in backends.registry()]


def _why_not(name: str, device: str) -> str | None:
    return backends.registry()[name].why_not(torch.device(device))


WORKING = [pair for pair in PAIRS if _why_not(*pair) is None]
# Those with kernels of their own, which must give the bits of backend "cpu".
KERNEL_PAIRS = [
    pytest.param(pair, id="-".join(pair).removesuffix("-cpu"), marks=[pytest.mark.gpu] if pair[1] == "cuda" else [])
    for pair in WORKING
    if pair[0] not in ("cpu", "reference")
] or [pytest.param(None, marks=pytest.mark.skip(reason="neither cuda nor triton works here"))]


@pytest.fixture(params=WORKING, ids=lambda pair: f"{pair[0]}-{pair[1]}" if pair[1] != "cpu" else pair[0])
def on(request):
    """The (backend, device) pair under test."""
    return request.param


@pytest.fixture
def device(on):
    return on[1]


@pytest.fixture
def make(on):
    """FusedAccumAdamW on the backend under test."""
    return lambda params, **options: FusedAccumAdamW(params, backend=on[0], **options)


@pytest.fixture(autouse=True)
def _same_start():
    """One thread for small tensors (a busy machine makes more of them slow); tests of threads set their own."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(1)


def pytest_report_header() -> list[str]:
    lines = [f"backends under test: {', '.join(f'{name} on {device}' for name, device in WORKING)}"]
    lines += [f"not here: {name} on {device}: {_why_not(name, device)}" for name, device in PAIRS
              if (name, device) not in WORKING]  # fmt: skip
    return lines


@pytest.fixture(scope="module")
def one_thread():
    """For models so small that a second thread only waits, and on a busy machine waits long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
