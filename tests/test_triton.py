"""Backend "triton" without a GPU: in Triton's interpreter, under a driver that only notes, where it cannot run."""

import errno
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

if sys.platform != "linux":
    pytest.skip("there is no Triton but for Linux", allow_module_level=True)

import triton
from triton.runtime import build
from triton_mock import STREAM, MockDriver

from fused_accum import FusedAccumAdamW, backends
from fused_accum.backends import triton_probe

TESTS = Path(__file__).parent
BACKEND = backends.registry()["triton"]
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)

pytestmark = [
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="TRITON_INTERPRET is set: nothing is compiled"),
    pytest.mark.filterwarnings("ignore:fused_accum runs on its slow backend"),
]


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    path = os.pathsep.join(filter(None, [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, **environment}
    return subprocess.run([sys.executable, *arguments], env=env, cwd=TESTS, capture_output=True, text=True)


# ---- in the interpreter ----------------------------------------------------------------------------------

# Tests of all backends that reach every kernel and every way to it. All there are, which takes long (tests/ on
# PYTHONPATH): TRITON_INTERPRET=1 python -m pytest -p triton_interpreter -k "[triton"
SHARED = {
    "test_accumulate.py": (
        "buffers_hold_the_scaled_sum",
        "first_contribution_does_not_read_the_buffer",
        "nan_and_inf_arrive_in_the_buffer",
        "gradient_that_is_a_view_of_another_tensor_is_not_written",
        "conjugate_and_negative_views_are_read_as_they_look",
        "scale_and_weight_may_be_tensors",
        "empty_tensor_in_every_position",
    ),
    "test_dtypes.py": (
        "conversions_at_the_edges",
        "storing_rounds_to_nearest_even",
        "bf16_buffer_rounds_to_nearest_even_at_every_add",
        "mixed_dtypes_in_one_group",
        "gradient_dtype_may_change_within_a_window",
        "buffer_after_a_cast_between_windows",
    ),
    "test_layouts.py": (
        "many_dimensions",
        "moments_and_buffer_show_the_parameters_shape",
        "parameters_that_share_storage_are_updated_one_after_the_other",
        "neighbours_in_one_storage_do_not_touch_each_other",
        "data_swapped",
        "parameter_changes_layout_between_windows",
    ),
    "test_step.py": (
        "step_with_the_last_microbatch_equals_accumulate_then_step",
        "step_per_parameter",
        "groups_have_their_own_hyperparameters",
        "amsgrad_switched_on_and_off",
        "inference_mode",
        "versions_are_bumped",
    ),
}


def interpret(*arguments: str) -> None:
    common = ("-m", "pytest", "-q", "-x", "-p", "triton_interpreter", "-p", "no:cacheprovider")
    done = python(*common, *arguments, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


def test_bits_in_the_interpreter_are_those_of_the_cpu():
    interpret("triton_interpreted.py")


def test_kernel_tests_in_the_interpreter():
    interpret("-k", "[triton", *[f"{file}::test_{name}" for file, names in SHARED.items() for name in names])


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
        ("adamw_kernel", 1000),
    ]


def test_a_launch_per_bucket_of_equal_dtypes_and_flags(driver):
    params = parameters((5000,), (0,), (7,)) + parameters((2049,), dtype=torch.bfloat16)
    params += parameters((600,), (1,), dtype=torch.float64)
    opt = FusedAccumAdamW(params, backend="triton")
    run_window(opt, params)
    per_bucket = [5 + 1, 3, 2 + 1]  # blocks of 1024, of float64 512
    assert [launch.programs for launch in driver.launches] == per_bucket * 3
    assert {launch.stream for launch in driver.launches} == {STREAM}
    assert not any(launch.fp_fusion for launch in driver.launches)


def test_no_launch_without_elements(driver):
    params = parameters((0,), (3, 0))
    run_window(FusedAccumAdamW(params, backend="triton"), params)
    assert driver.launches == []


def test_misaligned_tensors_are_compiled_for_apart(driver):
    flat = torch.zeros(100)
    params = [torch.nn.Parameter(flat[:20]), torch.nn.Parameter(flat[21:41])]
    opt = FusedAccumAdamW(params, backend="triton")
    for p in params:
        p.grad = torch.ones(20)
    opt.step()
    assert [launch.programs for launch in driver.launches] == [1, 1]
    assert driver.loaded == ["adamw_kernel"] * 2


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
    assert warm == (3, 3)  # accumulate first and add, step with the last add
    assert len(driver.launches) == 150


def test_tables_are_sent_again_only_when_they_change(driver, monkeypatch):
    from fused_accum.backends import triton as module

    sent = []
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
    assert sent[before:] == [(1, 10)]  # the step's scalars alone


# ---- where it cannot run -----------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A machine that says it has a GPU; the first kernel is the compilation of a C module, as Triton's launcher."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(type(BACKEND), "_try", lambda self, device: compile_launcher())
    build._find_compiler.cache_clear()
    triton_probe._why_not_gpu.cache_clear()
    yield monkeypatch
    build._find_compiler.cache_clear()
    triton_probe._why_not_gpu.cache_clear()


def compile_launcher():
    source = """
        #include <Python.h>
        static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "launcher", 0, -1, 0};
        PyMODINIT_FUNC PyInit_launcher(void) { return PyModule_Create(&module); }
    """
    build.compile_module_from_src(source, "launcher")


def chosen_instead() -> str:
    """The reason for passing over triton; another backend was chosen, and says so too."""
    reason = BACKEND.why_not(GPU)
    backend, why = backends.choose("auto", GPU)
    assert backend.name == "reference"
    assert reason in why
    with pytest.raises(RuntimeError, match="triton"):
        backends.select("triton", GPU)
    return reason


def test_a_gpu_on_which_a_kernel_runs(gpu):
    assert BACKEND.why_not(GPU) is None
    assert backends.choose("auto", GPU)[0] is BACKEND


def test_no_gpu():
    if torch.accelerator.is_available():
        pytest.skip("there is one")
    assert "sees no cuda device" in chosen_instead()


def test_cpu_tensors():
    assert "it is for GPUs" in BACKEND.why_not(CPU)
    backend, why = backends.choose("auto", CPU)
    assert backend.name in ("cpu", "reference")
    assert "triton" not in why


def test_no_c_compiler(gpu, tmp_path):
    gpu.setenv("PATH", str(tmp_path))
    assert "install gcc or clang" in chosen_instead()


def test_compiler_that_does_not_exist(gpu):
    gpu.setenv("CC", "/nowhere/cc")
    assert "check the C compiler (CC)" in chosen_instead()


def test_no_python_header(gpu, tmp_path, capfd):
    real = sysconfig.get_paths
    gpu.setattr(sysconfig, "get_paths", lambda *a, **k: {**real(*a, **k), "include": str(tmp_path)})
    assert "python3-dev" in chosen_instead()


def test_cache_that_is_no_directory(gpu, tmp_path):
    (tmp_path / "file").write_text("")
    gpu.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    assert "set TRITON_CACHE_DIR" in chosen_instead()


def test_read_only_cache(gpu, tmp_path):
    """Root may write anywhere: the file system's answer is made up."""

    def refuse(path, *_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    gpu.setattr(triton.runtime.cache.os, "makedirs", refuse)
    reason = chosen_instead()
    assert "set TRITON_CACHE_DIR" in reason
    assert str(tmp_path / "cache") in reason


def test_old_gpu(gpu):
    gpu.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert "compute capability 7.5" in chosen_instead()


def test_failure_of_another_kind(gpu):
    def fail(self, device):
        raise RuntimeError("PassManager::run failed\nlong dump")

    gpu.setattr(type(BACKEND), "_try", fail)
    reason = chosen_instead()
    assert "PassManager::run failed" in reason
    assert "dump" not in reason


def test_triton_not_installed(gpu):
    gpu.setitem(sys.modules, "triton", None)
    assert "pip install triton" in chosen_instead()


def test_interpreter_on_a_gpu(gpu):
    gpu.setenv("TRITON_INTERPRET", "1")
    assert "unset it" in chosen_instead()


def test_a_gpu_is_tried_once(gpu):
    tried = []
    gpu.setattr(type(BACKEND), "_try", lambda self, device: tried.append(device))
    for _ in range(3):
        assert BACKEND.why_not(torch.device("cuda", 1)) is None
    assert tried == [torch.device("cuda", 1)]


def test_several_processes_at_once(tmp_path):
    """They fill one cache together; each compiles or finds every kernel."""
    script = (
        "import torch; from triton_mock import MockDriver; from test_triton import *\n"
        "with MockDriver() as driver:\n"
        "    compile_launcher()\n"
        "    BACKEND.accumulate([torch.ones(5)], [torch.ones(5)], [False], 2.0)\n"
        "    print(driver.loaded, driver.launches)\n"
    )
    path = os.pathsep.join(filter(None, [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "TRITON_CACHE_DIR": str(tmp_path)}
    running = [
        subprocess.Popen([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(3)
    ]
    outputs = [process.communicate() for process in running]
    assert [process.returncode for process in running] == [0] * 3, outputs
    assert len({output for output, _ in outputs}) == 1
    assert b"accumulate_kernel" in outputs[0][0]
    assert len(list(tmp_path.rglob("accumulate_kernel.cubin"))) == 1
