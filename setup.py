"""Builds the native modules fused_accum._C and, with nvcc, fused_accum._C_cuda. All else is in pyproject.toml.

No torch is needed to build: csrc/ knows only pointers and sizes, so one build serves any torch, whatever CUDA that
was made with. Without a working C++ compiler, or without nvcc, the package still installs; reason and remedy are
kept in fused_accum/_build_failure.json and _cuda_build_failure.json, and `python -m fused_accum` shows them.

nvcc is looked for in NVCC, CUDA_HOME, CUDA_PATH, on PATH and in pip's nvidia packages. It may be a wrapper script:
where its headers and libraries are is asked of itself.

Environment variables, all optional:

    CXX                    the C++17 compiler, with arguments if any ("ccache g++"); default: the first of
                           c++, g++, clang++ on PATH
    CXXFLAGS, LDFLAGS      appended to every compilation, to the link, after our own flags
    ARCHFLAGS              macOS: appended to both
    MAX_JOBS               parallel compilations; default: ninja's choice
    FUSED_ACCUM_FORCE_CPP  1: a missing or failing compiler fails the installation
    NVCC                   the CUDA compiler, with arguments if any
    NVCCFLAGS              appended to every compilation by it
    FUSED_ACCUM_CUDA_ARCHS compute capabilities to compile for ("80,90"; the lowest and the newest also as PTX), or
                           "none" for no CUDA; default: those of 80,86,89,90,100,120 that nvcc knows
    FUSED_ACCUM_FORCE_CUDA 1: a missing or failing nvcc fails the installation
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"

# -ffp-contract=off: the kernels write fma out, so that every path rounds alike. Never -march=native or
# -ffast-math: a wheel must run elsewhere, and NaN must stay NaN.
CXX_FLAGS = (
    "-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-fPIC", "-pthread",
    "-Wall", "-Wextra",
)  # fmt: skip

# -fmad=false as -ffp-contract=off above; division, square root and subnormals are IEEE's by default. -O1 is for what
# the host runs, a few launches; kernels are optimized fully.
NVCC_FLAGS = (
    "-std=c++17", "-O1", "-fmad=false", "-Xcompiler", "-fPIC,-fvisibility=hidden,-ffp-contract=off,-fno-math-errno",
)  # fmt: skip
CUDA_ARCHS = ("80", "86", "89", "90", "100", "120")
OLDEST_NVCC = (12, 1)  # from which on a kernel takes 32764 bytes of parameters


# These are compiled once per instruction set, with flags of their own; the module picks at run time. Loops vectorized
# as by -O3, without what else that does: half as long to compile, as fast. No flag of a floating-point exception is
# read: without trapping, float16's conversions can be vectorized too.
KERNELS = {
    "cpu_kernels.cpp": ("-O2", "-ftree-vectorize", "-fvect-cost-model=dynamic", "-fno-trapping-math"),
}
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


def flags_from(variable: str) -> list[str]:
    return shlex.split(os.environ.get(variable, ""))


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
        python_include = sysconfig.get_path("include")
        both = "#include <Python.h>\n#include <cmath>\n"
        if error := compiler.try_compile(both, "-std=c++17", f"-I{python_include}"):
            if alone := compiler.try_compile("#include <cmath>\n", "-std=c++17"):
                what = f"the C++ compiler {found[0]} cannot compile a C++17 file"
                raise CannotBuild(what, f"repair {found[0]}", alone)
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
        probe = (
            "#ifndef __x86_64__\n#error not x86-64\n#endif\n"
            "typedef float Vector __attribute__((vector_size(64)));\n"
            "void probe(Vector* x) { *x = *x * *x; }\n"  # for the assembler to refuse
        )
        return {isa: flags for isa, flags in X86_ISAS.items() if not self.try_compile(probe, *flags)}


@dataclass(frozen=True)
class Nvcc:
    """A CUDA compiler: the start of its command line, what it compiles for, where its headers and cudart are."""

    command: tuple[str, ...]
    archs: tuple[str, ...]
    includes: tuple[str, ...]
    cudart: str

    @classmethod
    def find(cls) -> "Nvcc":
        asked = os.environ.get("FUSED_ACCUM_CUDA_ARCHS", "").replace(";", ",")
        if asked == "none":
            raise CannotBuild("FUSED_ACCUM_CUDA_ARCHS=none asked for no CUDA", "unset it")
        command = tuple(shlex.split(os.environ.get("NVCC", ""))) or cls._search()
        try:
            said = cls._ask(*command, "--version")
            version = tuple(map(int, re.search(r"release (\d+)\.(\d+)", said).groups()))
            known = re.findall(r"compute_(\w+)", cls._ask(*command, "--list-gpu-arch"))
            root = cls._ask(*command, "--dryrun", "-x", "cu", os.devnull)
        except (OSError, subprocess.CalledProcessError, AttributeError) as error:
            words = str(getattr(error, "stdout", None) or error)
            what = f"{shlex.join(command)} does not work"
            raise CannotBuild(what, "repair it, or name another with NVCC", words) from None
        if version < OLDEST_NVCC:
            need, have = (".".join(map(str, pair)) for pair in (OLDEST_NVCC, version))
            raise CannotBuild(f"nvcc is {have}, older than {need}", "install a newer CUDA toolkit")
        archs = tuple(re.findall(r"\w+", asked)) or tuple(arch for arch in CUDA_ARCHS if arch in known)
        if unknown := set(archs) - set(known):
            raise CannotBuild(
                f"nvcc {'.'.join(map(str, version))} does not know compute capability {', '.join(sorted(unknown))}",
                f"set FUSED_ACCUM_CUDA_ARCHS to some of {','.join(known)}",
            )
        folders = {flag: re.findall(rf'"-{flag}([^"]+)"', root) for flag in "IL"}
        if here := re.search(r"^#\$ TOP=(.*)$", root, re.M):
            folders["I"].append(f"{here[1]}/include")
            folders["L"] += [f"{here[1]}/{name}" for name in ("lib64", "lib")]
        includes = [folder for folder in folders["I"] if Path(folder, "cuda_runtime.h").exists()]
        cudart = [path for folder in folders["L"] if (path := Path(folder, "libcudart_static.a")).exists()]
        if not includes or not cudart:
            raise CannotBuild(
                f"{shlex.join(command)} is there, but {'cudart' if includes else 'cuda_runtime.h'} is not",
                "install the CUDA toolkit's cudart development files (pip: nvidia-cuda-runtime)",
            )
        return cls(command, archs, tuple(includes[:1]), str(cudart[0]))

    @staticmethod
    def _search() -> tuple[str, ...]:
        homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
        places = [Path(home, "bin", "nvcc") for home in homes]
        places += [Path(found) for found in [shutil.which("nvcc")] if found]
        for folder in (*sys.path, sysconfig.get_path("purelib")):  # the latter: with build isolation
            places += sorted(Path(folder or ".", "nvidia").glob("cu*/bin/nvcc"), reverse=True)
        for place in places:
            if os.access(place, os.X_OK):
                return (str(place),)
        raise CannotBuild(
            "nvcc was not found (NVCC, CUDA_HOME, CUDA_PATH, PATH and pip's nvidia packages tried)",
            "install the CUDA toolkit (pip: nvidia-cuda-nvcc and nvidia-cuda-runtime), or set CUDA_HOME",
        )

    @staticmethod
    def _ask(*command: str) -> str:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True
        ).stdout

    def flags(self) -> list[str]:
        """One PTX, of the lowest architecture, serves all but the newest, which has its own: to make a PTX takes as
        long as the machine code of two or three, and no kernel needs more of a GPU. Both are kept: the newest for
        GPUs newer still, the lowest for those in between. What a suffix makes special ("90a") is compiled on its own.
        """
        plain = sorted((arch for arch in self.archs if arch.isdigit()), key=int)
        codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in self.archs if arch not in plain]
        for archs in filter(None, (plain[:-1], plain[-1:])):
            kept = f"compute_{archs[0]}"
            codes.append(f"-gencode=arch={kept},code=[{','.join(f'sm_{arch}' for arch in archs)},{kept}]")
        return [*NVCC_FLAGS, *codes, f"--threads={min(os.cpu_count() or 1, len(self.archs))}"]


def sources(pattern: str) -> list[Path]:
    """In csrc/; what another one includes is not compiled on its own. The longest first, with what they include."""
    length: dict[Path, int] = {}
    included: set[Path] = set()
    for path in CSRC.glob(pattern):
        parts = [CSRC / name for name in re.findall(r'^#include "(\w+\.(?:cpp|cu))"', path.read_text(), re.M)]
        included.update(parts)
        length[path] = sum(one.stat().st_size for one in (path, *parts))
    return sorted(length.keys() - included, key=lambda path: (-length[path], path))


def cpu_units(compiler: Compiler) -> list[Unit]:
    isas = compiler.isas()
    have = tuple(f"-DFA_HAVE_{isa.upper()}" for isa in isas)
    found = []
    for source in sources("*.cpp"):
        if (own := KERNELS.get(source.name)) is not None:
            for isa, flags in {**isas, "baseline": ()}.items():
                found.append(Unit(f"{source.stem}_{isa}.o", source, "cxx", (f"-DFA_ISA={isa}", *own, *flags)))
        elif not source.name.startswith("cuda_"):
            found.append(Unit(f"{source.stem}.o", source, "cxx", have))
    if not found:
        raise CannotBuild(f"{CSRC} holds no C++ sources", "use a complete source distribution or clone")
    return found


def cuda_units(nvcc: Nvcc) -> list[Unit]:
    host = ("-isystem", *nvcc.includes, f'-DFA_CUDA_ARCHS="{",".join(nvcc.archs)}"')
    kernels = sources("cuda_*.cu")
    if not kernels:
        raise CannotBuild(f"{CSRC} holds no CUDA sources", "use a complete source distribution or clone")
    found = [Unit(f"{path.stem}.cu.o", path, "nvcc", ()) for path in kernels]
    return found + [Unit(f"{path.stem}.o", path, "cxx", host) for path in sources("cuda_*.cpp")]


def write_ninja(folder: Path, compiler: Compiler, nvcc: Nvcc | None, targets: dict[str, Path]) -> None:
    """Writes folder/build.ninja, which links ``targets`` ("_C", and "_C_cuda" with ``nvcc``) from csrc/.

    Paths inside the project are relative, so that no name of a folder above it needs quoting.
    """
    try:
        from ninja import ninja_syntax
    except ImportError as error:
        raise CannotBuild(str(error), "run `pip install ninja`") from error

    includes = [f"-I{os.path.relpath(CSRC, folder)}"]
    for path in dict.fromkeys((sysconfig.get_path("include"), sysconfig.get_path("platinclude"))):
        includes += ["-isystem", path]
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
        if nvcc:
            host = ["-ccbin", os.environ["CXX"]] if len(flags_from("CXX")) == 1 else []
            ninja.rule(
                "nvcc",
                f"{command(*nvcc.command, *nvcc.flags(), *host, includes[0], *flags_from('NVCCFLAGS'))} "
                "-MMD -MF $out.d -c $in -o $out",
                depfile="$out.d",
                deps="gcc",
            )
        after = command(*libraries, *flags_from("LDFLAGS"))
        ninja.rule("link", f"{cxx} {command(*shared, '-pthread')} $in -o $out $libraries {after}")

        def objects(units: list[Unit]) -> list[str]:
            made = []
            for unit in units:
                source = os.path.relpath(unit.source, folder)
                made += ninja.build(unit.name, unit.rule, source, variables={"flags": command(*unit.flags)})
            return made

        cuda = objects(cuda_units(nvcc)) if nvcc else []  # ninja starts with these
        cpu = objects(cpu_units(compiler))
        ninja.build(os.path.relpath(targets["_C"], folder), "link", cpu)
        if nvcc:
            static = {"libraries": command(nvcc.cudart, "-lrt")}
            ninja.build(os.path.relpath(targets["_C_cuda"], folder), "link", cuda, variables=static)


class NinjaBuild(build_ext):
    """build_ext, with ninja in place of distutils' compilers."""

    def run(self):
        targets = {e.name.rpartition(".")[2]: Path(self.get_ext_fullpath(e.name)).resolve() for e in self.extensions}
        compiler = nvcc = no_cuda = None
        try:
            nvcc = Nvcc.find()
            cuda_units(nvcc)
        except CannotBuild as error:
            nvcc, no_cuda = None, error
        with self.optional(targets["_C"], "_build_failure.json", "FUSED_ACCUM_FORCE_CPP", "native code"):
            if sys.platform == "win32":
                raise CannotBuild("native code does not build on Windows", "use WSL")
            compiler = Compiler.find()
            write_ninja(self.folder(), compiler, nvcc, targets)
            if nvcc:  # both together, so that no core waits; what fails is done again below, where it has its name
                print(self.ninja("-k0", *targets.values()).stdout, flush=True)
            self.make(targets["_C"], "the C++ sources did not compile")
        with self.optional(targets["_C_cuda"], "_cuda_build_failure.json", "FUSED_ACCUM_FORCE_CUDA", "CUDA"):
            if compiler is None:
                raise CannotBuild("there is no C++ compiler", "see to that first")
            if no_cuda:
                raise no_cuda
            self.make(targets["_C_cuda"], "the CUDA sources did not compile")

    @contextmanager
    def optional(self, target: Path, note_name: str, force: str, what: str) -> Iterator[None]:
        """Where the block cannot build ``target``, installs without, and leaves a note; fails if ``force`` is set."""
        note = target.parent / note_name
        target.parent.mkdir(parents=True, exist_ok=True)
        note.unlink(missing_ok=True)
        try:
            yield
        except CannotBuild as error:
            # Left from an earlier build, it would be used or packed in place of what could not be made.
            target.unlink(missing_ok=True)
            if os.environ.get(force) == "1":
                raise SystemExit(f"fused_accum: {force}=1, but {error}") from None
            note.write_text(json.dumps(error.note, indent=2))
            print(f"fused_accum: installing without {what}: {error}", file=sys.stderr)

    @staticmethod
    def folder() -> Path:
        """In the tree: build_temp is new for every editable build, and rebuilds should be incremental."""
        folder = ROOT / "build" / f"ninja-{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def ninja(self, *words: str | Path) -> subprocess.CompletedProcess:
        jobs = ["-j", os.environ["MAX_JOBS"]] if os.environ.get("MAX_JOBS") else []
        relative = [os.path.relpath(word, self.folder()) if isinstance(word, Path) else word for word in words]
        return subprocess.run(
            [sys.executable, "-m", "ninja", "-C", str(self.folder()), *jobs, *relative],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, check=False,
        )  # fmt: skip

    def make(self, target: Path, failure: str) -> None:
        done = self.ninja(target)
        print(done.stdout, flush=True)  # a failed compiler's words too
        if done.returncode:
            raise CannotBuild(failure, "repair that", done.stdout.strip())


def names(*patterns: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for pattern in patterns for path in CSRC.glob(pattern))


if __name__ == "__main__":  # tests import the rest
    setup(
        ext_modules=[
            Extension(f"fused_accum.{name}", sources=names("*.cpp", "*.cu"), depends=names("*.h"))
            for name in ("_C", "_C_cuda")
        ],
        cmdclass={"build_ext": NinjaBuild},
    )
