"""stochastic_rounding: unbiased, and nothing but seed, step, parameter and element decides."""

import math
from types import SimpleNamespace

import pytest
import torch
from cases import LAYOUT_SHAPE, LOW_PRECISION, PARAMETER_LAYOUTS
from harness import assert_names, assert_same_run, copies, parameter, parameters, params_of, values
from oracle import same_bits

from benchmarks.loops import MODES as LOOPS
from benchmarks.loops import begin
from fused_accum import FusedAccumAdamW, backends
from fused_accum.backends import rounding

pytestmark = pytest.mark.filterwarnings("error")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
MODES = [mode for mode in LOOPS if mode != "explicit"]
every_dtype = pytest.mark.parametrize("dtype", [DTYPES[name] for name in LOW_PRECISION], ids=LOW_PRECISION)


@pytest.fixture
def make(on):
    """FusedAccumAdamW on the backend under test; skips those that refuse stochastic rounding."""
    if not backends.registry()[on[0]].keeps_weights:
        pytest.skip(f"{on[0]} refuses stochastic rounding")
    if on[1] != "cpu":
        pytest.skip("these are CPU tensors; test_bits.py compares a GPU's with them")
    defaults = {"backend": on[0], "stochastic_rounding": True}
    return lambda params, **options: FusedAccumAdamW(params, **{**defaults, **options})


# Salmon et al.'s own known answers (Random123, kat_vectors): counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]  # fmt: skip


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_the_generator_is_philox(counter, key, result):
    words = rounding.philox([torch.tensor([c]) for c in counter], key)
    assert tuple(int(w) for w in words) == result


@every_dtype
def test_words_are_those_of_seed_step_parameter_and_element(make, dtype):
    """Every bit, by steps of exactly known size: from 0, with both betas 0 and eps = lr = 2^60, each adds g."""
    seed = 2**63 + 12345
    params = parameters((7,), (5000,), dtype=dtype)
    exactly = {"lr": 2.0**60, "eps": 2.0**60, "betas": (0.0, 0.0), "weight_decay": 0.0, "maximize": True}
    opt = make(params, rounding_seed=seed, **exactly)
    for step in range(1, 4):
        weights = [values(p.shape) for p in params]
        for p, w in zip(params, weights):
            torch.nn.init.zeros_(p)
            p.grad_dtype = None
            p.grad = w.clone()
        opt.step()
        for index, (p, w) in enumerate(zip(params, weights)):
            words = rounding.random_words(seed, step, index, p.numel(), p.device)
            assert same_bits(p, rounding.rounded_by_chance(w, words, dtype)), (step, index)


@every_dtype
def test_unbiased_over_a_million_elements(make, dtype):
    """The mean of the rounding error, in units of its own deviation, over many parts of a unit; subnormals too."""
    n = 1_000_000
    for magnitude in (1.0, 2.0**-14 if dtype == torch.float16 else 1e-3, 3e-7 if dtype == torch.float16 else 1e-38):
        x = (torch.rand(n, dtype=torch.float64) * magnitude * 3).float()
        words = rounding.random_words(7, 3, 1, n, torch.device("cpu"))
        rounded = rounding.rounded_by_chance(x, words, dtype)
        error = rounded.double() - x.double()
        sigma = error.square().sum().sqrt()
        assert abs(float(error.sum() / sigma)) < 3
        assert rounded.isfinite().all()


@every_dtype
def test_values_that_fit_stay(dtype):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    for words in (0, 2**31, 2**32 - 1):
        got = rounding.rounded_by_chance(every.float(), torch.full((2**16,), words), dtype)
        assert same_bits(got[~every.isnan()], every[~every.isnan()])
        assert got[every.isnan()].isnan().all()


@every_dtype
def test_rounds_to_a_neighbour(dtype):
    x = torch.cat([values((100_000,)), torch.randn(100_000) * 1e-6])
    words = rounding.random_words(1, 1, 0, x.numel(), torch.device("cpu"))
    got, nearest = rounding.rounded_by_chance(x, words, dtype), x.to(dtype)
    beyond = torch.where(x > nearest, math.inf, -math.inf).to(dtype)
    assert ((got == nearest) | (got == torch.nextafter(nearest, beyond))).all()
    assert 0.2 < (got != nearest).double().mean() < 0.3  # as far as a uniform remainder takes it


def run(make, params, windows=3, **options):
    opt = make(params, lr=0.1, weight_decay=0.3, **options)
    torch.manual_seed(5)
    for _ in range(windows):
        for k in range(3):
            for p in params:
                g = torch.randn(p.shape).to(p.dtype)
                p.grad = g
            opt.step(scale=0.25) if k == 2 else opt.accumulate(0.375)
    return opt


@every_dtype
def test_threads_and_repetition_do_not_matter(make, dtype):
    start = parameters((70_001,), (5,), (33, 77), dtype=dtype)
    results = []
    for threads in (1, 3, 1):
        torch.set_num_threads(threads)
        opt = run(make, copies(start))
        results.append([p.detach() for p in params_of(opt)])
    for other in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(results[0], other))


@every_dtype
def test_grouping_and_company_do_not_matter(make, dtype):
    """One group or three, beside parameters of other dtypes, with gradients or without: the place alone counts."""
    start = [*parameters((70,), (65,), dtype=dtype), *parameters((33,)), *parameters((129,), dtype=dtype)]
    grads = [[values(p.shape, p.dtype) for p in start] for _ in range(3)]
    found = []
    for split in (False, True):
        params = copies(start)
        groups = [{"params": params[:1]}, {"params": params[1:3]}, {"params": params[3:]}] if split else params
        opt = make(groups, lr=0.1)
        for gs in grads:
            for i, (p, g) in enumerate(zip(params, gs)):
                p.grad = None if split and i == 0 else g.clone()
            opt.step()
        found.append(params[1:])
    assert all(same_bits(p, q) for p, q in zip(*found))


@pytest.mark.parametrize("mode", MODES)
@every_dtype
def test_every_mode_has_the_same_bits(make, dtype, mode):
    found = []
    for how in ("explicit", mode):
        torch.manual_seed(6)
        model = torch.nn.Linear(6, 5).to(dtype)
        opt = make(model.parameters(), lr=0.1, rounding_seed=4)
        handle = begin(how, opt, model)
        for window in (1, 3, 2):
            for k in range(window):
                x, g = torch.randint(-3, 3, (1, 6)).float().exp2().to(dtype), values((1, 5), dtype)
                batch = SimpleNamespace(tokens=2**k, ends_window=k == window - 1)
                LOOPS[how](opt, (model(x) * g).sum(), batch)
        found.append((opt, handle))
    assert_same_run(found[0][0], found[1][0])


@every_dtype
def test_seed_matters(make, dtype):
    start = parameters((1000,), dtype=dtype)
    a, b = (run(make, copies(start), rounding_seed=seed) for seed in (0, 1))
    assert not torch.equal(params_of(a)[0], params_of(b)[0])


@pytest.mark.parametrize("layout", PARAMETER_LAYOUTS)
@every_dtype
def test_layout_in_memory_does_not_matter(make, dtype, layout):
    x = values(LAYOUT_SHAPE, dtype)
    one, other = (run(make, [parameter(x, name)]) for name in ("contiguous", layout))
    assert same_bits(params_of(one)[0], params_of(other)[0])


def test_other_dtypes_are_rounded_as_ever(make):
    params = [*parameters((65,)), *parameters((65,), dtype=torch.float64)]
    ours, plain = run(make, copies(params)), run(make, copies(params), stochastic_rounding=False)
    assert all(same_bits(p, q) for p, q in zip(params_of(ours), params_of(plain)))


@every_dtype
def test_step_in_backward(make, dtype):
    start = parameters((65,), (13, 17), dtype=dtype)
    explicit, inside = (make(copies(start), lr=0.3) for _ in range(2))
    for _ in range(3):
        factors = [values(p.shape, dtype) for p in start]
        for opt in (explicit, inside):
            loss = sum((p * f).sum() for p, f in zip(params_of(opt), factors))
            if opt is explicit:
                loss.backward()
                opt.step()
            else:
                with opt.step_in_backward():
                    loss.backward()
    assert all(same_bits(p, q) for p, q in zip(params_of(explicit), params_of(inside)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"master_weights": "fp32"}, ["stochastic_rounding", "master_weights='fp32'", "choose one"]),
        ({"master_weights": "split"}, ["stochastic_rounding", "master_weights='split'"]),
        ({"rounding_seed": -1}, ["rounding_seed", "-1", "2**64"]),
        ({"rounding_seed": 2**64}, ["rounding_seed", "2**64"]),
        ({"rounding_seed": 0.5}, ["rounding_seed", "0.5", "int"]),
    ],
)
def test_refused(options, words):
    with pytest.raises(ValueError, match="rounding") as caught:
        FusedAccumAdamW(parameters((3,)), stochastic_rounding=True, **options)
    assert_names(caught.value, words)


def test_master_weights_by_another_name_are_refused():
    with pytest.raises(ValueError, match=r"master_weights is 'bf16'.*'fp32'.*'split'"):
        FusedAccumAdamW(parameters((3,)), master_weights="bf16")
