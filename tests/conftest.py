"""Fixtures: one set of tests for every backend that works on this machine."""

import gc

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
def emulated(on):
    """Whether it is the kernels of a GPU on the CPU, which takes long: large tensors are smaller there, and runs
    shorter where test_bits.py shows that every step gives the bits of backend "cpu"."""
    return on[0] in ("cuda", "triton") and on[1] == "cpu"


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


# ---- the processes of pytest-xdist ---------------------------------------------------------------------------------

TOGETHER = {"tests/test_cuda_build.py": "tests/test_build.py"}  # both build in this tree


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A file's tests run in one process, so that what they share is made once; files in the order of collection."""
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return TOGETHER.get(file, file)

    config.option.loadscopereorder = False
    return Files(config, log)


def pytest_collection_modifyitems(config, items) -> None:
    """The files that take long first, so that no process is left alone with one at the end."""
    if hasattr(config, "workerinput"):
        long = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: item.path not in long)


def pytest_collection_finish() -> None:
    """What is imported by now stays: no collection of garbage searches it again."""
    gc.freeze()


# ---- what a run tells ----------------------------------------------------------------------------------------------


def pytest_report_header() -> list[str]:
    lines = [f"backends under test: {', '.join(f'{name} on {device}' for name, device in WORKING)}"]
    lines += [f"not here: {name} on {device}: {_why_not(name, device)}" for name, device in PAIRS
              if (name, device) not in WORKING]  # fmt: skip
    return lines


def pytest_terminal_summary(terminalreporter) -> None:
    """What tests have found out about this machine; what they print is lost in the processes of pytest-xdist."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            terminalreporter.write_line(f"{name}: {value}")


@pytest.fixture(scope="module")
def one_thread():
    """For models so small that a second thread only waits, and on a busy machine waits long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
