"""Backend.add_product: the weight gradient of a linear layer, added into its buffer by a GEMM of our own."""

import pytest
import torch
from cases import DTYPES
from oracle import rms, same_bits

from fused_accum import _native, backends, direct_ops

_C, _ = _native.load()
SHAPES = [(1, 1), (7, 5), (48, 16), (49, 33), (300, 70), (2100, 9)]
TOKENS = [1, 2, 63, 64, 255, 256, 257, 600]


@pytest.fixture
def product(on):
    return backends.registry()[on[0]].add_product


def operands(rows, columns, tokens, device, dtype=torch.float32):
    left, right = torch.randn(tokens, rows, device=device), torch.randn(tokens, columns, device=device)
    return torch.randn(rows, columns, device=device), left.to(dtype), right.to(dtype)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_against_float64(product, device, shape, tokens, first):
    buffer, left, right = operands(*shape, tokens, device)
    exact = left.double().t() @ right.double() + (0 if first else buffer.double())
    if first:
        buffer.fill_(float("nan"))  # it must not be read
    product(buffer, left, right, first)
    torch.testing.assert_close(buffer.double(), exact, rtol=1e-5, atol=1e-6 * tokens**0.5 * 4)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("buffer_dtype", ["fp32", "fp64", "bf16"])
def test_dtypes_and_layouts(product, device, dtype, buffer_dtype, transposed):
    """Rows with gaps, or one gradient for all tokens; a column-major buffer, as of a transposed weight."""
    buffer, left, right = operands(301, 40, 75, device, DTYPES[dtype])
    if (buffer_dtype, dtype) in {("fp64", "bf16"), ("fp64", "fp16"), ("bf16", "fp16")}:
        pytest.skip("no layer computes so")
    buffer = buffer.to(DTYPES[buffer_dtype])
    wide = torch.cat([left, left], 1)[:, 7 : 7 + 301]
    for rows in (left, wide, left[:1].expand_as(left)):
        total = buffer.t().contiguous().t() if transposed else buffer.clone()
        exact = rows.double().t() @ right.double() + total.double()
        product(total, rows, right, False)
        tolerance = 0.3 if buffer_dtype == "bf16" else 1e-4
        torch.testing.assert_close(total.double(), exact, rtol=tolerance / 10, atol=tolerance)


@pytest.mark.skipif(_C is None, reason="the native extension is not built")
class TestNative:
    @pytest.fixture(autouse=True)
    def each(self):
        isa = _C.cpu_isa()
        yield
        _C.use_cpu_isa(isa)

    def usable(self):
        for isa, reason in _C.cpu_isas().items():
            if not reason:
                _C.use_cpu_isa(isa)
                if _C.has_product():
                    yield isa

    def test_which_instruction_sets_have_it(self):
        usable = [isa for isa, reason in _C.cpu_isas().items() if not reason]
        assert list(self.usable()) == [isa for isa in usable if isa != "baseline"]

    @pytest.mark.parametrize("first", [False, True])
    @pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
    @pytest.mark.parametrize("shape", [(97, 33, 20), (48, 512, 300), (5, 1000, 7)], ids=str)
    def test_same_bits_on_any_instruction_set_and_threads(self, shape, dtype, first):
        start, left, right = operands(*shape, "cpu", DTYPES[dtype])
        results = []
        for _ in self.usable():
            for threads in (1, 2, 3, 7):
                buffer = start.clone()
                assert _C.add_product(buffer, left, right, first, threads)
                results.append(buffer)
        assert all(same_bits(results[0], other) for other in results[1:])

    @pytest.mark.parametrize("tokens", [16, 64, 256, 1000])
    def test_no_less_exact_than_the_blas(self, tokens):
        """Over the micro-batches of a window, as in training."""
        for _ in self.usable():
            totals = torch.zeros(2, 768, 96)
            exact = torch.zeros(768, 96, dtype=torch.float64)
            for k in range(4):
                _, left, right = operands(768, 96, tokens, "cpu")
                exact += left.double().t() @ right.double()
                assert _C.add_product(totals[0], left, right, k == 0, 2)
                direct_ops.add_product(totals[1], left, right, k == 0)
            own, blas = (rms(total, exact) for total in totals)
            assert own <= 1.02 * blas

    def test_special_values_are_the_products(self):
        for _ in self.usable():
            left = torch.tensor([[1.0, 0.0, float("inf"), 2.0, float("nan")]])
            right = torch.tensor([[1.0, float("inf"), -1.0]])
            buffer = torch.zeros(5, 3)
            assert _C.add_product(buffer, left, right, True, 1)
            torch.testing.assert_close(buffer, left.t() * right, rtol=0, atol=0, equal_nan=True)

    def test_what_it_does_not_take_is_left_as_it_was(self):
        buffer, left, right = operands(60, 20, 8, "cpu")
        refused = {
            "dtypes": (buffer, left.bfloat16(), right),
            "float64": (buffer.double(), left.double(), right.double()),
            "float64 operands": (buffer, left.double(), right.double()),
            "a buffer with gaps": (torch.zeros(60, 40)[:, ::2], left, right),
            "a column-major buffer": (torch.zeros(20, 60).t(), left, right),
            "columns apart": (buffer, torch.zeros(60, 8).t(), right),
            "tokens": (buffer, left[:5], right),
            "no tokens": (buffer, left[:0], right[:0]),
            "rows": (buffer, left[:, :9], right),
            "columns": (buffer, left, right[:, :9]),
            "one dimension": (buffer, left[0], right[0]),
        }
        for what, (b, *others) in refused.items():
            before = b.clone()
            assert not _C.add_product(b, *others, True, 2), what
            assert same_bits(b, before), what

    @pytest.mark.parametrize("rows", [256, 255])
    def test_what_it_packs_is_at_most_a_quarter_of_the_buffer(self, monkeypatch, rows):
        buffer, left, right = operands(rows, 20, 64, "cpu")
        native = []

        class Recording:
            has_product = staticmethod(_C.has_product)
            TERM_TOKENS = _C.TERM_TOKENS

            @staticmethod
            def add_product(*args):
                native.append(args)
                return _C.add_product(*args)

        cpu = backends.registry()["cpu"]
        monkeypatch.setattr("fused_accum.backends.cpu._C", Recording)
        cpu.add_product(buffer, left, right, True)
        assert bool(native) == (rows == 256 and _C.has_product())
        torch.testing.assert_close(buffer, left.t() @ right, rtol=1e-4, atol=1e-4)
