"""Builds csrc/ with its CUDA kernels on the emulator of tests/native: no nvcc, no CUDA header, no GPU needed.

As a pytest plugin (``-p cuda_emulated``, the module's path in FUSED_ACCUM_EMULATED) it puts that build in place of
fused_accum._C and lets backend "cuda" take CPU tensors, so that every test of all backends runs on it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import runpy
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
CSRC = ROOT / "csrc"
NATIVE = TESTS / "native"
EMULATION = sorted(NATIVE.glob("cuda_emulation*.cpp"))
VARIABLE = "FUSED_ACCUM_EMULATED"

# As setup.py has it where bits depend on it; -O1 compiles fast and keeps line numbers honest.
FLAGS = ("-std=c++17", "-O1", "-g1", "-ffp-contract=off", "-fno-math-errno", "-fno-omit-frame-pointer", "-fPIC",
         "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas",
         "-DFA_CUDA_EMULATION")  # fmt: skip
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def build(target: Path, sources: list[Path], flags: tuple[str, ...] = (), link: tuple[str, ...] = ()) -> Path:
    """Compile ``sources`` (.cpp, .cu) and link them to ``target``; what has not changed is not compiled again."""
    from ninja import ninja_syntax

    folder = target.parent / "objects"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "build.ninja", "w") as file:
        ninja = ninja_syntax.Writer(file, width=10_000)
        words = shlex.join([*FLAGS, *flags, f"-I{CSRC}", f"-I{NATIVE}"])
        ninja.rule("cxx", f"g++ {words} -MMD -MF $out.d -x c++ -c $in -o $out", depfile="$out.d", deps="gcc")
        ninja.rule("link", f"g++ {shlex.join([*FLAGS, *flags, *link])} $in -o $out")
        objects = []
        for source in sources:
            objects += ninja.build(f"{source.name}.o", "cxx", ninja_syntax.escape_path(str(source)))
        ninja.build(ninja_syntax.escape_path(str(target)), "link", objects)
    done = subprocess.run(
        [sys.executable, "-m", "ninja", "-C", str(folder)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:]
    return target


def build_module(sanitized: bool = False) -> Path:
    """The emulated fused_accum._C_cuda, in build/; with AddressSanitizer and UBSan it loads where libasan is."""
    import pybind11

    folder = ROOT / "build" / f"emulated-{sys.implementation.cache_tag}{'-sanitized' * sanitized}"
    own = [path for path in sorted(CSRC.glob("*.cpp")) if not path.name.startswith("cpu_")]
    sources = [path for path in own if path.name != "bindings.cpp"] + sorted(CSRC.glob("*.cu")) + EMULATION
    includes = ("-isystem", pybind11.get_include(), "-isystem", sysconfig.get_path("include"))
    target = folder / f"_C_cuda{sysconfig.get_config_var('EXT_SUFFIX')}"
    return build(target, sources, includes + SANITIZERS * sanitized, ("-shared",))


def environment(module: Path, sanitized: bool = False) -> dict[str, str]:
    """The environment of a Python in which ``module`` takes the place of fused_accum._C_cuda."""
    path = os.pathsep.join(filter(None, [str(TESTS), str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, VARIABLE: str(module)}
    if sanitized:
        command = ["g++", "-print-file-name=libasan.so"]
        library = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        # Python and torch leave memory to the end of the process.
        env |= {"LD_PRELOAD": library, "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    return env


class Launched(NamedTuple):
    """A launch: type of the kernel's parameter, device, stream (0: the default one), blocks, threads of a block."""

    kind: str
    device: int
    stream: int
    grid: int
    block: int


class Emulation:
    """What cuda_emulation_control.h offers, of the module in use."""

    def __init__(self, module: Path) -> None:
        self.library = ctypes.CDLL(str(module))
        self.library.fa_emulation_stream.restype = ctypes.c_uint64
        self.library.fa_emulation_log.restype = ctypes.c_char_p
        self.library.fa_emulation_phantom_count.restype = ctypes.c_uint64

    def seed(self, seed: int) -> None:
        self.library.fa_emulation_seed(ctypes.c_uint64(seed))

    def sample_blocks(self, n: int) -> None:
        """Run the first 64 blocks, the last 64, and every ``n``-th; 1: all."""
        self.library.fa_emulation_sample_blocks(n)

    def check_races(self, on: bool) -> None:
        self.library.fa_emulation_check_races(int(on))

    def steps_on_device(self, on: bool) -> None:
        self.library.fa_emulation_steps_on_device(int(on))

    def launches(self) -> list[Launched]:
        """Since the last call."""
        lines = [line.split("\t") for line in self.library.fa_emulation_log().decode().splitlines()]
        return [Launched(kind.removeprefix("fa::"), *map(int, numbers)) for kind, *numbers in lines]

    def stream(self, device: int) -> int:
        return self.library.fa_emulation_stream(device)

    def device(self) -> int:
        return self.library.fa_emulation_device()

    def set_device(self, device: int) -> None:
        self.library.fa_emulation_set_device(device)

    def set_device_count(self, count: int) -> None:
        self.library.fa_emulation_device_count(count)

    def fail(self, call: str, error: int, after: int = 0) -> None:
        self.library.fa_emulation_fail(call.encode(), error, after)

    def phantom(self, tensor) -> int:
        """From here on kernels do not touch the memory of ``tensor``: what they would do is recorded."""
        address, size = ctypes.c_uint64(tensor.data_ptr()), tensor.element_size()
        return self.library.fa_emulation_add_phantom(
            address, ctypes.c_uint64(tensor.numel() * size), ctypes.c_uint64(size)
        )

    def phantom_counts(self, phantom: int) -> tuple[int, int, int]:
        """Elements read, elements written, writes to elements that had been written before."""
        return tuple(self.library.fa_emulation_phantom_count(phantom, kind) for kind in range(3))

    def reset(self) -> None:
        self.library.fa_emulation_clear_phantoms()
        self.library.fa_emulation_plan_nothing()
        self.set_device_count(4)
        self.set_device(0)
        self.steps_on_device(False)
        self.sample_blocks(1)
        self.check_races(False)
        self.launches()


def install(module: Path) -> None:
    """Put ``module`` in place of fused_accum._C_cuda; before fused_accum.backends is imported."""
    assert "fused_accum" not in sys.modules, "fused_accum was imported before the emulated module"
    spec = importlib.util.spec_from_file_location("fused_accum._C_cuda", module)
    sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[spec.name])


if VARIABLE in os.environ and "fused_accum._C_cuda" not in sys.modules:
    install(Path(os.environ[VARIABLE]))

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
