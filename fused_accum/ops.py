"""The kernels as functions on lists of tensors, and as torch.library ops that full-graph torch.compile accepts.

``torch.ops.fused_accum.accumulate_`` and ``torch.ops.fused_accum.adamw_`` are the same functions. Scalars that change
from step to step are elements of a float64 tensor, so that a compiled graph is compiled once. The optimizer calls its
backends directly; these ops are for compiled code and for other optimizers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from . import backends, checks
from .rows import Rows
from .state import LOW_PRECISION, PARAMETER_DTYPES, Hyper

HYPER = ("lr", "beta1", "beta2", "eps", "weight_decay", "scale", "coefficient")

_library = torch.library.Library("fused_accum", "DEF")
_library.define("accumulate_(Tensor(a!)[] accums, Tensor[] grads, Tensor scale, *, bool first=False) -> ()")
_library.define(
    "adamw_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] accums, Tensor(c!)[] exp_avgs, "
    "Tensor(d!)[] exp_avg_sqs, Tensor(e!)[] max_exp_avg_sqs, Tensor(f!)[] steps, Tensor hyper, *, "
    "bool maximize=False, ScalarType? accum_dtype=None) -> ()"
)
_library.define(
    "adamw_masters_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] accums, Tensor(c!)[] exp_avgs, "
    "Tensor(d!)[] exp_avg_sqs, Tensor(e!)[] max_exp_avg_sqs, Tensor(f!)[] steps, Tensor(g!)[] masters, "
    "Tensor hyper, *, bool maximize=False, ScalarType? accum_dtype=None) -> ()"
)


def accumulate_(accums: Sequence[Tensor], grads: Sequence[Tensor], scale: Tensor, *, first: bool = False) -> None:
    """Equation (1) for every pair: ``accum += scale * grad``; ``accum = scale * grad`` if ``first``.

    Args:
        accums: buffers of any supported floating dtype; mutated. With ``first`` they are not read.
        grads: one per buffer, of its shape and device, any supported floating dtype; not mutated.
        scale: 0-dim float64 CPU tensor.

    Raises:
        ValueError: lists of unequal length, ``scale`` of another kind.
        TypeError, RuntimeError: a tensor that is not dense, of another shape, device or dtype.
    """
    torch.ops.fused_accum.accumulate_(accums, grads, scale, first=first)


def adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    accums: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    hyper: Tensor,
    *,
    maximize: bool = False,
    accum_dtype: torch.dtype | None = None,
    masters: Sequence[Tensor] = (),
) -> None:
    """Equations (2) to (6) for every parameter, from its gradient, its buffer, or both.

    Args:
        params, exp_avgs, exp_avg_sqs: one per parameter, of equal shape; mutated.
        grads: the last micro-batch's gradients, or empty; not mutated.
        accums: the buffers, or empty; mutated: zero afterwards. One of ``grads`` and ``accums`` is not empty.
        max_exp_avg_sqs: mutated; empty without amsgrad.
        steps: 0-dim float32 or float64 CPU tensors; incremented.
        hyper: float64 CPU tensor of ``ops.HYPER``: lr, beta1, beta2, eps, weight_decay, scale (of ``grads``),
            coefficient (of the sum).
        accum_dtype: without ``accums``, what ``scale * grad`` is rounded to; None: float32, or float64 for float64
            parameters.
        masters: mutated; empty, or for bfloat16 and float16 ``params`` their float32 masters, or for bfloat16 ones
            int16: the halves of the masters that ``params`` lack (``master_weights`` of the optimizer says more).

    Raises:
        As ``accumulate_``.
    """
    options = {"maximize": maximize, "accum_dtype": accum_dtype}
    lists = (params, grads, accums, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps)
    if len(masters):
        torch.ops.fused_accum.adamw_masters_(*lists, masters, hyper, **options)
    else:
        torch.ops.fused_accum.adamw_(*lists, hyper, **options)


# -- validation: what can be known of a tensor without its data, so that it also serves as the fake ----------------


def _check_lists(**lists: Sequence[Tensor]) -> None:
    (first_name, first), *others = lists.items()
    for name, tensors in others:
        if len(tensors) != len(first):
            raise ValueError(f"{name} has {len(tensors)} tensors, {first_name} {len(first)}; give one for each")
        for i, (a, b) in enumerate(zip(first, tensors)):
            if a.shape != b.shape or a.device != b.device:
                raise RuntimeError(
                    f"{name}[{i}] is {tuple(b.shape)} on {b.device}, {first_name}[{i}] {tuple(a.shape)} on "
                    f"{a.device}; both must have one shape and device"
                )
    for name, tensors in lists.items():
        for i, t in enumerate(tensors):
            if t.layout != torch.strided:
                raise TypeError(f"{name}[{i}] is {t.layout}; supported are dense strided tensors: use .to_dense()")
            if t.dtype not in PARAMETER_DTYPES:
                raise TypeError(
                    f"{name}[{i}] has dtype {checks.short(t.dtype)}; supported are "
                    f"{', '.join(map(checks.short, PARAMETER_DTYPES))}: cast it"
                )


def _check_scalars(name: str, t: Tensor, shape: tuple[int, ...]) -> None:
    if t.dtype != torch.float64 or tuple(t.shape) != shape or t.device.type != "cpu":
        raise ValueError(
            f"{name} is {checks.short(t.dtype)} {tuple(t.shape)} on {t.device}; it must be a float64 CPU tensor of "
            f"shape {shape}: torch.tensor(..., dtype=torch.float64)"
        )


@torch.library.register_fake("fused_accum::accumulate_")
def _check_accumulate(accums, grads, scale, *, first=False):
    _check_lists(accums=accums, grads=grads)
    _check_scalars("scale", scale, ())


@torch.library.register_fake("fused_accum::adamw_")
def _check_adamw(
    params, grads, accums, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps, hyper, *, maximize=False, accum_dtype=None
):
    given = {"grads": grads, "accums": accums, "max_exp_avg_sqs": max_exp_avg_sqs}
    given = {name: tensors for name, tensors in given.items() if len(tensors)}
    _check_lists(params=params, exp_avgs=exp_avgs, exp_avg_sqs=exp_avg_sqs, **given)
    if len(params) and not len(grads) and not len(accums):
        raise ValueError("grads and accums are both empty; give the gradients, the buffers, or both")
    if len(steps) != len(params):
        raise ValueError(f"steps has {len(steps)} tensors, params {len(params)}; give one for each")
    _check_scalars("hyper", hyper, (len(HYPER),))


@torch.library.register_fake("fused_accum::adamw_masters_")
def _check_adamw_masters(
    params, grads, accums, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps, masters, hyper, *,
    maximize=False, accum_dtype=None,
):  # fmt: skip
    _check_adamw(params, grads, accums, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps, hyper)
    if len(masters) != len(params):
        raise ValueError(f"masters has {len(masters)} tensors, params {len(params)}; give one for each")
    kinds = {t.dtype for t in masters}
    takes = {torch.float32: LOW_PRECISION, torch.int16: (torch.bfloat16,)}
    for i, (p, t) in enumerate(zip(params, masters)):
        if p.shape != t.shape or p.device != t.device or t.layout != torch.strided:
            raise RuntimeError(
                f"masters[{i}] is {t.layout} {tuple(t.shape)} on {t.device}, params[{i}] {tuple(p.shape)} on "
                f"{p.device}; both must be strided, of one shape and device"
            )
        if len(kinds) != 1 or p.dtype not in takes.get(t.dtype, ()):
            raise TypeError(
                f"masters[{i}] is {checks.short(t.dtype)} for {checks.short(p.dtype)}; masters are float32, of "
                "bfloat16 and float16 parameters, or all int16, of bfloat16 ones"
            )


# -- implementations -----------------------------------------------------------------------------------------------


def _by_backend(tensors: Sequence[Tensor]) -> dict[backends.Backend, list[int]]:
    rows: dict[backends.Backend, list[int]] = {}
    for i, t in enumerate(tensors):
        rows.setdefault(backends.choose("auto", t.device)[0], []).append(i)
    return rows


def _pick(tensors: Sequence[Tensor], rows: list[int]) -> list[Tensor | None]:
    return [tensors[i] for i in rows] if len(tensors) else [None] * len(rows)


def _accumulate(accums, grads, scale, *, first=False):
    _check_accumulate(accums, grads, scale, first=first)
    for backend, rows in _by_backend(accums).items():
        own = _pick(accums, rows)
        backend.accumulate(own, _pick(grads, rows), [first] * len(rows), float(scale))
        increment_version(own)


def _adamw_masters(
    params, grads, accums, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps, masters, hyper, *,
    maximize=False, accum_dtype=None,
):  # fmt: skip
    _check_adamw_masters(params, grads, accums, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps, masters, hyper)
    _adamw(
        params, grads, accums, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps, hyper, maximize=maximize,
        accum_dtype=accum_dtype, masters=masters,
    )  # fmt: skip


def _adamw(
    params, grads, accums, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps, hyper, *,
    maximize=False, accum_dtype=None, masters=(),
):  # fmt: skip
    _check_adamw(params, grads, accums, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps, hyper)
    lr, beta1, beta2, eps, weight_decay, scale, coefficient = hyper.tolist()
    for backend, rows in _by_backend(params).items():
        own, sums = _pick(params, rows), _pick(accums, rows)
        table = Rows(
            params=own,
            grads=_pick(grads, rows),
            accums=sums,
            present=[a is not None for a in sums],
            accum_dtypes=[_sum_dtype(p, a, accum_dtype) for p, a in zip(own, sums)],
            exp_avgs=_pick(exp_avgs, rows),
            exp_avg_sqs=_pick(exp_avg_sqs, rows),
            max_exp_avg_sqs=_pick(max_exp_avg_sqs, rows),
            steps=_pick(steps, rows),
            groups=[0] * len(rows),
            hypers=[Hyper(lr, beta1, beta2, eps, weight_decay, maximize, len(max_exp_avg_sqs) > 0)],
            scale=scale,
            coefficient=coefficient,
            masters=_pick(masters, rows),
        )
        backend.adamw(table)
        increment_version(table.written())


def _sum_dtype(p: Tensor, accum: Tensor | None, asked: torch.dtype | None) -> torch.dtype:
    if accum is not None:
        return accum.dtype
    return torch.float64 if p.dtype == torch.float64 else asked or torch.float32


_library.impl("accumulate_", _accumulate, "CompositeExplicitAutograd")
_library.impl("adamw_", _adamw, "CompositeExplicitAutograd")
_library.impl("adamw_masters_", _adamw_masters, "CompositeExplicitAutograd")
