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

import pytest
from filelock import FileLock

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
CSRC = ROOT / "csrc"
NATIVE = TESTS / "native"
KERNELS = sorted(path for path in CSRC.glob("cuda_*.cu") if ".cu\"" not in path.read_text())  # each on its own
EMULATOR = sorted(NATIVE.glob("cuda_emulation*.cpp"))
VARIABLE, SETTINGS = "FUSED_ACCUM_EMULATED", "FUSED_ACCUM_EMULATION"

# As setup.py has it where bits depend on it.
FLAGS = ("-std=c++17", "-g1", "-ffp-contract=off", "-fno-math-errno", "-fno-omit-frame-pointer", "-fPIC", "-pthread",
         "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas",
         "-ftls-model=initial-exec", "-DFA_CUDA_EMULATION")  # fmt: skip
PLAIN = ("-O1",)
# Not optimized: with both sanitizers g++ takes minutes for what it compiles in seconds so.
SANITIZED = ("-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def build(folder: Path, targets: dict[str, tuple[list[Path], tuple[str, ...], tuple[str, ...]]], wanted: str) -> Path:
    """Compile and link the ``wanted`` one of ``targets``: name, sources (.cpp, .cu), their flags, those of the link.
    What has not changed is not compiled again."""
    from ninja import ninja_syntax

    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "build.ninja", "w") as file:
        ninja = ninja_syntax.Writer(file, width=10_000)
        includes = ("-isystem", sysconfig.get_path("include"))
        words = shlex.join([*FLAGS, f"-I{CSRC}", f"-I{NATIVE}", *includes])
        ninja.rule("cxx", f"g++ {words} $flags -MMD -MF $out.d -x c++ -c $in -o $out", depfile="$out.d", deps="gcc")
        ninja.rule("link", "g++ -pthread $flags $in -o $out")
        for name, (sources, flags, link) in targets.items():
            objects = []
            for source in sources:
                own = (*flags, "-O2") if source in EMULATOR else flags  # little to compile, and what runs most
                objects += ninja.build(
                    f"{name}.objects/{source.name}.o", "cxx", ninja_syntax.escape_path(str(source)),
                    variables={"flags": shlex.join(own)},
                )  # fmt: skip
            ninja.build(name, "link", objects, variables={"flags": shlex.join([*flags, *link])})
    done = subprocess.run(
        [sys.executable, "-m", "ninja", "-C", str(folder), wanted],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:]
    return folder / wanted


def build_module(sanitized: bool = False) -> Path:
    """The emulated fused_accum._C_cuda, in build/; ``sanitized`` it loads where libasan is there already."""
    sources = [*sorted(CSRC.glob("cuda_*.cpp")), *KERNELS, *EMULATOR]
    suffix = f"_C_cuda{sysconfig.get_config_var('EXT_SUFFIX')}"
    targets = {
        f"plain/{suffix}": (sources, PLAIN, ("-shared",)),
        f"sanitized/{suffix}": (sources, SANITIZED, ("-shared",)),
    }
    folder = ROOT / "build" / f"emulated-{sys.implementation.cache_tag}"
    with FileLock(folder.with_suffix(".lock")):  # tests run in several processes
        return build(folder, targets, f"{'sanitized' if sanitized else 'plain'}/{suffix}")


def environment(module: Path, settings: str = "", sanitized: bool = False) -> dict[str, str]:
    """The environment of a Python in which ``module``, set up so, takes the place of fused_accum._C_cuda."""
    path = os.pathsep.join(filter(None, [str(TESTS), str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, VARIABLE: str(module), SETTINGS: settings}
    if sanitized:
        found = [
            subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout
            for name in ("libasan.so", "libstdc++.so")  # the second, so that the first finds what throws exceptions
        ]
        # Python and torch leave memory to the end of the process.
        env["LD_PRELOAD"] = " ".join(found).replace("\n", "")
        env |= {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
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
        self.reset()

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

    def phantom_was_written(self, phantom: int, element: int) -> bool:
        return bool(self.library.fa_emulation_phantom_was_written(phantom, ctypes.c_uint64(element)))

    def reset(self) -> None:
        """As the environment says."""
        words = os.environ.get(SETTINGS, "").split()
        self.seed(next((int(word[5:]) for word in words if word.startswith("seed=")), 1))
        self.check_races("races" in words)
        self.steps_on_device("steps-on-device" in words)
        self.sample_blocks(1)
        self.set_device_count(4)
        self.set_device(0)
        self.library.fa_emulation_clear_phantoms()
        self.library.fa_emulation_plan_nothing()
        self.launches()


def install(module: Path) -> Emulation:
    """Put ``module`` in place of fused_accum._C_cuda; before fused_accum is imported."""
    assert "fused_accum" not in sys.modules, "fused_accum was imported before the emulated module"
    spec = importlib.util.spec_from_file_location("fused_accum._C_cuda", module)
    sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[spec.name])
    return Emulation(module)


EMULATION: Emulation | None = None  # where this Python has the emulated module
if VARIABLE in os.environ:
    # Run as __main__, this file is imported a second time.
    EMULATION = getattr(sys.modules.get("__main__"), "EMULATION", None) or install(Path(os.environ[VARIABLE]))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of tests of several backends those of "cuda" remain; of others, those that were written for the emulator."""
    chosen, others = [], []
    for item in items:
        pair = item.callspec.params.get("on") if hasattr(item, "callspec") else None
        ours = item.path.name.startswith("emulated_") or (pair is not None and pair[0] == "cuda")
        (chosen if ours else others).append(item)
    items[:] = chosen
    config.hook.pytest_deselected(items=others)


@pytest.fixture
def emulation():
    """Of the module in use, as the environment says, whatever the test makes of it."""
    EMULATION.reset()
    yield EMULATION
    EMULATION.reset()


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
