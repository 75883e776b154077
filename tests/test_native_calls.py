"""csrc/calls.h: what native functions do with arguments that are not theirs, and with references."""

import copy
import gc
import sys
import weakref

import pytest
import torch

from fused_accum import FusedAccumAdamW, _native
from fused_accum.backends.native import place_of

_C, _ = _native.load()
pytestmark = pytest.mark.skipif(_C is None, reason="the native module is not built here")
CPU = torch.device("cpu")
PRESENT = bytearray(1)


def table(params, **changed):
    given = {
        "params": params, "groups": [0] * len(params), "bump": torch._C._increment_version, "place": place_of(CPU),
        "indices": list(range(len(params))), "weights": 0, "seed": 0,
    }  # fmt: skip
    made = _C.Table(*(given | changed).values())
    for kind in (torch.Tensor, torch.nn.Parameter):
        made.accept(kind)
    return made


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda p: table(tuple(p)), TypeError, "list was expected, not tuple"),
        (lambda p: table(p, place="cpu"), TypeError, "Place was expected, not str"),
        (lambda p: table(p, groups=["a"]), TypeError, "int"),
        (lambda p: table(p, groups=7), TypeError, "a sequence was expected"),
        (lambda p: table(p, groups=[2**31]), OverflowError, "too large"),
        (lambda p: table(p, groups=[-(2**31) - 1]), OverflowError, "too large"),
        (lambda p: table(p, indices=[-1]), (OverflowError, TypeError), "negative"),
        (lambda p: table(p, seed=2**64), OverflowError, "too (big|large)"),
        (lambda p: table(p, groups=[]), IndexError, "range"),
        (lambda p: table(p, indices=[]), IndexError, "range"),
        (lambda p: table(p).collect([], bytearray(1), bytearray(1), False), IndexError, "out of range"),
        (lambda p: table(p).collect([None], [0], bytearray(1), False), TypeError, "bytearray was expected"),
        (lambda p: table(p).collect([None], bytearray(), bytearray(1), False), IndexError, "out of range"),
        (lambda p: table(p).collect([None], bytearray(1)), TypeError, "4 arguments expected, 2 given"),
        (lambda p: table(p).release(1), TypeError, "0 arguments expected, 1 given"),
        (lambda p: table(p).prepare([], [], bytearray(1)), TypeError, "dict was expected"),
        (lambda p: table(p).accumulate(PRESENT, "1", _C.Cpu(1), None, PRESENT, 0), TypeError, "real number"),
        (lambda p: table(p).accumulate(PRESENT, 1, None, None, PRESENT, 0), TypeError, "Executor of rows of"),
        (lambda p: _C.Hyper([1.0] * 7), TypeError, "tuple was expected"),
        (lambda p: _C.Hyper((1.0,)), IndexError, "range"),
        (lambda p: _C.Hyper((1.0, "x")), TypeError, "real number"),
        (lambda p: _C.Place(1, index=0), TypeError, "no keyword arguments"),
        (lambda p: _C.use_cpu_isa(1), TypeError, "str was expected, not int"),
        (lambda p: _C.same_objects([1], [1]), TypeError, "a list was expected"),
        (lambda p: _C.accumulate_lists(p, p, [], 1.0, _C.Cpu(1), place_of(CPU)), IndexError, "range"),
        (lambda p: _C.accumulate_lists([1], p, [True], 1.0, _C.Cpu(1), place_of(CPU)), ValueError, "accum 0 is not"),
    ],
)
def test_what_is_not_an_argument_is_refused(call, error, words):
    p = torch.nn.Parameter(torch.ones(5))
    count = sys.getrefcount(p)
    with pytest.raises(error, match=words):
        call([p])
    gc.collect()
    assert sys.getrefcount(p) == count
    assert torch.equal(p, torch.ones(5))


def test_same_objects_compares_lists_and_tuples_by_identity():
    a, b = object(), object()
    assert _C.same_objects([[a], (a, b)], [(a,), [a, b]])
    assert not _C.same_objects([[a]], [[b]])
    assert not _C.same_objects([[a]], [[a, b]])
    assert not _C.same_objects([[a]], [])


def test_no_reference_is_kept_or_lost():
    p = torch.nn.Parameter(torch.ones(5))
    accum, present, dtypes, stream = torch.zeros(5), bytearray(1), bytearray([0]), None
    kept = {"p": p, "accum": accum, "present": present, "increment_version": torch._C._increment_version}
    before = {name: sys.getrefcount(value) for name, value in kept.items()}
    types = {kind: sys.getrefcount(kind) for kind in (_C.Table, _C.Place, _C.Hyper, torch.nn.Parameter)}
    for _ in range(50):
        one = table([p])
        one.accept(type(p))
        p.grad = torch.ones(5)
        found, odd = one.collect([accum], present, dtypes, True)
        assert (found, odd) == (1, -1)
        assert one.gradients() == [0]
        gradient = weakref.ref(p.grad)
        one.accumulate(present, 1.0, _C.Cpu(2), stream, bytearray(1), 0)
        assert p.grad is None
        assert gradient() is None, "the table lets go of what it has added"
        assert one.sizes() == (1, 5)
        _C.Hyper((0.1, 0.9, 0.99, 1e-8, 0.1, False, False))
        present[0] = 0
    del one
    gc.collect()
    assert torch.equal(accum, torch.ones(5))
    assert {name: sys.getrefcount(value) for name, value in kept.items()} == before
    assert {kind: sys.getrefcount(kind) for kind in types} == types


def test_native_objects_are_not_copied():
    for one in (_C.Place(1, 0), table([]), _C.Hyper((0.1, 0.9, 0.99, 1e-8, 0.1, False, False))):
        with pytest.raises(TypeError):
            copy.deepcopy(one)


@pytest.mark.parametrize("mode", ["explicit", "in_backward"])
def test_an_optimizer_that_its_parameters_refer_to_is_collected(mode):
    """As with torch.optim, by the collector of cycles: native code owns references too."""
    gone = []
    for _ in range(3):
        p = torch.nn.Parameter(torch.ones(5))
        optimizer = FusedAccumAdamW([p], backend="cpu", lr=0.1)
        p.optimizer = optimizer
        if mode == "in_backward":
            optimizer.accumulate_in_backward()
        for _ in range(3):
            p.sum().backward()
            if mode == "explicit":
                optimizer.accumulate()
        optimizer.step()
        gone += [weakref.ref(optimizer), weakref.ref(optimizer._run)]
        del p, optimizer
    gc.collect()
    assert [one() for one in gone] == [None] * len(gone)
