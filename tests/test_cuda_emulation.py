"""The emulator that the CUDA kernels are tested on: right kernels pass, every planted mistake is caught."""

import os
import shutil
import subprocess

import cuda_emulated
import pytest

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")

ORDERS = 20  # seeds that planted.cpp runs a kernel under
RIGHT = ("sums", "reverse")
RACES = ("sums-without-barrier", "reverse-without-barrier", "blocks-write", "threads-write", "neighbour")
WRONG = {
    "barrier-for-some": "a barrier that not all threads reach: of 128 threads 64 wait at __syncthreads",
    "half-a-warp": "a barrier that not all threads reach: of 128 threads 0 wait at __syncthreads, 64 at a shuffle",
    "misaligned": "an access to 8 bytes at address",
}
OUT_OF_BOUNDS = ("out-of-bounds", "shared-out-of-bounds")


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    sources = [cuda_emulated.NATIVE / "planted.cpp", *cuda_emulated.EMULATOR]
    targets = {"planted": (sources, cuda_emulated.SANITIZED, ())}
    return cuda_emulated.build(tmp_path_factory.mktemp("planted"), targets, "planted")


def run(program, *arguments):
    """Exit code, lines of stdout, stderr."""
    done = subprocess.run(
        [str(program), *arguments], capture_output=True, text=True, timeout=100, check=False,
        env={**os.environ, "ASAN_OPTIONS": "detect_leaks=1"},
    )  # fmt: skip
    return done.returncode, done.stdout.splitlines(), done.stderr


@pytest.mark.parametrize("mode", ["plain", "races"])
@pytest.mark.parametrize("name", RIGHT)
def test_right_kernels_pass_in_every_order(planted, name, mode):
    """Shared memory, barriers, shuffles; under AddressSanitizer, which must know of the fibers."""
    code, lines, errors = run(planted, name, mode)
    assert code == 0, errors
    assert lines == ["right"] * ORDERS


@pytest.mark.parametrize("name", RACES)
def test_races_are_caught_in_every_order(planted, name):
    code, lines, errors = run(planted, name, "races")
    assert code == 0, errors
    assert len(lines) == ORDERS
    words = "race in a kernel of fa::(anonymous namespace)::Job: memory at 0x"
    assert all(line.startswith(words) for line in lines), lines[0]


def test_a_missing_barrier_gives_wrong_results_in_some_order(planted):
    """Without the check of races: because threads do not start in the order of their numbers."""
    _, lines, _ = run(planted, "sums-without-barrier", "plain")
    assert "a wrong result" in lines


@pytest.mark.parametrize("mode", ["plain", "races"])
@pytest.mark.parametrize("name", WRONG)
def test_other_mistakes_are_caught(planted, name, mode):
    code, lines, errors = run(planted, name, mode)
    assert code == 0, errors
    assert len(lines) == ORDERS
    assert all(line.startswith(WRONG[name]) for line in lines), lines[0]


@pytest.mark.parametrize("name", OUT_OF_BOUNDS)
def test_out_of_bounds_is_caught(planted, name):
    code, lines, errors = run(planted, name, "plain")
    assert code != 0
    assert lines == []
    assert "heap-buffer-overflow" in errors
    assert "WRITE of size 4" in errors
