"""Building with nvcc, without it, and with one that does not work; the real kernels' size and what they need.

What concerns setup.py alone is built from a copy of the tree whose csrc/ is a few lines long.
"""

import importlib.util
import json
import os
import re
import shutil
import sys
import zipfile
from pathlib import Path

import machine_code
import pytest
from test_build import ROOT, build_in_place, extension, install, new_environment, report, run, tree  # noqa: F401

from fused_accum import _native

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there is no CUDA but for Linux")

BINDINGS = """
#include <Python.h>
#include <cuda_runtime.h>
int answer();
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C_cuda", nullptr, -1, nullptr, 0, 0, 0, 0};
PyMODINIT_FUNC PyInit__C_cuda() {
    PyObject* m = PyModule_Create(&module);
    if (m) PyModule_AddIntConstant(m, "answer", answer());
    return m;
}
"""
KERNELS = """
#include "answer.h"
__global__ void kernel(int* x) { *x = ANSWER; }
int answer() { return ANSWER; }
"""
CUDA = "_C_cuda"
NOTE = "_cuda_build_failure.json"
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")


@pytest.fixture
def cuda_tree(tree):  # noqa: F811
    (tree / "csrc" / "cuda_bindings.cpp").write_text(BINDINGS)
    (tree / "csrc" / "cuda_kernels.cu").write_text(KERNELS)
    return tree


def build(tree, fails=False, archs="90", **env):  # noqa: F811
    return build_in_place(tree, fails=fails, FUSED_ACCUM_CUDA_ARCHS=archs, **env)


def note(tree):  # noqa: F811
    assert extension(tree / "fused_accum"), "the CPU's module does not depend on CUDA's"
    assert extension(tree / "fused_accum", CUDA) is None
    return json.loads((tree / "fused_accum" / NOTE).read_text())


def script(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def answer(tree):  # noqa: F811
    read = "import importlib.util as u, sys; s = u.spec_from_file_location('_C_cuda', sys.argv[1]);"
    read += "m = u.module_from_spec(s); s.loader.exec_module(m); print(m.answer)"
    return run(sys.executable, "-c", read, extension(tree / "fused_accum", CUDA)).strip()


def without_nvcc(folder):
    """A PATH with all that is on this one, but nvcc."""
    folder.mkdir()
    for place in reversed(os.environ["PATH"].split(os.pathsep)):
        for program in Path(place).glob("*") if place else ():
            if program.name != "nvcc":
                (folder / program.name).unlink(missing_ok=True)
                (folder / program.name).symlink_to(program)
    return {"PATH": str(folder), "NVCC": "", "CUDA_HOME": "", "CUDA_PATH": ""}


# -- without nvcc -----------------------------------------------------------------------------------------


def test_without_nvcc_it_installs_and_the_report_says_what_is_missing(cuda_tree, tmp_path):
    python, site = new_environment(tmp_path / "venv", lend_torch=True)
    install(cuda_tree, site, FUSED_ACCUM_CUDA_ARCHS="90", **without_nvcc(tmp_path / "path"))
    assert extension(site / "fused_accum", CUDA) is None
    extension(site / "fused_accum").unlink()  # the few lines of this tree are no backend
    (row,) = (row for row in report(python, tmp_path)["backends"] if row["backend"] == "cuda")
    assert not row["works"]
    for word in ("nvcc was not found", "CUDA_HOME", "pip: nvidia-cuda-nvcc", "install fused_accum again"):
        assert word in row["reason"]


def test_forced_without_nvcc_it_fails(cuda_tree, tmp_path):
    output = build(cuda_tree, fails=True, FUSED_ACCUM_FORCE_CUDA="1", **without_nvcc(tmp_path / "path"))
    assert "FUSED_ACCUM_FORCE_CUDA=1, but nvcc was not found" in output


def test_it_can_be_left_out(cuda_tree):
    build(cuda_tree, archs="none")
    assert "asked for no CUDA" in note(cuda_tree)["reason"]


# -- an nvcc that is of no use ----------------------------------------------------------------------------

USELESS = {
    "absent": (None, "does not work"),
    "fails": ("echo no licence; exit 1", "no licence"),
    "says nothing": ("exit 0", "does not work"),
    "old": ('case "$1" in --version) echo "release 11.8, V11.8.89";; *) echo compute_90;; esac', "older than 12.1"),
    "without headers": (
        'case "$1" in --version) echo "release 13.0";; --list*) echo compute_90;; *) echo "#$ TOP=/nowhere";; esac',
        "cuda_runtime.h is not",
    ),
}


@pytest.mark.parametrize("kind", USELESS)
def test_nvcc_that_is_of_no_use(cuda_tree, tmp_path, kind):
    text, words = USELESS[kind]
    nvcc = script(tmp_path / "nvcc", text) if text else tmp_path / "nvcc"
    build(cuda_tree, NVCC=str(nvcc))
    assert words in note(cuda_tree)["reason"]
    assert words in build(cuda_tree, NVCC=str(nvcc), FUSED_ACCUM_FORCE_CUDA="1", fails=True)


@needs_nvcc
def test_kernels_that_do_not_compile(cuda_tree):
    (cuda_tree / "csrc" / "cuda_kernels.cu").write_text("#error not today\n")
    build(cuda_tree)
    assert "not today" in note(cuda_tree)["reason"]
    (cuda_tree / "csrc" / "cuda_kernels.cu").write_text(KERNELS)
    build(cuda_tree)
    assert answer(cuda_tree) == "41"
    assert not (cuda_tree / "fused_accum" / NOTE).exists()


# -- with nvcc --------------------------------------------------------------------------------------------


@needs_nvcc
@pytest.mark.parametrize("variable", ["NVCC", "CUDA_HOME", "PATH"])
def test_nvcc_may_be_a_wrapper(cuda_tree, tmp_path, variable):
    """Of which nothing follows but by asking it: its folder is not the toolkit's."""
    nvcc = script(tmp_path / "home" / "bin" / "nvcc", f'exec {shutil.which("nvcc")} "$@"')
    env = {**without_nvcc(tmp_path / "path"), "FUSED_ACCUM_FORCE_CUDA": "1"}
    if variable == "PATH":
        env["PATH"] = f"{nvcc.parent}:{env['PATH']}"
    else:
        env[variable] = str(nvcc if variable == "NVCC" else nvcc.parent.parent)
    assert str(nvcc) in build(cuda_tree, **env)
    assert answer(cuda_tree) == "41"


def carried(module):
    """What a module has kernels for, from the fat binaries in it: sm_90 of machine code, compute_90 of PTX."""
    if not machine_code.TOOLS.is_dir():
        pytest.skip("there is no triton with its cuobjdump")
    listed = run(machine_code.TOOLS / "cuobjdump", "-lelf", "-lptx", module)
    real, virtual = (re.findall(rf"{kind} file .*\.sm_(\w+)\.", listed) for kind in ("ELF", "PTX"))
    return {f"sm_{arch}" for arch in real} | {f"compute_{arch}" for arch in virtual}


@needs_nvcc
def test_architectures(cuda_tree):
    """Machine code of every one, PTX of the lowest and of the newest."""
    build(cuda_tree, archs="80;90")
    assert carried(extension(cuda_tree / "fused_accum", CUDA)) == {"sm_80", "sm_90", "compute_80", "compute_90"}
    assert "no work to do" in build(cuda_tree, archs="80;90")
    build(cuda_tree, archs="77")
    assert "compute capability 77" in note(cuda_tree)["reason"]
    assert "FUSED_ACCUM_CUDA_ARCHS" in note(cuda_tree)["remedy"]
    build(cuda_tree, archs="")
    known = run("nvcc", "--list-gpu-arch")
    archs = [arch for arch in ("80", "86", "89", "90", "100", "120") if f"compute_{arch}" in known]
    expected = {f"sm_{arch}" for arch in archs} | {f"compute_{arch}" for arch in (archs[0], archs[-1])}
    assert carried(extension(cuda_tree / "fused_accum", CUDA)) == expected
    assert answer(cuda_tree) == "41"


@needs_nvcc
def test_a_changed_header_compiles_the_kernels_again(cuda_tree):
    build(cuda_tree)
    (cuda_tree / "csrc" / "answer.h").write_text("#define ANSWER 42\n")
    assert "cuda_bindings.cpp" not in build(cuda_tree)
    assert answer(cuda_tree) == "42"


@needs_nvcc
@pytest.mark.slow
def test_the_real_module(tmp_path):
    """In a wheel for one architecture: imports without a driver, needs no CUDA library, and is small enough."""
    env = {"FUSED_ACCUM_CUDA_ARCHS": "90", "FUSED_ACCUM_FORCE_CUDA": "1"}
    pip = (sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-w", tmp_path)
    run(*pip, ROOT, env=env)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
        (packed,) = (info.compress_size for info in archive.infolist() if "_C_cuda." in info.filename)
    assert packed * 8 < 10e6, "six architectures and two PTX must fit in 10 MB"
    module = extension(tmp_path / "fused_accum", CUDA)
    if machine_code.TOOLS.is_dir():
        assert carried(module) == {"sm_90", "compute_90"}
    if shutil.which("readelf"):
        libraries = set(re.findall(r"NEEDED.*\[(\w+)", run("readelf", "--dynamic", module)))
        assert libraries <= {"libstdc", "libm", "libgcc_s", "libc", "libpthread", "libdl", "librt", "ld"}
    code = "import fused_accum._C_cuda as c; print(c.DEVICE_TYPE, c.why_not(0))"
    said = run(sys.executable, "-c", code, cwd=tmp_path, env={"CUDA_VISIBLE_DEVICES": ""})
    assert said.startswith("cuda ")
    assert "driver" in said or "device" in said


@pytest.mark.parametrize("name", ["_C", "_C_cuda"])
def test_what_is_installed_loads(name):
    """Also on a machine without a driver: no symbol is missing."""
    if importlib.util.find_spec(f"fused_accum.{name}") is None:
        pytest.skip(f"fused_accum.{name} is not built here")
    module, reason = _native.load(name)
    assert module is not None, reason
