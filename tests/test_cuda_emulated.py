"""Backend "cuda" without a GPU: its kernels and launcher, compiled as C++, on the emulator of tests/native.

Under AddressSanitizer and UBSan, but where it says so; blocks and threads in another order every time.
"""

import os
import shutil
import subprocess
import sys

import cuda_emulated
import kernel_tests
import pytest

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")

SEED = os.getpid()  # of the order; shown when a test fails


def run(*arguments, settings="", sanitized=True):
    """pytest with ``arguments`` on the emulator; what it wrote."""
    command = ["-m", "pytest", "-q", "-x", "-p", "cuda_emulated", "-p", "no:cacheprovider", *arguments]
    settings = f"seed={SEED} {settings}"
    module = cuda_emulated.build_module(sanitized)
    done = subprocess.run(
        [sys.executable, *command], env=cuda_emulated.environment(module, settings, sanitized),
        cwd=cuda_emulated.TESTS, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    shown = f"{settings}, exit code {done.returncode}\n{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    assert done.returncode == 0, shown
    assert " passed" in done.stdout, shown
    return done.stdout


@pytest.mark.slow
def test_all_tests_of_all_backends():
    """And the bits of the CPU, and what needs no GPU of the tests for one; counts of updates on the device. All but
    fork, which no device survives, and the records of torch's allocator, which the sanitizer replaces."""
    run(".", "-k", "not test_fork and not blocks_that_torch_allocates", settings="steps-on-device")


def test_races():
    """None in the tests that reach every kernel; counts of updates on the host. Every byte that is touched is
    recorded, which takes too long for all tests, and for sanitizers too."""
    run("test_bits.py", "test_gpu.py", *kernel_tests.found(), settings="races", sanitized=False)


def test_launcher_devices_and_scalars():
    assert "skipped" not in run("emulated_cuda.py", "emulated_scalars.py", "emulated_scatter.py")


def test_indices_beyond_31_bits():
    """Of memory that is never touched: nothing for sanitizers to see."""
    run("emulated_large.py", sanitized=False)


def test_decisions_on_the_device():
    assert "skipped" not in run("emulated_decisions.py")


def test_the_emulated_module_is_used_only_when_asked_for():
    script = "from fused_accum.backends import cuda; print(getattr(cuda._CUDA, 'DEVICE_TYPE', 'none'))"
    environment = {key: value for key, value in os.environ.items() if key != cuda_emulated.VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=cuda_emulated.ROOT, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert done.stdout.strip() in ("cuda", "none")
