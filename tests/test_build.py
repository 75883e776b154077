"""Building and installing: sdist, wheel, compilers that are missing or broken, other Pythons.

Reported cases 38 to 42: no torch at build time, no nvcc needed, a build without native code must say so, no
flags of the building machine's CPU, no compiler or no Python.h.

What concerns setup.py alone is built from a copy of the tree whose csrc/ is a few lines long.
"""

import json
import os
import re
import shutil
import sys
import tarfile
import zipfile
from email.parser import Parser

import pytest
from environments import ROOT, build_sdist, build_wheel, extension, find_python, install, new_environment, report, run
from install_matrix import FAST, Matrix, NotHere

from fused_accum import __version__

BINDINGS = """
#include "answer.h"
#include <Python.h>
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, 0, 0, 0, 0};
PyMODINIT_FUNC PyInit__C() {
    PyObject* m = PyModule_Create(&module);
    if (m) PyModule_AddIntConstant(m, "answer", ANSWER);
    return m;
}
"""
KERNELS = """
#define JOIN2(a, b) a##b
#define JOIN(a, b) JOIN2(a, b)
int JOIN(kernel_, FA_ISA)(float x) { return int(x); }
"""


@pytest.fixture
def tree(tmp_path):
    """A copy of the project with a native module that compiles at once, at a path that needs quoting."""
    tree = tmp_path / "a tree, $quoted"
    ignored = shutil.ignore_patterns("*.so", "__pycache__", "*_build_failure.json")
    shutil.copytree(ROOT / "fused_accum", tree / "fused_accum", ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    (tree / "csrc").mkdir()
    (tree / "csrc" / "bindings.cpp").write_text(BINDINGS)
    (tree / "csrc" / "cpu_kernels.cpp").write_text(KERNELS)
    (tree / "csrc" / "answer.h").write_text("#define ANSWER 41\n")
    return tree


def build_in_place(tree, fails=False, **env):
    env = {"FUSED_ACCUM_FORCE_CPP": "1", **env}
    return run(sys.executable, "setup.py", "build_ext", "--inplace", cwd=tree, env=env, fails=fails)


# -- the build itself -------------------------------------------------------------------------------------


def test_flags_are_per_file_and_of_no_particular_machine(tree):
    """Reported case 41."""
    build_in_place(tree)
    (file,) = tree.glob("build/ninja-*/build.ninja")
    text = file.read_text()
    for word in ("-march", "-mcpu", "-mtune", "-ffast-math"):
        assert word not in text
    assert "-ffp-contract=off" in text
    assert text.count("-ffp-contract=on") + text.count("-ffp-contract=fast") == 0
    flags = dict(re.findall(r"^build (\S+\.o): .*\n  flags = (.*)$", text, flags=re.M))
    wide = {name for name, words in flags.items() if " -m" in words}
    assert wide <= {"cpu_kernels_avx2.o", "cpu_kernels_avx512.o"}
    assert "-DFA_ISA=baseline" in flags["cpu_kernels_baseline.o"]
    for isa in ("avx2", "avx512"):
        assert (f"cpu_kernels_{isa}.o" in flags) == (f"-DFA_HAVE_{isa.upper()}" in flags["bindings.o"])


def test_a_changed_header_is_compiled_again_and_nothing_else(tree):
    build_in_place(tree)
    assert "no work to do" in build_in_place(tree)
    (tree / "csrc" / "answer.h").write_text("#define ANSWER 42\n")
    output = build_in_place(tree)
    assert "bindings.cpp" in output
    assert "cpu_kernels.cpp" not in output
    read = "import importlib.util as u, sys; s = u.spec_from_file_location('_C', sys.argv[1]);"
    read += "m = u.module_from_spec(s); s.loader.exec_module(m); print(m.answer)"
    assert run(sys.executable, "-c", read, extension(tree / "fused_accum")).strip() == "42"


def test_no_nvcc_is_needed(tree, tmp_path):
    """Reported case 39. torch, which may be made with another CUDA, is not even asked: it is no build requirement."""
    (tmp_path / "bin").mkdir()
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.write_text("#!/bin/sh\nexit 1\n")
    nvcc.chmod(0o755)
    build_in_place(tree, PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert extension(tree / "fused_accum")


# -- no compiler, or one that does not work ---------------------------------------------------------------

# name: what stands for the compiler (a shell script), and what the report must name
BROKEN = {
    "absent": (None, ("no C++ compiler", "apt-get install g++")),
    "fails": ("echo no memory >&2; exit 1", ("cannot compile", "no memory")),
    "no Python.h": (
        'for a; do case "$a" in *.cpp) grep -q Python.h "$a" && exit 1;; esac; done\nexec c++ "$@"',
        ("Python.h", "apt-get install python3-dev"),
    ),
}


def compiler_variable(kind, folder):
    script, words = BROKEN[kind]
    if script is None:
        return str(folder / "nowhere" / "g++"), words
    path = folder / "broken-cxx"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path), words


@pytest.mark.parametrize("kind", BROKEN)
def test_without_a_working_compiler_it_installs_and_says_why(tree, tmp_path, kind):
    cxx, words = compiler_variable(kind, tmp_path)
    python, site = new_environment(tmp_path / "venv", lend_torch=True)
    install(tree, site, CXX=cxx)
    assert extension(site / "fused_accum") is None
    facts = report(python, tmp_path)
    assert facts["exit_code"] == 1
    assert {row["backend"] for row in facts["backends"] if row["works"]} == {"reference"}
    (cpu,) = (row for row in facts["backends"] if row["backend"] == "cpu")
    for word in words:
        assert word in facts["native_problem"]
        assert word in cpu["reason"]


def test_first_use_without_native_code_warns_and_works(tree, tmp_path):
    """Reported case 40."""
    cxx, words = compiler_variable("absent", tmp_path)
    python, site = new_environment(tmp_path / "venv", lend_torch=True)
    install(tree, site, CXX=cxx)
    program = (
        "import torch; from fused_accum import FusedAccumAdamW\n"
        "p = torch.nn.Parameter(torch.ones(3)); opt = FusedAccumAdamW([p], lr=0.5)\n"
        "for _ in range(2): p.grad = torch.ones(3); opt.step()\n"
        "assert p[0] < 0.5, p\n"
    )
    output = run(python, "-c", program, cwd=tmp_path)
    assert output.count("Warning") == 1, output
    assert all(word in output for word in words), output


def test_without_any_compiler_on_the_path(tree, tmp_path):
    (tmp_path / "empty").mkdir()
    install(tree, tmp_path / "site", CXX="", PATH=str(tmp_path / "empty"))
    note = json.loads((tmp_path / "site" / "fused_accum" / "_build_failure.json").read_text())
    assert "c++, g++ and clang++ tried" in note["reason"]


def test_sources_that_do_not_compile(tree, tmp_path):
    (tree / "csrc" / "answer.h").write_text("#error not today\n")
    install(tree, tmp_path / "site")
    note = json.loads((tmp_path / "site" / "fused_accum" / "_build_failure.json").read_text())
    assert "not today" in note["reason"]


@pytest.mark.parametrize("kind", BROKEN)
def test_force_cpp_makes_it_an_error(tree, tmp_path, kind):
    cxx, words = compiler_variable(kind, tmp_path)
    output = build_in_place(tree, CXX=cxx, fails=True)
    assert all(word in output for word in words), output


def test_a_failed_build_leaves_no_older_module_and_a_later_one_no_note(tree, tmp_path):
    package, note = tree / "fused_accum", tree / "fused_accum" / "_build_failure.json"
    build_in_place(tree)
    assert extension(package)
    build_in_place(tree, CXX=str(tmp_path / "nowhere"), FUSED_ACCUM_FORCE_CPP="")
    assert extension(package) is None
    assert note.exists()
    build_in_place(tree)
    assert extension(package)
    assert not note.exists()


# -- sdist and wheel --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    return build_sdist(tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """Built by pip from the sdist alone, in isolation: with the build requirements and no torch."""
    return build_wheel(sys.executable, sdist, tmp_path_factory.mktemp("wheel"))


def test_build_requirements_are_two():
    tomllib = pytest.importorskip("tomllib")
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert {re.match(r"[a-z0-9]+", one).group() for one in required} == {"setuptools", "ninja"}


def test_sdist_is_complete_and_clean(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"setup.py", "LICENSE", "fused_accum/py.typed", "tests/test_build.py", "benchmarks/__init__.py"}
    wanted |= {"docs/faq.md", "docs/images/data_flow.png"}
    wanted |= {f"csrc/{path.name}" for path in (ROOT / "csrc").iterdir()}
    assert wanted <= names
    assert any(name.endswith(".h") for name in names)
    assert not [n for n in names if n.endswith((".so", ".pyc", ".o")) or n.startswith(("build/", "."))]


def test_wheel_holds_the_package_alone(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = Parser().parsestr(archive.read(f"fused_accum-{__version__}.dist-info/METADATA").decode())
    info = f"fused_accum-{__version__}.dist-info/"
    assert {name.partition("/")[0] + "/" for name in names} == {"fused_accum/", info}
    inside = {name.removeprefix("fused_accum/") for name in names}
    assert {"py.typed", "__main__.py", "backends/__init__.py"} <= inside
    assert len([name for name in inside if re.fullmatch(r"_C\..*\.so", name)]) == 1
    assert "_build_failure.json" not in inside
    assert metadata["Version"] == __version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert [r for r in metadata.get_all("Requires-Dist") if "extra" not in r] == ["torch>=2.10"]


def test_native_module_needs_no_torch(wheel, tmp_path):
    """Reported case 38; nor does building it: test_build_requirements_are_two."""
    if not shutil.which("readelf"):
        pytest.skip("readelf (binutils) is not here")
    zipfile.ZipFile(wheel).extractall(tmp_path)
    needed = run("readelf", "--dynamic", extension(tmp_path / "fused_accum"))
    libraries = set(re.findall(r"NEEDED.*\[(\w+)", needed))
    assert libraries <= {"libstdc", "libm", "libgcc_s", "libc", "libpthread", "ld"}


# -- fresh environments -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def matrix(sdist, wheel, tmp_path_factory):
    return Matrix(tmp_path_factory.mktemp("matrix"), sdist, wheel)


@pytest.mark.parametrize("case", FAST, ids=lambda case: case.name)
def test_import_and_first_use(matrix, case):
    try:
        matrix.try_row(case)
    except NotHere as reason:
        pytest.skip(str(reason))


def test_selftest_of_an_installed_wheel(matrix, tmp_path):
    run(matrix.environment(FAST[0]), "-m", "fused_accum", "selftest", cwd=tmp_path)


# -- other Pythons ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
def test_other_pythons_build_import_and_report(sdist, wheel, tmp_path, version):
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        pytest.skip("the whole suite runs on this one")
    if not (other := find_python(version)):
        pytest.skip(f"no Python {version} with pip is here")
    (tmp_path / "wheel").mkdir()
    own = build_wheel(other, sdist, tmp_path / "wheel", CXXFLAGS="-O0")  # compiles faster
    python, _ = new_environment(tmp_path / "venv", other)
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index")
    assert "not a supported wheel" in run(*pip, wheel, fails=True)  # that of this Python
    run(*pip, own)
    run(python, "-c", "import fused_accum._C as c; c.cpu_isa()", cwd=tmp_path)
    facts = report(python, tmp_path)
    assert facts["python"].startswith(version)
    assert facts["exit_code"] == 2
    assert "pip install" in facts["torch_problem"]
    assert facts["cpu_isa"] in facts["cpu_isas"]
    assert "not installed" in run(python, "-m", "fused_accum", "selftest", cwd=tmp_path, fails=True)
