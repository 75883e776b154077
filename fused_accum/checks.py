"""What a parameter and its gradient must be. Every refusal names the parameter, the value, the rule, the way out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .state import PARAMETER_DTYPES, Options, StateSpec

_PLAIN_DISPATCH = torch.Tensor.__torch_dispatch__


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def name_in(group: dict[str, Any], index: int, place: int) -> str:
    """What errors call the parameter at ``place`` of group number ``index``."""
    names = group.get("param_names")
    named = names is not None and place < len(names)
    return repr(names[place]) if named else f"param_groups[{index}]['params'][{place}]"


def _check_real_storage(what: str, t: Tensor) -> None:
    """``t`` must be a real, strided tensor whose elements are at its data pointer."""
    if t.layout != torch.strided or t.is_nested:
        kind = "nested" if t.is_nested else str(t.layout).removeprefix("torch.")
        raise TypeError(
            f"{what} is {kind}; only dense strided tensors are supported: use a dense gradient "
            "(sparse=False for embeddings) or torch.optim.SparseAdam for this parameter"
        )
    if type(t).__torch_dispatch__ is not _PLAIN_DISPATCH:
        raise TypeError(
            f"{what} is a {type(t).__name__}; its elements are not at a local data pointer: pass the plain "
            "local tensor instead (for fake tensors, leave the FakeTensorMode)"
        )
    if t.device.type == "meta":
        raise RuntimeError(f"{what} is on the meta device and has no data: materialize it with module.to_empty()")


def check_parameter(name: str, p: Tensor) -> None:
    """Raise unless ``p`` can be updated in place: real, dense, of a supported dtype, one element a place."""
    what = f"parameter {name}"
    _check_real_storage(what, p)
    if p.dtype not in PARAMETER_DTYPES:
        remedy = "optimize torch.view_as_real(parameter) instead" if p.is_complex() else "cast it"
        raise TypeError(
            f"{what} has dtype {short(p.dtype)}; supported are {', '.join(map(short, PARAMETER_DTYPES))}: {remedy}"
        )
    if torch._debug_has_internal_overlap(p) == 1:
        raise RuntimeError(
            f"{what} of shape {tuple(p.shape)} has strides {p.stride()}: several elements share one place in "
            "memory and cannot be updated on their own; use parameter.clone()"
        )
    if p.is_inference() and not torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"{what} is an inference tensor and cannot be updated outside InferenceMode; use parameter.clone()"
        )


def check_gradient(name: str, p: Tensor, g: Tensor) -> None:
    """Raise unless ``g`` is a gradient that can be added for ``p``."""
    what = f"the gradient of parameter {name}"
    _check_real_storage(what, g)
    if g.dtype not in PARAMETER_DTYPES:
        raise TypeError(
            f"{what} has dtype {short(g.dtype)}; supported are {', '.join(map(short, PARAMETER_DTYPES))}: cast it"
        )
    if g.requires_grad:
        raise RuntimeError(
            f"{what} requires grad (a backward with create_graph=True?); accumulating would cut its graph "
            "silently: use p.grad = p.grad.detach() first, or backward() without create_graph"
        )
    if g.device != p.device:
        raise RuntimeError(f"{what} is on {g.device}, the parameter on {p.device}; move the gradient along")
    if g.shape != p.shape:
        raise RuntimeError(
            f"{what} has shape {tuple(g.shape)}, the parameter {tuple(p.shape)}; set p.grad = None after "
            "changing a parameter's shape"
        )


def plain_gradient(g: Tensor) -> Tensor:
    """``g`` as an ordinary tensor that owns its bits: lazily negated or zero ones are made real."""
    if g._is_zerotensor():
        g = torch.zeros(g.shape, dtype=g.dtype, device=g.device)
    return g.detach().resolve_neg().as_subclass(torch.Tensor)


def check_unchanged(name: str, p: Tensor, accum: Tensor, dtype: torch.dtype) -> None:
    """Raise when ``p`` was cast, moved or reshaped since its buffer ``accum`` took its first contribution."""
    if accum.device != p.device or accum.shape != p.shape or dtype != p.dtype:
        raise RuntimeError(
            f"parameter {name} is now {short(p.dtype)} {tuple(p.shape)} on {p.device}, but its buffer holds a "
            f"window accumulated for {short(dtype)} {tuple(accum.shape)} on {accum.device}; a parameter must "
            "not be cast or moved in mid-window: do it after step(), or drop the window with zero_grad()"
        )


def check_capture(groups: Sequence[dict[str, Any]]) -> None:
    """Raise, as torch does, where a CUDA graph is captured of a step that would keep today's lr for ever."""
    if torch.cuda.is_current_stream_capturing() and not all(group["capturable"] for group in groups):
        raise RuntimeError(
            "step() is being captured into a CUDA graph, but a group's capturable is False: replays would use the lr "
            "of the capture; construct the optimizer with capturable=True, and give lr as a tensor on the device to "
            "change it between replays"
        )


def check_options(name: str, p: Tensor, options: Options) -> None:
    """Raise where ``p`` cannot have what ``options`` ask for."""
    if options.master_weights == "split" and p.dtype == torch.float16:
        raise TypeError(
            f"parameter {name} is float16; master_weights='split' keeps the 16 bits that a bfloat16 parameter lacks "
            "of a float32, and float16 is not the upper half of one: use master_weights='fp32'"
        )


def check_state(name: str, spec: StateSpec, p: Tensor, t: Tensor, options: Options) -> None:
    """Raise unless the state tensor ``t`` can be what ``spec`` says for ``p``."""
    key = spec.name
    _check_real_storage(f"state {key!r} of parameter {name}", t)
    why = spec.refusal(p, t, options)
    if t.device != p.device or t.shape != p.shape or why:
        raise RuntimeError(
            f"state {key!r} of parameter {name} is {short(t.dtype)} {tuple(t.shape)} on {t.device}, the parameter "
            f"is {tuple(p.shape)} on {p.device}; state must have the parameter's shape and device"
            f"{f' ({why})' if why else ''}: load a matching state_dict, or delete optimizer.state[parameter] to "
            "start it anew"
        )
