"""What the tests share: making inputs, driving windows, looking into an optimizer."""

import gc
import re
import warnings

import pytest
import torch
from oracle import Micro, Oracle, same_bits
from torch import Tensor


def numel(shape: tuple) -> int:
    return int(torch.Size(shape).numel())


def values(shape: tuple, dtype=torch.float32, device="cpu", spread: bool = True) -> Tensor:
    """Normal values; with `spread`, over three decades, so that eps, underflow and cancellation matter."""
    x = torch.randn(shape)
    if spread:
        x *= torch.randint(-7, 4, shape).exp2()
    if dtype == torch.float64:  # all 53 bits
        x = x * (1 + 1e-8 * torch.rand(shape, dtype=dtype))
    return x.to(device=device, dtype=dtype)


def in_layout(x: Tensor, layout: str) -> Tensor:
    """A tensor with the shape and values of `x` (expanded ones repeat x's first values) in another layout."""
    shape, holes = x.shape, float("nan")
    if layout == "contiguous":
        return x.clone(memory_format=torch.contiguous_format)
    if layout == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "channels_last":
        return x.clone(memory_format=torch.channels_last)
    if layout == "expanded":
        return x[..., :1].clone().expand(shape)
    if layout == "expanded-all":
        return x.flatten()[:1].sum().expand(shape)
    if layout == "misaligned":
        out = x.new_full((x.numel() + 1,), holes)[1:].view(shape)
    elif layout == "sliced":
        first, *middle, last = shape
        out = x.new_full((first + 2, *middle, last + 3), holes)[1:-1, ..., 1:-2]
    elif layout == "stepped":
        *outer, last = shape
        out = x.new_full((*outer, 2 * last), holes)[..., ::2]
    else:
        raise ValueError(f"no layout {layout!r}")
    return out.copy_(x)


def parameter(x: Tensor, layout: str = "contiguous") -> torch.nn.Parameter:
    return torch.nn.Parameter(in_layout(x, layout))


def parameters(*shapes: tuple, dtype=torch.float32, device="cpu") -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(values(shape, dtype, device)) for shape in shapes]


def copies(params) -> list[torch.nn.Parameter]:
    """Independent parameters with the same values and strides."""
    return [torch.nn.Parameter(p.detach().clone()) for p in params]


def give(p: Tensor, grad: Tensor | None) -> None:
    """Sets `p.grad`, of any floating dtype (as autograd does once `grad_dtype` is None)."""
    if grad is not None and grad.dtype != p.dtype:
        p.grad_dtype = None
    p.grad = grad


def params_of(opt) -> list[Tensor]:
    return list(dict.fromkeys(p for group in opt.param_groups for p in group["params"]))


def micro_batches(params, window, dtype=None, layout=None, absent=()) -> list[Micro]:
    """Random gradients for a row of `cases.WINDOWS`; `absent` holds (micro-batch, parameter) without one."""
    micros = []
    for k, (scale, weight) in enumerate(window):
        grads = []
        for i, p in enumerate(params):
            g = None if (k, i) in absent else values(p.shape, dtype or p.dtype, p.device)
            grads.append(g if g is None or layout is None else in_layout(g, layout))
        micros.append(Micro(grads, scale, weight))
    return micros


def put(params, micro: Micro) -> None:
    """What a backward would leave: the micro-batch's gradients in place."""
    for p, g in zip(params, micro.grads):
        give(p, g)


def feed(opt, micro: Micro, last: bool = False) -> None:
    """One micro-batch into accumulate(), or into step() when it is the last; the gradients given are copies."""
    for p, g in zip(params_of(opt), micro.grads):
        give(p, None if g is None else g.clone())
    (opt.step if last else opt.accumulate)(scale=micro.scale, weight=micro.weight)


def run_window(opt, micros: list[Micro], *, fold: bool = True, params=None) -> None:
    """Drives one window: accumulate() per micro-batch, the last one given to step() when `fold`.

    Asserts on the way what holds for every call: a consumed gradient becomes None and its storage is not
    written to, and parameters do not move before the step.
    """
    params = params or params_of(opt)
    before = [p.detach().clone() for p in params]
    for k, micro in enumerate(micros):
        kept = [None if g is None else g.clone() for g in micro.grads]
        put(params, micro)
        if fold and k == len(micros) - 1:
            opt.step(scale=micro.scale, weight=micro.weight)
        else:
            opt.accumulate(micro.scale, weight=micro.weight)
            assert all(same_bits(p, x) for p, x in zip(params, before)), "accumulate moved a parameter"
        assert all(p.grad is None for p in params if p.requires_grad), "a consumed gradient was left"
        assert all(g is None or same_bits(g, x) for g, x in zip(micro.grads, kept)), "a gradient was written"
    if not fold:
        opt.step()


def run_checked(opt, oracle: Oracle, micros: list[Micro]) -> None:
    """One window of the optimizer and of the oracle, which must agree."""
    oracle.window(micros)
    run_window(opt, micros)
    oracle.check()


def mid_window_state(opt) -> dict:
    """state_dict() without its warning about an open window."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return opt.state_dict()


def buffers(opt) -> list[Tensor | None]:
    """The accumulation buffers of an open window, one per parameter; None without a contribution."""
    saved = mid_window_state(opt)
    found = {}
    for group, names in zip(opt.param_groups, saved["param_groups"]):
        for p, name in zip(group["params"], names["params"]):
            found[p] = saved["state"].get(name, {}).get("accum")
    return list(found.values())


def surroundings(p: Tensor) -> Tensor:
    """Everything in p's storage that is not p, as raw bytes: must survive any call unchanged."""
    storage = p.detach().untyped_storage()
    whole = torch.empty(0, dtype=p.dtype, device=p.device).set_(storage, 0, (storage.nbytes() // p.element_size(),))
    whole = whole.clone()
    whole.as_strided(p.shape, p.stride(), p.storage_offset()).zero_()
    return whole.view(torch.uint8)


def snapshot(opt) -> dict:
    """All a refused call must leave as it was, in comparable form."""
    held = {}
    for i, p in enumerate(params_of(opt)):
        held[f"param {i}"], held[f"grad {i}"] = p.detach().clone(), p.grad
        held[f"grad values {i}"] = None if p.grad is None or not dense(p.grad) else p.grad.detach().clone()
    state = mid_window_state(opt)
    for i, entries in state["state"].items():
        for name, value in entries.items():
            held[f"{name} {i}"] = value.clone() if isinstance(value, Tensor) else value
    held["groups"] = [dict(group) for group in state["param_groups"]]
    held["pending"] = tuple(opt.pending)
    return held


def dense(x: Tensor) -> bool:
    return type(x) in (Tensor, torch.nn.Parameter) and x.layout == torch.strided and not x.is_nested


def assert_unchanged(before: dict, after: dict) -> None:
    assert before.keys() == after.keys()
    for name, old in before.items():
        new = after[name]
        if name.startswith("grad ") and not name.startswith("grad values"):
            assert new is old or (old is not None and new is not None and new.data_ptr() == old.data_ptr()), name
        elif isinstance(old, Tensor) and dense(old):
            assert same_bits(old, new), f"{name} changed"
        elif not isinstance(old, Tensor):
            assert new == old, f"{name} changed"


def assert_same_run(a, b) -> None:
    """Bit equality of two optimizers: parameters, every state tensor, open windows."""
    for i, (p, q) in enumerate(zip(params_of(a), params_of(b), strict=True)):
        assert same_bits(p, q), f"parameter {i} differs"
    left, right = mid_window_state(a), mid_window_state(b)
    assert left["state"].keys() == right["state"].keys()
    for i, entries in left["state"].items():
        assert entries.keys() == right["state"][i].keys()
        for name, value in entries.items():
            assert same_bits(torch.as_tensor(value), torch.as_tensor(right["state"][i][name])), f"{name} {i} differs"
    assert tuple(a.pending) == tuple(b.pending)


def live_storages() -> dict:
    """Every storage that some tensor holds, by address: what an optimizer allocates shows up here."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        # type(), not isinstance: asking lazy modules for their class imports them
        if type(thing) in (Tensor, torch.nn.Parameter) and (storage := thing.untyped_storage()).nbytes():
            found[storage.data_ptr()] = storage
    return found


def open_window(make, device, weight=None, **options):
    """An optimizer with history, an open window and gradients in place."""
    named = [("first", p) for p in parameters((65,), device=device)]
    named += [("model.second", p) for p in parameters((4, 5), device=device)]
    opt = make(named, lr=0.1, **options)
    for call in (opt.step, opt.accumulate):
        for _, p in named:
            p.grad = values(p.shape, device=device)
        call(scale=0.5 if call == opt.accumulate else 1.0, weight=weight)  # sums of scales stay 1
    for _, p in named:
        p.grad = values(p.shape, device=device)
    return opt


def assert_names(error, words):
    for word in words:
        assert re.search(re.escape(word), str(error)), f"{word!r} is not in: {error}"


def refused(error, words, call, *args, **kwargs):
    """``call`` raises ``error``, whose message has all of ``words``."""
    with pytest.raises(error) as caught:
        call(*args, **kwargs)
    assert_names(caught.value, words)


def heard(call, *args, **kwargs) -> list[str]:
    """The warnings of a call, all of them."""
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        call(*args, **kwargs)
    return [str(w.message) for w in record]


def give_ones(opt) -> None:
    for p in params_of(opt):
        p.grad = torch.ones_like(p)
