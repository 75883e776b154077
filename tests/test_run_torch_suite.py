"""run_torch_suite.py on a small checkout made after PyTorch's layout; the real one is for those who have it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from run_torch_suite import checked

pytest.importorskip("expecttest", reason="PyTorch's test harness needs it: pip install -e '.[test]'")

ROOT = Path(__file__).resolve().parent.parent

TEST_OPTIM = '''
from optim.test_other import TestOther  # of no optimizer's table

import torch
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_optimizers import optim_db, optims
from torch.testing._internal.common_utils import TestCase

NAMES = [info.optim_cls.__name__ for info in optim_db]


class TestOptimRenewed(TestCase):
    @optims(optim_db, dtypes=[torch.float32, torch.float64])
    def test_step_moves(self, device, dtype, optim_info):
        for input in optim_info.optim_inputs_func(device=device):
            p = torch.ones(3, device=device, dtype=dtype)
            p.grad = torch.ones_like(p)
            optim_info.optim_cls([p], **input.kwargs).step()
            assert NAMES == ["FusedAccumAdamW"]
            self.assertNotEqual(p, torch.ones_like(p))

    @optims(optim_db, dtypes=[torch.float32])
    def test_step_is_noop_for_zero_grads(self, device, dtype, optim_info):
        assert optim_info.optim_cls.__name__ == "AdamW"

    @optims(optim_db, dtypes=[torch.float32])
    def test_grads_are_never_inplaced_into(self, device, dtype, optim_info):
        raise AssertionError("cannot apply")

    @optims([info for info in optim_db if info.supports_complex], dtypes=[torch.complex64])
    def test_complex(self, device, dtype, optim_info):
        raise AssertionError("not made")

    @optims(optim_db, dtypes=[torch.float32])
    def test_that_fails(self, device, dtype, optim_info):
        assert optim_info.optim_cls.__name__ == "SGD"


instantiate_device_type_tests(TestOptimRenewed, globals(), only_for="cpu")
'''
TEST_OTHER = '''
import unittest


class TestOther(unittest.TestCase):
    def test_other(self):
        raise AssertionError("not run")
'''


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    root = tmp_path_factory.mktemp("pytorch")
    (root / "test" / "optim").mkdir(parents=True)
    (root / "version.txt").write_text("2.99.0a0\n")
    (root / "test" / "test_optim.py").write_text(TEST_OPTIM)
    (root / "test" / "optim" / "test_other.py").write_text(TEST_OTHER)
    return root


def run(*arguments) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.run_torch_suite", *map(str, arguments)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_suite_of_a_checkout(checkout, tmp_path):
    """Only the table's tests, on our class alone; what cannot apply is skipped with its reason."""
    file = tmp_path / "record.json"
    code, said = run(checkout, "--json", file)
    assert code == 1, said
    assert "checkout: 2.99.0a0, installed: torch" in said
    assert "FAIL: test_that_fails_FusedAccumAdamW_cpu_float32" in said
    assert "skipped test_grads_are_never_inplaced_into_FusedAccumAdamW_cpu_float32: reads p.grad after step()" in said
    assert "3 passed, 1 failed, 1 skipped" in said.splitlines()
    (row,) = json.loads(file.read_text())["rows"]
    assert row["checkout"] == "2.99.0a0"
    assert [row[key] for key in ("passed", "failed", "skipped")] == [3, 1, 1]
    assert list(row["reasons"]) == ["test_grads_are_never_inplaced_into_FusedAccumAdamW_cpu_float32"]


def test_part_of_a_suite(checkout):
    code, said = run(checkout, "-k", "step_moves")
    assert code == 0, said
    assert "2 passed, 0 failed, 0 skipped" in said.splitlines()


@pytest.mark.parametrize(("path", "text", "words"), [
    ("gone", None, r"gone does not exist: give the root of a PyTorch checkout"),
    (".", None, r"has no test/test_optim.py: give the root of a PyTorch checkout"),
    (".", "import torch\n", r"does not read optim_db.*PyTorch 2.3 or newer"),
])  # fmt: skip
def test_what_is_no_checkout(tmp_path, path, text, words):
    if text is not None:
        (tmp_path / "test").mkdir()
        (tmp_path / "test" / "test_optim.py").write_text(text)
    with pytest.raises(SystemExit, match=words):
        checked(str(tmp_path / path))


def test_wrong_path_ends_with_two(tmp_path):
    code, said = run(tmp_path)
    assert code == 2
    assert "give the root of a PyTorch checkout" in said
