"""Backend "cuda" without a GPU: its kernels and launcher, compiled as C++, on the emulator of tests/native."""

import os
import shutil
import subprocess
import sys

import cuda_emulated
import kernel_tests
import pytest

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")

SEED = os.getpid()  # another order of blocks and threads every time; shown when a test fails


def run(module, *arguments, settings="", sanitized=False):
    """pytest with ``arguments`` on the emulator; what it wrote."""
    command = ["-m", "pytest", "-q", "-x", "-p", "cuda_emulated", "-p", "no:cacheprovider", *arguments]
    settings = f"seed={SEED} {settings}"
    done = subprocess.run(
        [sys.executable, *command], env=cuda_emulated.environment(module, settings, sanitized),
        cwd=cuda_emulated.TESTS, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    shown = f"{settings}, exit code {done.returncode}\n{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    assert done.returncode == 0, shown
    assert " passed" in done.stdout, shown
    return done.stdout


@pytest.mark.parametrize("sanitized", [False, True], ids=["races", "sanitized"])
def test_kernels(sanitized):
    """Bits of the CPU, the kernel tests of all backends, what needs no GPU of those for one; with the check of races,
    then under AddressSanitizer and UBSan, counts of updates on the device and on the host."""
    settings = "" if sanitized else "races steps-on-device"
    module = cuda_emulated.build_module(sanitized)
    files = ["test_bits.py", "test_gpu.py", *kernel_tests.found()]
    chosen = "[cuda or (cuda] and (layouts or bf16))" if sanitized else "[cuda or cuda]"  # those of bits end with it
    run(module, "-k", chosen, *files, settings=settings, sanitized=sanitized)


def test_launcher_devices_and_indices():
    assert "skipped" not in run(cuda_emulated.build_module(), "emulated_cuda.py")


@pytest.mark.slow
def test_all_tests_of_all_backends():
    """All but fork, which no device survives."""
    chosen = "([cuda or cuda]) and not test_fork"
    run(cuda_emulated.build_module(), ".", "-k", chosen, settings="steps-on-device")


def test_the_emulated_module_is_used_only_when_asked_for():
    script = "from fused_accum.backends import cuda; print(getattr(cuda._C, 'DEVICE_TYPE', 'none'))"
    environment = {key: value for key, value in os.environ.items() if key != cuda_emulated.VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=cuda_emulated.ROOT, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert done.stdout.strip() in ("cuda", "none")
