"""Builds csrc/ with its CUDA kernels on the emulator of tests/native: no nvcc, no CUDA header, no GPU needed.

As a pytest plugin (``-p cuda_emulated``, the module's path in FUSED_ACCUM_EMULATED) it puts that build in place of
fused_accum._C and lets backend "cuda" take CPU tensors, so that every test of all backends runs on it.
"""

from __future__ import annotations

import ctypes
import os
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

# As setup.py has it where bits depend on it; -O1 compiles in half the time and keeps lines honest.
FLAGS = ("-std=c++17", "-g1", "-ffp-contract=off", "-fno-math-errno", "-fno-omit-frame-pointer", "-fPIC", "-pthread",
         "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror", "-DFA_CUDA_EMULATION")  # fmt: skip
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
SANITIZER_OPTIONS = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}


def build(target: Path, sources: list[Path], flags: tuple[str, ...] = (), link: tuple[str, ...] = ()) -> Path:
    """Compile ``sources`` (.cpp, .cu) and link them to ``target``; what has not changed is not compiled again."""
    from ninja import ninja_syntax

    folder = target.with_suffix(".build")
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "build.ninja", "w") as file:
        ninja = ninja_syntax.Writer(file, width=10_000)
        words = " ".join([*FLAGS, *flags, f"-I{CSRC}", f"-I{NATIVE}"])
        ninja.rule("cxx", f"g++ {words} -MMD -MF $out.d -x c++ -c $in -o $out", depfile="$out.d", deps="gcc")
        ninja.rule("link", f"g++ {' '.join([*FLAGS, *flags, *link])} $in -o $out -ldl")
        objects = []
        for source in sources:
            objects += ninja.build(f"{source.name}.o", "cxx", str(source))
        ninja.build(str(target), "link", objects)
    done = subprocess.run(
        [sys.executable, "-m", "ninja", "-C", str(folder)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:]
    return target
