"""The rows of install_matrix.py: how fused_accum is installed, where, and what must work there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
THIS = f"{sys.version_info.major}.{sys.version_info.minor}"
NOWHERE = "/dev/null/nowhere"  # cannot be made, by root either
ONLY_REFERENCE = frozenset({"reference"})


@dataclass(frozen=True)
class Case:
    """A row. how: one of install_matrix.WAYS. python: a version. lent: the site-packages that lend torch, None: the
    running ones', "": none. fetched: a version of torch to install for this row, in place of a lent one. without:
    packages that are not lent. build, use: environment variables of installation and use. backends: to construct the
    optimizer with. works: what the report must say works. says: words of the report, and of the one warning where
    only the reference works. tried: the selftest and a file of tests are run there too."""

    name: str
    how: str = "wheel"
    python: str = THIS
    lent: str | None = None
    fetched: str | None = None
    without: tuple[str, ...] = ()
    build: dict[str, str] = field(default_factory=dict)
    use: dict[str, str] = field(default_factory=dict)
    backends: tuple[str, ...] = ("auto",)
    works: frozenset[str] = frozenset({"cpu", "reference"})
    says: tuple[str, ...] = ()
    tried: bool = False


FAST = [
    Case("wheel, pip"),
    Case("wheel, uv", how="wheel by uv"),
    Case("no compiler and no nvcc where it is used", use={"PATH": NOWHERE}),
    Case("no triton", without=("triton",)),
    Case(
        "Triton cannot write its cache; no HOME",
        use={"TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": NOWHERE, "HOME": NOWHERE},
        backends=("auto", "triton"),
    ),
    Case("no torch", lent="", works=frozenset(), says=("torch is not installed", "pip install")),
]
NO_COMPILER = Case("", build={"PATH": NOWHERE}, works=ONLY_REFERENCE, says=("no C++ compiler", "apt-get install g++"))
FULL = [
    Case("sdist, pip in isolation", how="sdist"),
    Case("sdist, uv", how="sdist by uv"),
    Case("clone, pip without isolation", how="clone without isolation"),
    Case("clone, editable, pip in isolation", how="editable"),
    Case("clone, editable, pip without isolation", how="editable without isolation"),
    replace(NO_COMPILER, name="no compiler where it is built", how="clone without isolation"),
    Case("no nvcc where it is built", how="clone without isolation", build={"FUSED_ACCUM_CUDA_ARCHS": ""},
         says=("nvcc was not found", "pip: nvidia-cuda-nvcc")),
    Case("with nvcc, for one GPU", how="clone without isolation",
         build={"FUSED_ACCUM_CUDA_ARCHS": "90", "FUSED_ACCUM_FORCE_CUDA": "1"}),
    *(Case(f"Python {version}, no torch", python=version, lent="", works=frozenset(), says=("pip install",))
      for version in PYTHONS if version != THIS),
]  # fmt: skip


def with_torch(site: str) -> Case:
    """The same wheel with another torch, of a Python that the path names."""
    version = next((part.removeprefix("python") for part in Path(site).parts if part.startswith("python3.")), THIS)
    return Case("wheel, another torch", python=version, lent=site, tried=True)


def with_fetched(version: str) -> Iterator[Case]:
    """A wheel with that version of torch, for every Python."""
    for python in PYTHONS:
        yield Case(f"Python {python}, torch {version} from the index", python=python, fetched=version, tried=True)
