"""The native sums of squares: the same bits on every instruction set, for any threads and any other parameters."""

import pytest
import torch
from cases import DTYPES
from harness import copies, micro_batches, parameters, run_window

from fused_accum import FusedAccumAdamW

_C = pytest.importorskip("fused_accum._C", reason="the native extension is not built")

SHAPES = [(0,), (1,), (15,), (16,), (17,), (1023,), (1024,), (1025,), (13, 17), (40_000,), (300_007,)]


@pytest.fixture(autouse=True)
def _restore_isa():
    isa = _C.cpu_isa()
    yield
    _C.use_cpu_isa(isa)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_bits_of_the_norm(dtype):
    start = parameters(*SHAPES, dtype=dtype)
    micros = micro_batches(start, [(0.3, None)] * 2)
    seen = {}
    for isa in [name for name, reason in _C.cpu_isas().items() if not reason]:
        _C.use_cpu_isa(isa)
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            opt = FusedAccumAdamW(copies(start), max_grad_norm=1e-3, backend="cpu")
            run_window(opt, micros)
            seen[isa, threads] = [opt._run.norms.value, *(float(n) for n in opt.grad_norms().values())]
    first = next(iter(seen.values()))
    assert all(found == first for found in seen.values())
    for i, (shape, norm) in enumerate(zip(SHAPES, first[1:])):  # alone, and from the gradient
        opt = FusedAccumAdamW(copies(start[i : i + 1]), max_grad_norm=1e-3, backend="cpu")
        run_window(opt, [type(m)([m.grads[i]], m.scale) for m in micros])
        assert [float(n) for n in opt.grad_norms().values()] == [norm], shape
