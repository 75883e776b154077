"""csrc/weights.h over all 2^32 float32 patterns (tests/native/codec.cpp)."""

import shutil
import subprocess
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
CSRC = TESTS.parent / "csrc"


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
@pytest.mark.skipif(not CSRC.is_dir(), reason="csrc/ is not beside the tests")
def test_every_pattern_comes_back(tmp_path):
    flags = ["-O3", "-std=c++17", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", f"-I{CSRC}"]
    program = tmp_path / "codec"
    subprocess.run(["g++", *flags, TESTS / "native" / "codec.cpp", "-o", program], check=True, timeout=300)
    done = subprocess.run([program], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout
    assert done.stdout == "0 upper halves wrong, 0 halves strange, 0 roundings far\n"
