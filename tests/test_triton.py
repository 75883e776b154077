"""Backend "triton" without a GPU: in Triton's interpreter, and under a driver that only notes."""

import os
import subprocess
import sys
from pathlib import Path

import kernel_tests
import pytest
import torch

if sys.platform != "linux":
    pytest.skip("there is no Triton but for Linux", allow_module_level=True)

import triton
from triton_mock import STREAM, MockDriver

from fused_accum import FusedAccumAdamW, backends

TESTS = Path(__file__).parent
BACKEND = backends.registry()["triton"]
CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="TRITON_INTERPRET is set: nothing is compiled")


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    path = os.pathsep.join(filter(None, [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, **environment}
    return subprocess.run([sys.executable, *arguments], env=env, cwd=TESTS, capture_output=True, text=True)


# ---- in the interpreter ----------------------------------------------------------------------------------


def interpret(*arguments: str) -> None:
    common = ("-m", "pytest", "-q", "-x", "-p", "triton_interpreter", "-p", "no:cacheprovider")
    done = python(*common, *arguments, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


@pytest.mark.slow
def test_bits_in_the_interpreter_are_those_of_the_cpu():
    """But for norms, which have a test of their own, and hundreds of tensors in a call, which take it a minute."""
    interpret("test_bits.py", "-k", "not sums_of_squares and not (many_tensors and (454 or 455 or 1000))")


@pytest.mark.slow
def test_indices_norms_and_scatter_in_the_interpreter():
    interpret("triton_interpreted.py")


def test_decisions_on_the_device_in_the_interpreter():
    interpret("emulated_decisions.py")


@pytest.mark.slow
def test_kernel_tests_in_the_interpreter():
    """Those of all backends. All there are, which takes long (tests/ on PYTHONPATH): TRITON_INTERPRET=1 python -m
    pytest -p triton_interpreter -k "[triton"."""
    interpret("-k", "[triton", *kernel_tests.found())


@pytest.mark.slow
def test_precision_in_the_interpreter():
    """Master weights, stochastic rounding, clipping and skipping, direct gradients."""
    interpret("-k", "[triton", *kernel_tests.found(kernel_tests.PRECISION))


def test_the_interpreter_is_used_only_when_asked_for():
    script = (
        "import torch; from fused_accum import backends as b; from fused_accum import FusedAccumAdamW as A\n"
        "p = torch.nn.Parameter(torch.ones(3))\n"
        "print(b.select('triton', 'cpu').name, A([p]).backends[0].backend, A([p], backend='triton').backends[0])"
    )
    done = python("-c", script, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    asked, auto, row = done.stdout.split(maxsplit=2)
    assert (asked, auto) == ("triton", "cpu" if backends.registry()["cpu"].why_not(CPU) is None else "reference")
    assert "triton" in row


# ---- launches and compilations, under a driver that only notes -----------------------------------------


@pytest.fixture
def driver(monkeypatch, tmp_path):
    """The mock driver, for CPU tensors through the registry; every kernel compiles anew."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(type(BACKEND), "why_not", lambda self, device: None)
    with MockDriver() as driver:
        yield driver


def run_window(opt, params, scale=1.0, weight=None):
    for _ in range(2):
        for p in params:
            p.grad = torch.ones_like(p)
        opt.accumulate(scale, weight=weight)
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step(scale=scale, weight=weight)


def parameters(*shapes, dtype=torch.float32):
    return [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]


def test_many_small_tensors_are_one_launch(driver):
    """1000 tensors of 64 elements: a launch per call, not per tensor."""
    params = parameters(*[(64,)] * 1000)
    run_window(FusedAccumAdamW(params, backend="triton"), params)
    assert [(launch.kernel, launch.programs) for launch in driver.launches] == [
        ("accumulate_kernel", 1000),
        ("accumulate_kernel", 1000),
        ("count_kernel", 32),
        ("adamw_kernel", 1000),
    ]


def test_a_launch_per_bucket_of_equal_dtypes_and_flags(driver):
    params = parameters((5000,), (0,), (7,)) + parameters((2049,), dtype=torch.bfloat16)
    params += parameters((600,), (1,), dtype=torch.float64)
    opt = FusedAccumAdamW(params, backend="triton")
    run_window(opt, params)
    per_bucket = [5 + 1, 3, 2 + 1]  # blocks of 1024, of float64 512
    assert [launch.programs for launch in driver.launches] == [*per_bucket * 2, 1, *per_bucket]
    assert {launch.stream for launch in driver.launches} == {STREAM}
    assert not any(launch.fp_fusion for launch in driver.launches)


def test_without_elements_updates_are_counted(driver):
    params = parameters((0,), (3, 0))
    run_window(FusedAccumAdamW(params, backend="triton"), params)
    assert [launch.kernel for launch in driver.launches] == ["count_kernel"]


def test_misaligned_tensors_are_compiled_for_apart(driver):
    flat = torch.zeros(100)
    params = [torch.nn.Parameter(flat[:20]), torch.nn.Parameter(flat[21:41])]
    opt = FusedAccumAdamW(params, backend="triton")
    for p in params:
        p.grad = torch.ones(20)
    opt.step()
    assert [launch.programs for launch in driver.launches] == [1, 1, 1]
    assert driver.loaded == ["count_kernel", "adamw_kernel", "adamw_kernel"]


@pytest.mark.filterwarnings("ignore:the scales of this window")
def test_nothing_recompiles_when_numbers_change(driver, tmp_path):
    """lr, betas, eps, decay, step, scale, weight, sizes, addresses: 50 windows, the kernels of the first."""
    warm = None
    for n in range(50):
        if n % 10 == 0:  # other sizes: 1, below and above a block, divisible by 16 or not, other row counts
            sizes = [(1,), (16, 17), (4096,), (16,), (1025,)][: 1 + n // 10]
            params = parameters(*sizes)
            opt = FusedAccumAdamW(params, backend="triton")
        group = opt.param_groups[0]
        betas = (0.5 + n / 200, 1 - 1 / (n + 2))
        group.update(lr=[1, 16, 0.1, 0.0][n % 4], betas=betas, eps=10.0**-n, weight_decay=n % 3)
        run_window(opt, params, scale=[1, 16, 0.3][n % 3], weight=[None, 16, 1, 5.5][n % 4])
        compiled = (len(driver.loaded), len(list(tmp_path.rglob("*.cubin"))))
        warm = warm or compiled
        assert compiled == warm
    assert warm == (4, 4)  # accumulate first and add, count, step with the last add
    assert len(driver.launches) == 200


@pytest.mark.parametrize(
    ("options", "kernels"),
    [
        # updated from the gradient; begun, updated from the buffer
        ({"stochastic_rounding": True}, ["accumulate_kernel"] + ["adamw_kernel"] * 2 + ["count_kernel"]),
        # the same, but the gradient of a window of one is measured before
        (
            {"master_weights": "split", "max_grad_norm": 1.0},
            ["accumulate_kernel"] * 2 + ["adamw_kernel"] * 2 + ["count_kernel", "squares_kernel"],
        ),
    ],
    ids=["chance", "split, clipped"],
)
@pytest.mark.filterwarnings("ignore:the scales of this window")
def test_nothing_recompiles_with_masters_chance_and_clipping(driver, monkeypatch, options, kernels):
    """When seed, step, norm, factors, scale, lr, sizes and places in the optimizer change."""
    from fused_accum import skipping

    monkeypatch.setattr(skipping, "on_host", lambda *_: False)
    warm = None
    for n in range(12):
        if n % 4 == 0:
            params = parameters(*[(1,), (16, 17), (1025,)][: 1 + n // 4], dtype=torch.bfloat16)
        changing = {"rounding_seed": [0, 1, 16, 2**64 - 1][n % 4], "max_grad_norm": [1, 16, 0.3][n % 3]}
        changed = {name: value for name, value in changing.items() if name in {*options, "rounding_seed"}}
        opt = FusedAccumAdamW(params, lr=[1, 16, 0.1][n % 3], backend="triton", **{**options, **changed})
        for folded in (True, False):
            for p in params:
                p.grad = torch.ones_like(p)
            if folded:
                opt.step(scale=n + 1)
            else:
                opt.accumulate([1, 16, 0.3][n % 3])
                opt.step()
        warm = warm or list(driver.loaded)
        assert driver.loaded == warm
    assert sorted(warm) == sorted(kernels)


def test_the_scatter_is_one_launch_and_one_compilation(driver):
    for n, tokens in enumerate((1, 16, 300)):
        accum, grad = torch.zeros(1000 + n, 768), torch.ones(tokens, 768)
        BACKEND.scatter_rows(accum, torch.arange(tokens), grad, [None, 1, 16][n])
        assert driver.launches[-1].programs == tokens
        BACKEND.scatter_rows(accum, torch.arange(tokens), torch.ones(tokens, 768, dtype=torch.bfloat16), None)
    assert driver.loaded == ["scatter_kernel"] * 2
    assert len(driver.launches) == 6


def test_tables_are_sent_again_only_when_they_change(driver, monkeypatch):
    from fused_accum.backends import triton, triton_prologue, triton_tables

    sent = []
    for module in (triton, triton_prologue, triton_tables):
        monkeypatch.setattr(module, "upload", lambda host, device: sent.append(tuple(host.shape)) or host)
    params = parameters((64,), (64,))
    opt = FusedAccumAdamW(params, lr=0.1, backend="triton")
    grads = [torch.ones(64), torch.ones(64)]
    for _ in range(6):
        for _ in range(2):
            for p, g in zip(params, grads):
                p.grad = g
            opt.accumulate(0.123)
        before = len(sent)
        opt.step()
    assert sent[before:] == []
