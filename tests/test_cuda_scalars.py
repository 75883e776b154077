"""Runs emulated_scalars.py and decided_on_device.py: what backend "cuda" reads and decides on the device."""

import shutil
import subprocess
import sys

import cuda_emulated
import pytest


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
def test_scalars_on_the_device():
    module = cuda_emulated.build_module()
    command = ["-m", "pytest", "-q", "-p", "cuda_emulated", "-p", "no:cacheprovider", "emulated_scalars.py",
               "decided_on_device.py"]  # fmt: skip
    done = subprocess.run(
        [sys.executable, *command],
        env=cuda_emulated.environment(module, "steps-on-device"), cwd=cuda_emulated.TESTS, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
