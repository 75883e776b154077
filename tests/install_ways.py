"""The ways in which install_matrix.py installs fused_accum into an environment."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.environments import find_uv, packages, run
from tests.install_cases import ONLY_REFERENCE, Case

if TYPE_CHECKING:
    from tests.install_matrix import Matrix


class NotHere(Exception):
    """A row that cannot be tried on this machine: what it needs is not obtainable."""


def by_pip(what: Callable[[Matrix, Case], Any], *words: str) -> Callable[[Matrix, Case, Any], None]:
    def way(matrix: Matrix, case: Case, python: Any) -> None:
        command = (sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", *words)
        run(*command, what(matrix, case), env=building(case))

    return way


def by_uv(what: Callable[[Matrix, Case], Any], *words: str) -> Callable[[Matrix, Case, Any], None]:
    def way(matrix: Matrix, case: Case, python: Any) -> None:
        uv = find_uv()
        if uv is None:
            raise NotHere("no uv: pip install uv")
        env = {"UV_CACHE_DIR": str(matrix.folder / "uv"), **building(case)}
        run(*uv, "pip", "install", "--no-deps", *words, "--python", python, what(matrix, case), env=env)

    return way


def building(case: Case) -> dict[str, str]:
    """The environment of an installation: quick to compile, and nothing may be left out without a word."""
    env = {"CXXFLAGS": "-O0", "FUSED_ACCUM_FORCE_CPP": "" if case.works == ONLY_REFERENCE else "1", **case.build}
    if env.get("FUSED_ACCUM_CUDA_ARCHS") == "":  # no nvcc is to be found
        folders = os.environ["PATH"].split(os.pathsep)
        env["PATH"] = os.pathsep.join(f for f in folders if not Path(f, "nvcc").exists())
        env |= dict.fromkeys(("NVCC", "CUDA_HOME", "CUDA_PATH"), "")
        if not shutil.which("c++", path=env["PATH"]) or list(packages().glob("nvidia/cu*/bin/nvcc")):
            raise NotHere("nvcc cannot be taken away: it is beside the C++ compiler, or from pip")
    if "FUSED_ACCUM_FORCE_CUDA" in env and not shutil.which("nvcc"):
        raise NotHere("no nvcc")
    return env


WAYS = {
    "wheel": by_pip(lambda matrix, case: matrix.wheel(case.python), "--no-index"),
    "wheel by uv": by_uv(lambda matrix, case: matrix.wheel(case.python), "--offline"),
    "sdist": by_pip(lambda matrix, _: matrix.sdist, "--no-cache-dir"),
    "sdist by uv": by_uv(lambda matrix, _: matrix.sdist),
    "clone without isolation": by_pip(lambda matrix, _: matrix.clone(isolated=False), "--no-build-isolation"),
    "editable": by_pip(lambda matrix, _: f"--editable={matrix.clone(isolated=True)}"),
    "editable without isolation": by_pip(
        lambda matrix, _: f"--editable={matrix.clone(isolated=False)}", "--no-build-isolation"
    ),
}
