"""PyTorch's own optimizer tests on FusedAccumAdamW: python -m tests.run_torch_suite PATH_TO_PYTORCH_CHECKOUT

test/test_optim.py of the checkout runs unchanged on the torch installed here; a checkout of the same version fits
best. Its decorators read the table of optimizers while it is imported, and by then ours is the only row. Exit codes:
0 all passed, 1 some failed, 2 nothing could be run.
"""

import argparse
import functools
import importlib
import json
import sys
import unittest
from pathlib import Path

import torch

from benchmarks.results import environment

WAY_OUT = "give the root of a PyTorch checkout, the folder that holds test/test_optim.py"


def checked(checkout: str) -> Path:
    """The test folder of the checkout; exits with the reason where there is none."""
    root = Path(checkout).resolve()
    file = root / "test" / "test_optim.py"
    if not file.is_file():
        what = "does not exist" if not root.exists() else f"has no {file.relative_to(root)}"
        raise SystemExit(f"{checkout} {what}: {WAY_OUT}")
    if "optim_db" not in file.read_text():
        raise SystemExit(
            f"{file} does not read optim_db, PyTorch's table of optimizers, so no other optimizer can take a row of "
            "it: give a checkout of PyTorch 2.3 or newer"
        )
    return file.parent


def load(folder: Path):
    """test_optim of the checkout, made with the table holding our optimizer alone."""
    from torch.testing._internal.common_optimizers import optim_db

    from .torch_optimizer_info import INFO

    optim_db[:] = [INFO]
    sys.path.insert(0, str(folder))
    return importlib.import_module("test_optim")


def as_adamw(test, cls: type):
    """``test`` while ``cls`` is called AdamW."""

    @functools.wraps(test)
    def run(self):
        name, cls.__name__ = cls.__name__, "AdamW"
        try:
            return test(self)
        finally:
            cls.__name__ = name

    return run


def tests_of(module, words: str) -> unittest.TestSuite:
    """The tests made from the table whose names hold ``words``; those that cannot apply are marked as skipped."""
    from .torch_optimizer_info import CANNOT_APPLY, INFO, RUNS_AS_ADAMW

    suite = unittest.TestSuite()
    for case in vars(module).values():
        if not (isinstance(case, type) and issubclass(case, unittest.TestCase)):
            continue
        for name in unittest.defaultTestLoader.getTestCaseNames(case):
            test, ours, _ = name.partition(f"_{INFO.name}_")
            if not ours or words not in name:
                continue
            if test in CANNOT_APPLY:
                setattr(case, name, unittest.skip(CANNOT_APPLY[test])(getattr(case, name)))
            elif test in RUNS_AS_ADAMW:
                setattr(case, name, as_adamw(getattr(case, name), INFO.optim_cls))
            suite.addTest(case(name))
    return suite


def record(row: dict, skipped: list) -> dict:
    """The counts, as the benchmarks' --json."""
    facts = environment(torch.device("cpu"), "auto")
    versions = {"torch": facts["torch"], "python": facts["python"], "date": facts["time"][:10]}
    reasons = {test._testMethodName: reason for test, reason in skipped}
    return {"benchmark": "torch_suite", "environment": facts, "rows": [{**row, **versions, "reasons": reasons}]}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.run_torch_suite", description=__doc__.splitlines()[0])
    parser.add_argument("checkout", help="root of a PyTorch checkout")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write environment, counts and skips")
    parser.add_argument("-k", default="", metavar="WORDS", help="only tests whose names hold these words")
    options = parser.parse_args()
    sys.argv[1:] = []  # PyTorch's harness reads them too
    try:
        folder = checked(options.checkout)
    except SystemExit as error:
        print(error, file=sys.stderr)
        return 2
    version = folder.parent / "version.txt"
    checkout = version.read_text().strip() if version.is_file() else "of unknown version"
    print(f"checkout: {checkout}, installed: torch {torch.__version__}")
    try:
        module = load(folder)
    except ModuleNotFoundError as error:
        print(f"{error}: PyTorch's test harness needs it; pip install -e '.[test]'", file=sys.stderr)
        return 2
    suite = tests_of(module, options.k)
    if not suite.countTestCases():
        print(f"no test of {folder / 'test_optim.py'} is made from the table", file=sys.stderr)
        return 2
    result = unittest.TextTestRunner(verbosity=0).run(suite)
    for test, reason in result.skipped:
        print(f"skipped {test._testMethodName}: {reason}")
    broken = len(result.failures) + len(result.errors)
    passed = result.testsRun - broken - len(result.skipped)
    print(f"{passed} passed, {broken} failed, {len(result.skipped)} skipped")
    if options.json:
        row = {"checkout": checkout, "passed": passed, "failed": broken, "skipped": len(result.skipped)}
        options.json.write_text(json.dumps(record(row, result.skipped), indent=1) + "\n")
    return int(broken > 0)


if __name__ == "__main__":
    raise SystemExit(main())
