"""A state_dict() that fails half-way leaves nothing behind; one that is not whole is not loaded at all."""

import copy
import sys

import pytest
import torch
from cases import WINDOWS
from harness import assert_same_run, copies, feed, micro_batches, mid_window_state, parameters, run_window
from oracle import same_bits

from fused_accum import checkpoint

pytestmark = pytest.mark.filterwarnings("error")
LARGE = {"lr": 0.5, "weight_decay": 0.3}
SHAPES = ((7,), (3, 5), (), (2,))


def half_way(make, device, absent=(), **options):
    """An optimizer after a window, with two micro-batches of the next, and the parameters' later micro-batches. The
    last parameter has no part in any window."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(p.detach()) for p in parameters(*SHAPES, device=device)]
    opt = make(list(zip("abcd", params)), **LARGE, **options)
    never = {(k, 3) for k in range(3)}
    run_window(opt, micro_batches(params, WINDOWS["tokens-scaled"], absent=never))
    micros = micro_batches(params, WINDOWS["tokens-scaled"], absent=never | set(absent))
    for micro in micros[:2]:
        feed(opt, micro)
    return params, opt, micros[2:]


def contents(opt):
    """All keys and all tensors of the live state, by name, and the groups."""
    state = {(n, key): value for n, own in enumerate(opt.state.values()) for key, value in own.items()}
    return state, [{key: group[key] for key in group if key != "params"} for group in opt.param_groups]


# -- saving ------------------------------------------------------------------------------------------------------


def unharmed(opt, twin, rest):
    """``opt``, whose state_dict failed, is what its twin is: now, between windows, and in a later checkpoint."""
    (state, groups), (expected, expected_groups) = contents(opt), contents(twin)
    assert state.keys() == expected.keys()
    assert groups == expected_groups
    for o in (opt, twin):
        for micro in rest:
            feed(o, micro)
        o.step()
    assert_same_run(opt, twin)
    saved = opt.state_dict()
    assert not any("accum" in own for own in saved["state"].values())
    assert not any(key.startswith("accum") for group in saved["param_groups"] for key in group)


def test_memory_that_runs_out_while_sums_are_copied(make, device, monkeypatch):
    _, opt, rest = half_way(make, device)
    twin = copy.deepcopy(opt)
    real, calls = checkpoint._saved, []

    def out_of_memory(*args):
        calls.append(args)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("no memory for the third sum")
        return real(*args)

    monkeypatch.setattr(checkpoint, "_saved", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError, match="third"):
        opt.state_dict()
    monkeypatch.undo()
    unharmed(opt, twin, rest)


def test_an_interrupt_at_any_line_of_state_dict(make, device):
    """Ctrl-C between any two lines of checkpoint.py."""
    _, opt, rest = half_way(make, device)
    twin = copy.deepcopy(opt)
    mid_window_state(opt)  # which warns once
    before = contents(opt)

    class Interrupt:
        def __init__(self, at):
            self.left = at

        def __call__(self, frame, event, arg):
            if frame.f_code.co_filename != checkpoint.__file__:
                return None
            if event == "line":
                self.left -= 1
                if not self.left:
                    raise KeyboardInterrupt
            return self

    for at in range(1, 1000):
        was, interrupt = sys.gettrace(), Interrupt(at)
        sys.settrace(interrupt)
        try:
            opt.state_dict()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(was)
        state, groups = contents(opt)
        assert state.keys() == before[0].keys()
        assert all(state[key] is before[0][key] for key in state)
        assert groups == before[1]
        if interrupt.left > 0:
            break
    assert 30 < at < 1000
    unharmed(opt, twin, rest)


def test_hooks_of_state_dict_see_the_optimizer_and_the_window(make, device):
    """In what is saved, never in the optimizer's own state."""
    _, opt, _ = half_way(make, device)
    seen = []

    def after(one, saved):
        seen.append((one is opt, "accum" in saved["state"][0], any("accum" in own for own in opt.state.values())))
        return {**saved, "extra": 1}

    opt.register_state_dict_pre_hook(lambda one: seen.append(one is opt))
    opt.register_state_dict_post_hook(after)
    assert mid_window_state(opt)["extra"] == 1
    assert seen == [True, (True, True, False)]


# -- loading -----------------------------------------------------------------------------------------------------


def remove_sums(saved):
    for own in saved["state"].values():
        del own["accum"]


def remove_books(saved):
    for key in [key for key in saved["param_groups"][0] if key.startswith("accum")]:
        del saved["param_groups"][0][key]


def reshape_sum(saved):
    saved["state"][1]["accum"] = torch.zeros(3)


def cast_sum(saved):
    saved["state"][1]["accum"] = saved["state"][1]["accum"].long()


PARTIAL = {
    "no sums": (remove_sums, ["sums", "of 3", "'a', 'b', 'c'", "3 of"]),
    "one sum": (lambda saved: saved["state"][1].pop("accum"), ["of 3", "missing", "1 of 'b', 'd'"]),
    "one state": (lambda saved: saved["state"].pop(1), ["of 3", "missing", "'b'"]),
    "no books": (remove_books, ["lacks", "'accum_microbatches'", "3 parameter(s)", "'a'"]),
    "part of the books": (lambda saved: saved["param_groups"][0].pop("accum_weight"), ["lacks 'accum_weight'"]),
    "a sum too many": (lambda saved: saved["param_groups"][0].update(accum_sums=2), ["of 2", "too much", "'a'"]),
    "shape": (reshape_sum, ["'accum'", "'b'", "(3,)", "(3, 5)"]),
    "dtype": (cast_sum, ["'accum'", "'b'", "int64"]),
    "no tensor": (lambda saved: saved["state"][0].update(accum=1.0), ["'accum'", "'a'", "1.0"]),
}


@pytest.mark.parametrize("case", PARTIAL)
def test_a_window_that_is_not_whole_is_refused_with_nothing_loaded(make, device, case):
    spoil, words = PARTIAL[case]
    params, opt, rest = half_way(make, device)
    saved = copy.deepcopy(mid_window_state(opt))
    spoil(saved)
    twin = copy.deepcopy(opt)
    fresh = make(list(zip("abcd", copies(params))), lr=0.1)
    groups = contents(fresh)[1]
    for one in (opt, fresh):
        with pytest.raises(ValueError, match=r"go on without its open window.*Nothing was loaded") as error:
            one.load_state_dict(saved)
        for word in words:
            assert word in str(error.value)
    assert fresh.pending == (0, 0.0)
    assert not fresh.state
    assert contents(fresh)[1] == groups
    unharmed(opt, twin, rest)  # its own open window, too


def test_the_way_out_of_a_window_that_is_not_whole(make, device):
    """What errors advise: without both parts it loads, and what was between windows goes on."""
    params, opt, _ = half_way(make, device)
    saved = copy.deepcopy(mid_window_state(opt))
    for own in saved["state"].values():
        own.pop("accum", None)
    remove_books(saved)
    fresh = make(copies(params), lr=0.1)
    fresh.load_state_dict(saved)
    assert fresh.pending == (0, 0.0)
    assert float(fresh.state[fresh.param_groups[0]["params"][0]]["step"]) == 1


def test_groups_of_different_windows_are_refused(make, device):
    a, b = parameters((3,), (2,), device=device)
    opt = make([{"params": [a]}, {"params": [b]}], lr=0.5)
    feed(opt, micro_batches([a, b], WINDOWS["tokens"])[0])
    saved = copy.deepcopy(mid_window_state(opt))
    saved["param_groups"][1]["accum_weight"] = 77.0
    fresh = make([{"params": [x]} for x in copies([a, b])])
    with pytest.raises(ValueError, match=r"different open windows.*77\.0.*Nothing was loaded"):
        fresh.load_state_dict(saved)
    assert not fresh.state


def test_a_group_added_to_a_saved_window_has_no_part_in_it(make, device):
    """It says nothing of a window and holds no sum: the others' window is resumed, whichever comes first."""
    params, opt, rest = half_way(make, device)
    saved = copy.deepcopy(mid_window_state(opt))
    news = {**{key: saved["param_groups"][0][key] for key in ("lr", "betas", "eps", "weight_decay")}, "params": [9]}
    saved["param_groups"].insert(0, news)
    new = torch.nn.Parameter(torch.ones(2, device=device))
    fresh = make([{"params": [new]}, {"params": copies(params)}])
    fresh.load_state_dict(saved)
    assert fresh.pending == opt.pending
    for micro in rest:
        feed(opt, micro)
        for p, g in zip(fresh.param_groups[1]["params"], micro.grads):
            p.grad = None if g is None else g.clone()
        fresh.accumulate(micro.scale, weight=micro.weight)
    opt.step()
    fresh.step()
    for p, q in zip(params, fresh.param_groups[1]["params"]):
        assert same_bits(p, q)
    assert same_bits(new, torch.ones_like(new))
