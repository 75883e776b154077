"""Installs fused_accum in fresh environments, in every way, and sees what an import and a first use do there.

``python -m tests.install_matrix`` takes minutes, prints a table and exits with 1 where a row fails; the tests run
FAST, the rows that need nothing but one wheel. In every row the import says nothing and runs no compiler (whatever is
on PATH by such a name is replaced by a spy), and the first use says nothing, or one warning with the remedy.

Another torch, or a Python with it, takes part with --torch; a second one is not downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.environments import (
    ROOT,
    build_sdist,
    build_wheel,
    extension,
    find_python,
    find_uv,
    new_environment,
    packages,
    report,
    run,
)

THIS = f"{sys.version_info.major}.{sys.version_info.minor}"
COMPILERS = ("c++", "g++", "gcc", "cc", "clang", "clang++", "nvcc", "ptxas", "ninja", "make", "ld")
NOWHERE = "/dev/null/nowhere"  # cannot be made, by root either


# -- one environment --------------------------------------------------------------------------------------

FIRST_USE = """
import sys
print("=== import", flush=True)
import fused_accum
assert "torch" not in sys.modules
print("=== torch", flush=True)
import torch
print("=== class", flush=True)
from fused_accum import FusedAccumAdamW
p = torch.nn.Parameter(torch.ones(3))
optimizers = [FusedAccumAdamW([p], lr=0.5, backend=name) for name in sys.argv[1:]]
print("=== use", flush=True)
for opt in optimizers:
    for _ in range(2):
        p.grad = torch.ones(3)
        opt.accumulate(weight=2)
        p.grad = torch.ones(3)
        opt.step(weight=1)
    assert float(opt.state[p]["step"]) == 2 and p.max() < 0.1, p
    with torch.no_grad():
        p.fill_(1)
print("=== report", flush=True)
from fused_accum.__main__ import main
sys.exit(main(["--json"]))
"""


@dataclass(frozen=True)
class Case:
    """A row. how: one of WAYS. python: a version. lent: the site-packages that lend torch, None: the running ones',
    "": none. without: packages that are not lent. build, use: environment variables of installation and use.
    backends: to construct the optimizer with. works: what the report must say works. says: words of the report, and
    of the one warning where only the reference works."""

    name: str
    how: str = "wheel"
    python: str = THIS
    lent: str | None = None
    without: tuple[str, ...] = ()
    build: dict[str, str] = field(default_factory=dict)
    use: dict[str, str] = field(default_factory=dict)
    backends: tuple[str, ...] = ("auto",)
    works: frozenset[str] = frozenset({"cpu", "reference"})
    says: tuple[str, ...] = ()


ONLY_REFERENCE = frozenset({"reference"})
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
      for version in ("3.10", "3.11", "3.12", "3.13") if version != THIS),
]  # fmt: skip


class NotHere(Exception):
    """A row that cannot be tried on this machine."""


class Matrix:
    """Builds what rows need, once, in ``folder``; ``wheel`` and ``sdist`` where they exist already."""

    def __init__(self, folder: Path, sdist: Path | None = None, wheel: Path | None = None) -> None:
        self.folder, self.made = folder, 0
        self.wheels: dict[str, Path] = {}
        self.environments: dict[tuple, Path] = {}
        self.built: Path | None = None
        if sdist:
            self.sdist = sdist
        if wheel:
            self.wheels[THIS] = wheel
        self.spies = folder / "spies"
        self.spies.mkdir()
        self.log = folder / "compilers called"
        for name in COMPILERS:
            spy = self.spies / name
            spy.write_text(f'#!/bin/sh\necho "{name} $*" >> "{self.log}"\nexit 1\n')
            spy.chmod(0o755)

    @cached_property
    def sdist(self) -> Path:
        folder = self.new_folder()
        folder.mkdir()
        return build_sdist(folder)

    def wheel(self, version: str) -> Path:
        if version not in self.wheels:
            folder = self.new_folder()
            folder.mkdir()
            self.wheels[version] = build_wheel(self.python(version), self.sdist, folder, CXXFLAGS="-O0")
        return self.wheels[version]

    def new_folder(self) -> Path:
        self.made += 1
        return self.folder / str(self.made)

    def clone(self, isolated: bool) -> Path:
        """What git has of the tree, and nothing built; without isolation, with the objects of the clone before, which
        the same compiler made with the same commands: ninja sees that."""
        folder = self.new_folder()
        ignored = shutil.ignore_patterns("*.so", "*_build_failure.json", "__pycache__", ".*", "build", "runs")
        shutil.copytree(ROOT, folder, ignore=ignored)
        if not isolated:
            if self.built and (self.built / "build").exists():
                shutil.copytree(self.built / "build", folder / "build")
            self.built = folder
        return folder

    def python(self, version: str) -> Any:
        found = sys.executable if version == THIS else find_python(version)
        if found is None:
            raise NotHere(f"no Python {version} with pip")
        return found

    def lend(self, case: Case) -> Path | None:
        """The site-packages to lend, or a folder of links to all of it but ``without``."""
        if case.lent == "":
            return None
        whole = Path(case.lent) if case.lent else packages()
        if not case.without:
            return whole
        links = self.new_folder()
        links.mkdir()
        for entry in whole.iterdir():
            if not entry.name.lower().startswith(case.without):
                (links / entry.name).symlink_to(entry)
        return links

    def environment(self, case: Case) -> Path:
        """The Python of an environment that fused_accum is installed in; rows that differ only in use share it."""
        key = (case.how, case.python, case.lent, case.without, *case.build.items())
        if key not in self.environments:
            python, _ = new_environment(self.new_folder(), self.python(case.python), lent=self.lend(case))
            WAYS[case.how](self, case, python)
            self.environments[key] = python
        return self.environments[key]

    def try_row(self, case: Case) -> str:
        """Installs and uses; returns what works there. Raises AssertionError, or NotHere."""
        python = self.environment(case)
        self.log.unlink(missing_ok=True)
        where = self.new_folder()
        where.mkdir()
        use = {"PATH": f"{self.spies}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": "", **case.use}
        if case.lent == "":
            assert run(python, "-c", "import fused_accum", env=use, cwd=where) == ""
            facts = report(python, where, **use)
        else:
            exits_1 = case.works == ONLY_REFERENCE
            output = run(python, "-c", FIRST_USE, *case.backends, env=use, cwd=where, fails=exits_1)
            facts = self.check_first_use(case, output)
        for name in case.without:
            run(python, "-c", f"import {name}", cwd=where, fails=True)
        assert not self.log.exists(), f"compilers were called: {self.log.read_text()}"
        works = {row["backend"] for row in facts["backends"] if row["works"]} - {"cuda"}
        assert works == case.works, facts
        native = "cpu" in case.works or not case.works
        assert bool(facts["native"]) == native, facts["native_problem"]
        if "FUSED_ACCUM_FORCE_CUDA" in case.build:
            assert extension(Path(facts["native"]).parent, "_C_cuda"), "no module for CUDA"
        for word in case.says:
            assert word in json.dumps(facts), f"the report does not say {word!r}: {facts}"
        shown = ", ".join(sorted(works)) or "the report says what is missing"
        return f"Python {facts['python']}, torch {facts['torch']}: {shown}"

    @staticmethod
    def check_first_use(case: Case, output: str) -> dict[str, Any]:
        """Who said what between the lines of FIRST_USE; returns the report."""
        parts = dict(part.partition("\n")[::2] for part in output.split("=== ")[1:])
        assert parts["import"] == "", parts["import"]
        assert parts["class"] == "", parts["class"]  # what torch's own import says is its own affair
        if case.works == ONLY_REFERENCE:
            assert parts["use"].count("Warning: ") == 1, parts["use"]
            assert all(word in parts["use"] for word in case.says), parts["use"]
        else:
            assert parts["use"] == "", parts["use"]
        return json.loads(parts["report"])


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


def with_torch(site: str) -> Case:
    """The same wheel with another torch, of a Python that the path names."""
    version = next((part.removeprefix("python") for part in Path(site).parts if part.startswith("python3.")), THIS)
    return Case(f"wheel, torch of {site}", python=version, lent=site)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.install_matrix", description=__doc__.splitlines()[0])
    parser.add_argument("--fast", action="store_true", help="only what the tests run")
    parser.add_argument("--torch", metavar="SITE-PACKAGES", action="append", default=[],
                        help="also with the torch there, and the same wheel if the Python is the same; repeatable")
    parser.add_argument("--wheel", type=Path, help="one that was built before, to save that time")
    parser.add_argument("--only", metavar="WORD", action="append", help="only rows so named; repeatable")
    options = parser.parse_args(argv)
    cases = [*FAST, *([] if options.fast else FULL), *map(with_torch, options.torch)]
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        matrix = Matrix(Path(folder).resolve(), wheel=options.wheel)
        for case in cases:
            if options.only and not any(word in case.name for word in options.only):
                continue
            start = time.monotonic()
            try:
                outcome = f"ok        {matrix.try_row(case)}"
            except NotHere as reason:
                outcome = f"not here  {reason}"
            except (AssertionError, subprocess.SubprocessError) as error:
                failed += 1
                outcome = f"FAILED    {error}"
            print(f"{case.name:<45}{time.monotonic() - start:>5.0f} s  {outcome}", flush=True)
    if not options.torch:
        print("another torch with the same wheel: not tried, name one with --torch")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
