"""The native CPU kernels give the same bits on every instruction set, thread count and chunking."""

import os
import subprocess
import sys
from fractions import Fraction
from itertools import pairwise

import numpy
import pytest
import torch
from cases import BEYOND_CACHE, DTYPES, GRADIENT_LAYOUTS, HYPER, LAYOUT_SHAPE, PARAMETER_LAYOUTS, SHAPES, WINDOWS
from harness import buffers, in_layout, micro_batches, parameter, parameters, run_checked, run_window, values
from oracle import Oracle, same_bits

from fused_accum import FusedAccumAdamW, backends

_C = pytest.importorskip("fused_accum._C", reason="the native extension is not built")
pytestmark = pytest.mark.filterwarnings("error")

ISAS = _C.cpu_isas()
USABLE = [name for name, reason in ISAS.items() if not reason]


@pytest.fixture(autouse=True)
def _restore_isa():
    isa = _C.cpu_isa()
    yield
    _C.use_cpu_isa(isa)


@pytest.fixture(params=ISAS)
def isa(request):
    """Each instruction set in turn; one that cannot run here is listed as skipped, with its reason."""
    if ISAS[request.param]:
        pytest.skip(f"{request.param} did not run: {ISAS[request.param]}")
    _C.use_cpu_isa(request.param)
    assert _C.cpu_isa() == request.param
    return request.param


def test_paths_that_really_run_here(record_property):
    """The end of a run lists them; the table must be complete and consistent with what can be chosen."""
    record_property("CPU paths that ran", ", ".join(USABLE))
    for name, reason in ISAS.items():
        if reason:
            record_property("CPU path that did not", f"{name}: {reason}")
    assert set(ISAS) == {"baseline", "avx2", "avx512"}
    assert ISAS["baseline"] == ""
    for name in ISAS:
        if name in USABLE:
            _C.use_cpu_isa(name)
            assert _C.cpu_isa() == name
        else:
            chosen = _C.cpu_isa()
            with pytest.raises(RuntimeError, match=name):
                _C.use_cpu_isa(name)
            assert _C.cpu_isa() == chosen
    with pytest.raises(RuntimeError, match="sse9"):
        _C.use_cpu_isa("sse9")


@pytest.mark.parametrize("name", [*ISAS, "nonsense"])
def test_environment_variable_forces_one(name):
    code = "from fused_accum import _C; print(_C.cpu_isa())"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "FUSED_ACCUM_CPU_ISA": name},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    if name in USABLE:
        assert done.stdout.strip() == name
    else:
        assert done.returncode != 0
        assert name in done.stderr
        assert "FUSED_ACCUM_CPU_ISA" in done.stderr


def bits_of_a_run(seed: int, build, windows=("mean-of-4", "N=1"), **options):
    """All results of some windows from a seed: parameters and state, in order."""
    torch.manual_seed(seed)
    params, micros_of = build()
    opt = FusedAccumAdamW(params, backend="cpu", **options)
    for window in windows:
        run_window(opt, micros_of(params, WINDOWS[window]))
    results = [p.detach().clone() for p in params]
    return results + [t.clone() for p in params for t in opt.state[p].values()]


def assert_same(runs):
    first, *others = runs
    for other in others:
        assert len(first) == len(other)
        for k, (a, b) in enumerate(zip(first, other)):
            assert same_bits(a, b), f"tensor {k} differs in {int((a != b).sum())} elements"


@pytest.mark.parametrize("hyper", HYPER.values(), ids=HYPER)
def test_oracle_on_each_path(isa, hyper):
    params = parameters(*(SHAPES[name] for name in ("one", "seven", "65", "matrix", "1025")))
    opt = FusedAccumAdamW(params, backend="cpu", **hyper)
    oracle = Oracle(opt)
    for _ in range(3):
        micros = micro_batches(params, WINDOWS["uneven"])
        run_checked(opt, oracle, micros)


def every_shape():
    return parameters(*SHAPES.values()), micro_batches


@pytest.mark.parametrize("hyper", HYPER.values(), ids=HYPER)
def test_paths_agree_for_every_equation(hyper):
    runs = []
    for isa in USABLE:
        _C.use_cpu_isa(isa)
        runs.append(bits_of_a_run(1, lambda: (parameters((4099,), (7,)), micro_batches), **hyper))
    assert_same(runs)


@pytest.mark.parametrize("accum_dtype", [torch.float32, torch.bfloat16], ids=["accum-fp32", "accum-bf16"])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, None], ids=["fp32", "bf16", "param"])
@pytest.mark.parametrize("grad", DTYPES.values(), ids=[f"grad-{name}" for name in DTYPES])
@pytest.mark.parametrize("param", DTYPES.values(), ids=[f"param-{name}" for name in DTYPES])
def test_paths_agree_for_every_dtype(param, grad, state_dtype, accum_dtype):
    def build():
        return parameters((1061,), (5,), dtype=param), lambda p, w: micro_batches(p, w, dtype=grad)

    runs = []
    for isa in USABLE:
        _C.use_cpu_isa(isa)
        runs.append(bits_of_a_run(2, build, lr=0.3, state_dtype=state_dtype, accum_dtype=accum_dtype))
    assert_same(runs)


@pytest.mark.parametrize("grad_layout", GRADIENT_LAYOUTS)
@pytest.mark.parametrize("param_layout", PARAMETER_LAYOUTS)
def test_paths_agree_for_every_layout_and_with_the_plain_one(param_layout, grad_layout):
    def build(layouts):
        def run():
            x = values(LAYOUT_SHAPE)
            micros_of = lambda p, w: _same_grads(p, w, grad_layout, plain=layouts is None)  # noqa: E731
            return [parameter(x, layouts or "contiguous")], micros_of

        return run

    runs = []
    for isa in USABLE:
        _C.use_cpu_isa(isa)
        runs += [bits_of_a_run(3, build(param_layout), lr=0.3), bits_of_a_run(3, build(None), lr=0.3)]
    assert_same(runs)


def _same_grads(params, window, layout, plain):
    """The values that `layout` shows, in that layout or contiguous."""
    micros = micro_batches(params, window)
    for micro in micros:
        shown = in_layout(micro.grads[0].contiguous(), layout)
        micro.grads[0] = shown.contiguous() if plain else shown
    return micros


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_thread_counts_agree(isa, threads):
    torch.set_num_threads(1)
    alone = bits_of_a_run(4, every_shape, lr=0.3, amsgrad=True)
    torch.set_num_threads(threads)
    assert_same([alone, bits_of_a_run(4, every_shape, lr=0.3, amsgrad=True)])


def test_repeated_runs_agree(isa):
    torch.set_num_threads(7)
    assert_same([bits_of_a_run(5, every_shape, lr=0.3) for _ in range(3)])


@pytest.mark.parametrize("n", [BEYOND_CACHE[0], 100_000])
@pytest.mark.parametrize("pieces", ["halves", "uneven", "tiny-between"])
def test_chunking_does_not_matter(isa, n, pieces):
    """The same elements as one parameter or as many: every element's result depends on its own inputs only."""
    cuts = {
        "halves": [0, n // 2, n],
        "uneven": [0, 1, 1, 32768, 32769, 65537, n - 7, n],
        "tiny-between": [0, *range(5, 600, 7), n // 3, n],
    }[pieces]

    def results(cuts):
        torch.manual_seed(6)
        flat = torch.randn(n)
        grads = [torch.randn(n) for _ in range(3)]
        params = [torch.nn.Parameter(flat[a:b].clone()) for a, b in pairwise(cuts)]
        opt = FusedAccumAdamW(params, backend="cpu", lr=0.3, weight_decay=0.3)
        for k, grad in enumerate(grads):
            for p, (a, b) in zip(params, pairwise(cuts)):
                p.grad = grad[a:b]
            (opt.step if k == 2 else opt.accumulate)(scale=1 / 3)
        return [torch.cat([p.detach() for p in params])] + [
            torch.cat([opt.state[p][name] for p in params]) for name in ("exp_avg", "exp_avg_sq")
        ]

    assert_same([results([0, n]), results(cuts)])


INF = float("inf")
SPECIAL = [0.0, -0.0, 1e-45, -1e-45, 1.1e-38, 1e-20, 3e38, -3e38, INF, -INF, float("nan"), 1.0, -1.5]


def nearest_float32(x: Fraction) -> float:
    """The float32 nearest to x, which must not be a tie."""
    near = numpy.float32(float(x))
    candidates = [numpy.nextafter(near, numpy.float32(side)) for side in (-numpy.inf, numpy.inf)] + [near]
    return float(min(candidates, key=lambda c: abs(Fraction(float(c)) - x)))


def test_fma_rounds_once_next_to_a_tie(isa):
    """a + s*g within 2^-70 of the middle between two floats: rounding first to double would decide it wrongly.

    Random inputs meet such a case about once in 2^29 additions."""
    one_less, one_more = 1 - 2.0**-23, 1 + 2.0**-23
    for scale in (one_less * 2.0**-24, one_more * 2.0**-24, one_more * 2.0**-23, one_less * 3 * 2.0**-24):
        rows = [
            (sign * a, other * g)
            for a in (1.0, one_more, 1 + 2.0**-22, 1.5, 2 - 2.0**-23)
            for g in (one_less, one_more, 1 - 2.0**-22, 1.0 + 2.0**-22)
            for sign in (1, -1)
            for other in (1, -1)
        ]
        start, grad = (torch.tensor(column, dtype=torch.float32) for column in zip(*rows))
        p = torch.nn.Parameter(torch.zeros(len(rows)))
        opt = FusedAccumAdamW([p], backend="cpu")
        for g, s in ((start, 1.0), (grad, scale)):
            p.grad = g.clone()
            opt.accumulate(s)
        exact = [Fraction(a) + Fraction(float(numpy.float32(scale))) * Fraction(g) for a, g in rows]
        assert buffers(opt)[0].tolist() == [nearest_float32(x) for x in exact]


def test_paths_agree_on_special_values():
    """Signed zeros, subnormals, overflow, infinities, NaN: in every operand and pairing (NaN payloads aside)."""
    a, b, c = (x.flatten() for x in torch.meshgrid(*[torch.tensor(SPECIAL)] * 3, indexing="ij"))
    runs = []
    for isa in USABLE:
        _C.use_cpu_isa(isa)
        p = torch.nn.Parameter(a.clone())
        opt = FusedAccumAdamW([p], backend="cpu", lr=0.5, amsgrad=True)
        for grads in ([b, c], [c], [a, b, c]):
            for k, g in enumerate(grads):
                p.grad = g.clone()
                (opt.step if k == len(grads) - 1 else opt.accumulate)(scale=1 / len(grads))
        runs.append([torch.nan_to_num(t, nan=12345.0) for t in (p.detach(), *opt.state[p].values())])
    assert_same(runs)
    assert runs[0][0].isfinite().any()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_conversion_of_every_pattern_agrees(dtype):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(DTYPES[dtype])
    fine = torch.arange(0, 2**32, 65_521).to(torch.int32).view(torch.float32)  # all exponents, many mantissas
    runs = []
    for isa in USABLE:
        _C.use_cpu_isa(isa)
        run = []
        for p, g in ((torch.zeros_like(every), every), (fine.to(DTYPES[dtype]), fine)):
            p = torch.nn.Parameter(p)
            p.grad_dtype = None
            opt = FusedAccumAdamW([p], backend="cpu", lr=0.5, state_dtype=None)
            for _ in range(2):
                p.grad = g
                opt.step()
            run += [torch.nan_to_num(t.float(), nan=12345.0) for t in (p.detach(), *opt.state[p].values())]
        runs.append(run)
    assert_same(runs)


def test_flush_to_zero_is_the_callers(isa):
    """torch.set_flush_denormal in the calling thread holds on the workers too, so threads do not change results."""
    torch.set_num_threads(7)
    bits_of_a_run(7, lambda: (parameters((300_000,)), micro_batches))  # starts the workers, in the ordinary mode
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no such mode")
    try:
        runs = []
        for threads in (1, 7):
            torch.set_num_threads(threads)
            torch.manual_seed(7)
            p = torch.nn.Parameter(torch.randn(300_000) * 1e-38)
            opt = FusedAccumAdamW([p], backend="cpu", lr=1e-38)
            for _ in range(2):
                p.grad = torch.randn(300_000) * 1e-19
                opt.step()
            runs.append([p.detach(), *opt.state[p].values()])
        assert_same(runs)
    finally:
        torch.set_flush_denormal(False)


def test_large_first_writes(isa):
    """Beyond the last-level cache first contributions are written past it; same values, every alignment."""
    torch.manual_seed(8)
    n = 5_000_011
    source = torch.randn(n + 8)
    for offset in (0, 3):
        grad = source[offset : offset + n]
        p = torch.nn.Parameter(torch.zeros(n))
        opt = FusedAccumAdamW([p], backend="cpu", lr=1.0, betas=(0.0, 0.0), eps=2.0**40, weight_decay=0.0)
        for _ in range(2):
            p.grad = grad
            opt.accumulate(2.0)
            p.grad = torch.zeros_like(p)
            opt.step()
            assert torch.equal(opt.state[p]["exp_avg"], 2 * grad)


def test_auto_takes_the_native_backend_where_it_works():
    row = FusedAccumAdamW(parameters((3,))).backends[0]
    assert row.backend == "cpu"
    assert backends.registry()["cpu"].why_not(torch.device("cpu")) is None
