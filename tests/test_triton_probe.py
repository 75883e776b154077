"""Where Triton cannot run: a clear reason, and another backend instead."""

import errno
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

if sys.platform != "linux":
    pytest.skip("there is no Triton but for Linux", allow_module_level=True)

import triton
from triton.runtime import build

from fused_accum import backends
from fused_accum.backends import triton_probe

TESTS = Path(__file__).parent
BACKEND = backends.registry()["triton"]
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)

pytestmark = [
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="TRITON_INTERPRET is set: nothing is compiled"),
    pytest.mark.filterwarnings("ignore:fused_accum runs on its slow backend"),
]


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A machine that says it has a GPU; the first kernel is the compilation of a C module, as Triton's launcher."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(type(BACKEND), "_try", lambda self, device: compile_launcher())
    build._find_compiler.cache_clear()
    triton_probe._why_not_gpu.cache_clear()
    yield monkeypatch
    build._find_compiler.cache_clear()
    triton_probe._why_not_gpu.cache_clear()


def compile_launcher():
    source = """
        #include <Python.h>
        static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "launcher", 0, -1, 0};
        PyMODINIT_FUNC PyInit_launcher(void) { return PyModule_Create(&module); }
    """
    build.compile_module_from_src(source, "launcher")


def chosen_instead() -> str:
    """The reason for passing over triton; another backend was chosen, and says so too."""
    reason = BACKEND.why_not(GPU)
    backend, why = backends.choose("auto", GPU)
    assert backend.name == "reference"
    assert reason in why
    with pytest.raises(RuntimeError, match="triton"):
        backends.select("triton", GPU)
    return reason


def test_a_gpu_on_which_a_kernel_runs(gpu):
    assert BACKEND.why_not(GPU) is None
    assert backends.choose("auto", GPU)[0] is BACKEND


def test_no_gpu():
    if torch.accelerator.is_available():
        pytest.skip("there is one")
    assert "sees no cuda device" in chosen_instead()


def test_cpu_tensors():
    assert "it is for GPUs" in BACKEND.why_not(CPU)
    backend, why = backends.choose("auto", CPU)
    assert backend.name in ("cpu", "reference")
    assert "triton" not in why


def test_no_c_compiler(gpu, tmp_path):
    """Reported case 42."""
    gpu.setenv("PATH", str(tmp_path))
    assert "install gcc or clang" in chosen_instead()


def test_compiler_that_does_not_exist(gpu):
    gpu.setenv("CC", "/nowhere/cc")
    assert "check the C compiler (CC)" in chosen_instead()


def test_no_python_header(gpu, tmp_path, capfd):
    """Reported case 42."""
    real = sysconfig.get_paths
    gpu.setattr(sysconfig, "get_paths", lambda *a, **k: {**real(*a, **k), "include": str(tmp_path)})
    assert "python3-dev" in chosen_instead()


def test_cache_that_is_no_directory(gpu, tmp_path):
    (tmp_path / "file").write_text("")
    gpu.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    assert "set TRITON_CACHE_DIR" in chosen_instead()


def test_read_only_cache(gpu, tmp_path):
    """Root may write anywhere: the file system's answer is made up."""

    def refuse(path, *_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    gpu.setattr(triton.runtime.cache.os, "makedirs", refuse)
    reason = chosen_instead()
    assert "set TRITON_CACHE_DIR" in reason
    assert str(tmp_path / "cache") in reason


def test_old_gpu(gpu):
    gpu.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert "compute capability 7.5" in chosen_instead()


def test_failure_of_another_kind(gpu):
    def fail(self, device):
        raise RuntimeError("PassManager::run failed\nlong dump")

    gpu.setattr(type(BACKEND), "_try", fail)
    reason = chosen_instead()
    assert "PassManager::run failed" in reason
    assert "dump" not in reason


def test_triton_not_installed(gpu):
    gpu.setitem(sys.modules, "triton", None)
    assert "pip install triton" in chosen_instead()


def test_interpreter_on_a_gpu(gpu):
    gpu.setenv("TRITON_INTERPRET", "1")
    assert "unset it" in chosen_instead()


def test_a_gpu_is_tried_once(gpu):
    tried = []
    gpu.setattr(type(BACKEND), "_try", lambda self, device: tried.append(device))
    for _ in range(3):
        assert BACKEND.why_not(torch.device("cuda", 1)) is None
    assert tried == [torch.device("cuda", 1)]


def test_several_processes_at_once(tmp_path):
    """They fill one cache together; each compiles or finds every kernel."""
    script = (
        "import torch; from triton_mock import MockDriver; from test_triton_probe import *\n"
        "with MockDriver() as driver:\n"
        "    compile_launcher()\n"
        "    BACKEND.accumulate([torch.ones(5)], [torch.ones(5)], [False], 2.0)\n"
        "    print(driver.loaded, driver.launches)\n"
    )
    path = os.pathsep.join(filter(None, [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "TRITON_CACHE_DIR": str(tmp_path)}
    running = [
        subprocess.Popen([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(3)
    ]
    outputs = [process.communicate() for process in running]
    assert [process.returncode for process in running] == [0] * 3, outputs
    assert len({output for output, _ in outputs}) == 1
    assert b"accumulate_kernel" in outputs[0][0]
    assert len(list(tmp_path.rglob("accumulate_kernel.cubin"))) == 1
