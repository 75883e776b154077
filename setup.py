"""Builds the native module fused_accum._C with ninja. Everything else is in pyproject.toml.

No torch is needed to build: csrc/ knows only pointers and sizes, so one build serves any torch. Without a
working C++ compiler the package still installs; reason and remedy are kept in
fused_accum/_build_failure.json, and `python -m fused_accum` shows them.

Environment variables, all optional:

    CXX                    the C++17 compiler, with arguments if any ("ccache g++"); default: the first of
                           c++, g++, clang++ on PATH
    CXXFLAGS, LDFLAGS      appended to every compilation, to the link, after our own flags
    ARCHFLAGS              macOS: appended to both
    MAX_JOBS               parallel compilations; default: ninja's choice
    FUSED_ACCUM_FORCE_CPP  1: a missing or failing compiler fails the installation
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
FAILURE_NOTE = "_build_failure.json"

# -ffp-contract=off: the kernels write fma out, so that every path rounds alike. Never -march=native or
# -ffast-math: a wheel must run elsewhere, and NaN must stay NaN.
CXX_FLAGS = (
    "-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-fPIC", "-pthread",
    "-Wall", "-Wextra",
)  # fmt: skip

# This one file is compiled once per instruction set; the module picks at run time.
KERNELS = "cpu_kernels.cpp"
X86_ISAS = {
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx512": (
        "-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mfma", "-mprefer-vector-width=512",
    ),
}  # fmt: skip


class CannotBuild(Exception):
    """The native module cannot be built here: what is the matter, and what to do before installing again.

    `output` is all that the compiler said; the line of it that tells most ends the reason.
    """

    def __init__(self, reason: str, remedy: str, output: str = ""):
        lines = output.splitlines()
        if lines:
            reason += ": " + next((line for line in lines if "error" in line), lines[-1]).strip()
        super().__init__(f"{reason}\nRemedy: {remedy}, then install fused_accum again.")
        self.note = {"reason": reason, "remedy": remedy, "output": output}


@dataclass(frozen=True)
class Unit:
    """One compilation: the object name, the source, the ninja rule that compiles it and its own flags."""

    name: str
    source: Path
    rule: str
    flags: tuple[str, ...]


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler that is known to work, as the start of a command line."""

    command: tuple[str, ...]

    @classmethod
    def find(cls) -> "Compiler":
        named = shlex.split(os.environ.get("CXX", ""))
        found = named or [c for c in ("c++", "g++", "clang++") if shutil.which(c)][:1]
        if not found or not shutil.which(found[0]):
            raise CannotBuild(
                f"no C++ compiler was found ({'CXX=' + found[0] if found else 'c++, g++ and clang++ tried'})",
                "install g++ or clang++ (Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++; "
                "macOS: xcode-select --install)",
            )
        compiler = cls((*found, *flags_from("ARCHFLAGS")))
        if error := compiler.try_compile("#include <cmath>\n", "-std=c++17"):
            raise CannotBuild(f"the C++ compiler {found[0]} cannot compile a C++17 file", f"repair {found[0]}", error)
        python_include = sysconfig.get_path("include")
        if error := compiler.try_compile("#include <Python.h>\n", f"-I{python_include}"):
            raise CannotBuild(
                f"Python.h cannot be compiled (looked for in {python_include})",
                "install Python's headers (Debian, Ubuntu: apt-get install python3-dev; "
                "Fedora: dnf install python3-devel)",
                error,
            )
        return compiler

    def try_compile(self, text: str, *flags: str) -> str:
        """Compiles `text`; returns "" or what the compiler said."""
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "probe.cpp")
            source.write_text(text)
            try:
                done = subprocess.run(
                    [*self.command, *flags, *flags_from("CXXFLAGS"), "-c", str(source), "-o", f"{source}.o"],
                    stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
                )  # fmt: skip
            except OSError as error:
                return str(error)
        return "" if done.returncode == 0 else (done.stderr.strip() or f"exit {done.returncode}")

    def isas(self) -> dict[str, tuple[str, ...]]:
        """The x86-64 instruction sets that this compiler can produce code for; none on other targets."""
        probe = "#ifndef __x86_64__\n#error not x86-64\n#endif\n#include <immintrin.h>\n"
        return {isa: flags for isa, flags in X86_ISAS.items() if not self.try_compile(probe, *flags)}


def flags_from(variable: str) -> list[str]:
    return shlex.split(os.environ.get(variable, ""))


def units(compiler: Compiler) -> list[Unit]:
    isas = compiler.isas()
    have = tuple(f"-DFA_HAVE_{isa.upper()}" for isa in isas)
    found = []
    for source in sorted(CSRC.glob("*.cpp")):
        if source.name == KERNELS:
            for isa, flags in {"baseline": (), **isas}.items():
                found.append(Unit(f"{source.stem}_{isa}.o", source, "cxx", (f"-DFA_ISA={isa}", *flags)))
        else:
            found.append(Unit(f"{source.stem}.o", source, "cxx", have))
    if not found:
        raise CannotBuild(f"{CSRC} holds no C++ sources", "use a complete source distribution or clone")
    return found


def write_ninja(folder: Path, compiler: Compiler, target: Path) -> None:
    """Writes folder/build.ninja, which links `target` from csrc/.

    Paths inside the project are relative, so that no name of a folder above it needs quoting.
    """
    try:
        import pybind11
        from ninja import ninja_syntax
    except ImportError as error:
        raise CannotBuild(str(error), "run `pip install pybind11 ninja`") from error

    includes = [f"-I{os.path.relpath(CSRC, folder)}"]
    for path in dict.fromkeys((sysconfig.get_path("include"), sysconfig.get_path("platinclude"))):
        includes += ["-isystem", path]
    includes += ["-isystem", pybind11.get_include()]
    shared = ["-bundle", "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-shared"]

    libraries = ["-ldl"] if sys.platform == "linux" else []  # dlsym lives there before glibc 2.34

    def command(*words: str) -> str:
        return shlex.join(words).replace("$", "$$")

    cxx = command(*compiler.command)
    with open(folder / "build.ninja", "w") as file:
        ninja = ninja_syntax.Writer(file, width=10_000)
        ninja.rule(
            "cxx",
            f"{cxx} {command(*CXX_FLAGS, *includes)} $flags {command(*flags_from('CXXFLAGS'))} "
            "-MMD -MF $out.d -c $in -o $out",
            depfile="$out.d",
            deps="gcc",
        )
        after = command(*libraries, *flags_from("LDFLAGS"))
        ninja.rule("link", f"{cxx} {command(*shared, '-pthread')} $in -o $out {after}")
        objects = []
        for unit in units(compiler):
            objects += ninja.build(
                unit.name,
                unit.rule,
                os.path.relpath(unit.source, folder),
                variables={"flags": command(*unit.flags)},
            )
        ninja.build(os.path.relpath(target, folder), "link", objects)


class NinjaBuild(build_ext):
    """build_ext, with ninja in place of distutils' compilers."""

    def run(self):
        for extension in self.extensions:
            self.build(Path(self.get_ext_fullpath(extension.name)).resolve())

    def build(self, target: Path) -> None:
        note = target.parent / FAILURE_NOTE
        target.parent.mkdir(parents=True, exist_ok=True)
        note.unlink(missing_ok=True)
        try:
            self.compile(target)
        except CannotBuild as error:
            # Left from an earlier build, it would be used or packed in place of what could not be made.
            target.unlink(missing_ok=True)
            if os.environ.get("FUSED_ACCUM_FORCE_CPP") == "1":
                raise SystemExit(f"fused_accum: FUSED_ACCUM_FORCE_CPP=1, but {error}") from None
            note.write_text(json.dumps(error.note, indent=2))
            print(f"fused_accum: installing without native code: {error}", file=sys.stderr)

    def compile(self, target: Path) -> None:
        if sys.platform == "win32":
            raise CannotBuild("native code does not build on Windows", "use WSL")
        compiler = Compiler.find()
        # In the tree: build_temp is new for every editable build, and rebuilds should be incremental.
        folder = ROOT / "build" / f"ninja-{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
        folder.mkdir(parents=True, exist_ok=True)
        write_ninja(folder, compiler, target)
        jobs = ["-j", os.environ["MAX_JOBS"]] if os.environ.get("MAX_JOBS") else []
        # ninja shows a failed compiler's words on stdout.
        done = subprocess.run(
            [sys.executable, "-m", "ninja", "-C", str(folder), *jobs],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, check=False,
        )  # fmt: skip
        print(done.stdout, flush=True)
        if done.returncode:
            raise CannotBuild("the C++ sources did not compile", "repair that", done.stdout.strip())


setup(
    ext_modules=[
        Extension(
            "fused_accum._C",
            sources=sorted(str(path.relative_to(ROOT)) for path in CSRC.glob("*.cpp")),
            depends=sorted(str(path.relative_to(ROOT)) for path in CSRC.glob("*.h")),
        )
    ],
    cmdclass={"build_ext": NinjaBuild},
)
