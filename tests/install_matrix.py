"""Installs fused_accum in fresh environments, in every way, and sees what an import and a first use do there.

``python -m tests.install_matrix`` takes minutes, prints a table and exits with 1 where a row fails; the tests run
FAST, the rows that need nothing but one wheel. In every row the import says nothing and runs no compiler (whatever is
on PATH by such a name is replaced by a spy), and the first use says nothing, or one warning with the remedy.

Another torch, or a Python with it, takes part with --torch; --fetch VERSION installs that one for every Python, and
removes it after the row: gigabytes each. What cannot be had here is said to be "not obtainable".
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from benchmarks.results import environment
from tests.environments import (
    ROOT,
    build_sdist,
    build_wheel,
    extension,
    find_python,
    new_environment,
    packages,
    report,
    run,
)
from tests.install_cases import FAST, FULL, ONLY_REFERENCE, THIS, Case, with_fetched, with_torch
from tests.install_ways import WAYS, NotHere

COMPILERS = ("c++", "g++", "gcc", "cc", "clang", "clang++", "nvcc", "ptxas", "ninja", "make", "ld")
TESTS = ("test_exactness.py", "test_state.py")  # what a row tries beside the selftest


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


class Matrix:
    """Builds what rows need, once, in ``folder``; ``wheel`` and ``sdist`` where they exist already."""

    def __init__(self, folder: Path, sdist: Path | None = None, wheel: Path | None = None) -> None:
        self.folder, self.made = folder, 0
        self.wheels: dict[str, Path] = {}
        self.environments: dict[tuple, Path] = {}
        self.gigabytes: list[Path] = []  # environments not to be kept
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

    def fetch(self, case: Case, python: Path) -> None:
        """Installs the torch that the row asks for, from pip's index, and what the tests need."""
        words = (f"torch=={case.fetched}", "numpy", "pytest")
        try:
            run(sys.executable, "-m", "pip", "--python", python, "install", "--no-compile", *words, timeout=3600)
        except AssertionError as error:
            if "No matching distribution found for torch" not in str(error):
                raise
            raise NotHere(f"no torch {case.fetched} for Python {case.python}") from None

    def lend(self, case: Case) -> Path | None:
        """The site-packages to lend, or a folder of links to all of it but ``without``."""
        if case.lent == "" or case.fetched:
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
        key = (case.how, case.python, case.lent, case.fetched, case.without, *case.build.items())
        if key not in self.environments:
            folder = self.new_folder()
            python, _ = new_environment(folder, self.python(case.python), lent=self.lend(case))
            if case.fetched:
                self.gigabytes.append(folder)
                self.fetch(case, python)
            WAYS[case.how](self, case, python)
            self.environments[key] = python
        return self.environments[key]

    def try_row(self, case: Case) -> dict[str, Any]:
        """Installs and uses; returns the versions and what works there. Raises AssertionError, or NotHere."""
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
        tried = self.try_tests(python, where) if case.tried else []
        return {"python": facts["python"], "torch": facts["torch"], "works": sorted(works), "tried": tried}

    @staticmethod
    def try_tests(python: Path, where: Path) -> list[str]:
        """Runs the selftest, and the TESTS where there is a pytest; returns what passed."""
        run(python, "-m", "fused_accum", "selftest", cwd=where)
        if "None" in run(python, "-c", "import importlib.util as u; print(u.find_spec('pytest'))", cwd=where):
            return ["selftest"]
        shutil.copytree(ROOT / "tests", where / "tests")  # and not the package beside it
        words = ("-q", "-p", "no:cacheprovider", *(f"tests/{name}" for name in TESTS))
        output = run(python, "-m", "pytest", *words, cwd=where)
        return ["selftest", *re.findall(r"\d+ passed", output)]

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


def shown(row: dict[str, Any]) -> str:
    works = ", ".join(row["works"]) or "the report says what is missing"
    tried = f"; passed: {', '.join(row['tried'])}" if row["tried"] else ""
    return f"Python {row['python']}, torch {row['torch']}: {works}{tried}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.install_matrix", description=__doc__.splitlines()[0])
    parser.add_argument("--fast", action="store_true", help="only what the tests run")
    parser.add_argument("--torch", metavar="SITE-PACKAGES", action="append", default=[],
                        help="also with the torch there, and the same wheel if the Python is the same; repeatable")
    parser.add_argument("--fetch", metavar="VERSION", action="append", default=[],
                        help="also with that torch from the index, for every Python; gigabytes; repeatable")
    parser.add_argument("--wheel", type=Path, help="one that was built before, to save that time")
    parser.add_argument("--only", metavar="WORD", action="append", help="only rows so named; repeatable")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write environment and the rows that ran")
    options = parser.parse_args(argv)
    cases = [*FAST, *([] if options.fast else FULL), *map(with_torch, options.torch)]
    cases += [case for version in options.fetch for case in with_fetched(version)]
    facts = environment(torch.device("cpu"), "auto")
    rows, failed = [], 0
    with tempfile.TemporaryDirectory() as folder:
        matrix = Matrix(Path(folder).resolve(), wheel=options.wheel)
        for case in cases:
            if options.only and not any(word in case.name for word in options.only):
                continue
            start = time.monotonic()
            try:
                row = matrix.try_row(case)
                rows.append({"row": case.name, **row, "date": time.strftime("%Y-%m-%d")})
                outcome = f"ok  {shown(row)}"
            except NotHere as reason:
                outcome = f"not obtainable  {reason}"
            except (AssertionError, subprocess.SubprocessError) as error:
                failed += 1
                outcome = f"FAILED  {error}"
            while matrix.gigabytes:
                shutil.rmtree(matrix.gigabytes.pop())
            print(f"{case.name:<45}{time.monotonic() - start:>5.0f} s  {outcome}", flush=True)
            if options.json:  # a run cut short leaves what it has
                result = {"benchmark": "install", "environment": facts, "rows": rows}
                options.json.write_text(json.dumps(result, indent=1) + "\n")
    if not options.torch and not options.fetch:
        print("another torch with the same wheel: not tried, name one with --torch or --fetch")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
