"""The promise, read from the allocators' records: direct weights never have a gradient tensor."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gradient_memory import MODES, SMALLEST, Training, blocks

HERE = Path(__file__).parent
HALF = SMALLEST // 2


@pytest.mark.parametrize("mode", MODES)
def test_blocks_that_torch_allocates(make, device, mode):
    if device != "cpu":
        pytest.skip("reads the CPU allocator's records")
    training = Training(make, mode)
    training.window()
    found = blocks(lambda: (training.window(), training.window()), HALF)
    assert found.left == 0
    backend = training.opt.backends[0].backend
    if mode == "explicit":  # the gradients of a micro-batch, all at once: the test sees them
        assert found.allocated >= 2 * 4 * 5
        assert found.at_a_time >= 5
    elif backend == "reference":  # updates in plain torch, of many temporaries
        return
    elif mode.startswith("direct"):
        assert found.allocated == 0
    else:
        assert found.allocated > 0
        assert found.at_a_time == 1


@pytest.fixture(scope="module")
def interposed(tmp_path_factory):
    """What the interposer counted, by mode."""
    library = tmp_path_factory.mktemp("interposer") / "allocations.so"
    compiler = os.environ.get("CC", "cc")
    build = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(HERE / "native" / "allocations.c"), "-ldl"]
    try:
        done = subprocess.run(build, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip(f"no C compiler {compiler!r}")
    assert done.returncode == 0, done.stderr
    path = os.pathsep.join([str(HERE.parent), str(HERE)])
    environment = {**os.environ, "LD_PRELOAD": str(library), "OMP_WAIT_POLICY": "passive", "PYTHONPATH": path}
    run = subprocess.run(
        [sys.executable, str(HERE / "gradient_memory.py")],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="LD_PRELOAD and glibc's own names")
@pytest.mark.parametrize("mode", MODES)
def test_blocks_that_any_library_allocates(interposed, mode):
    """Also inside kernels, where torch's records end."""
    count, largest = interposed[mode]
    if "direct" in mode:
        assert count == 0, f"a block of {largest} bytes"
    else:
        assert count > 0
        assert largest >= SMALLEST
