"""The two ways through a window: one more micro-batch, and its end.

The end is a pipeline: collect (explicit, or from p.grad) -> norm and flag, where wanted -> coefficient -> update ->
clear. What needs the whole sum before any update (a norm, a reduction over ranks) comes before the coefficient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from . import checks, norms, skipping, window
from .buckets import Bucket
from .commit import discard, drop_window, release, take, take_rest, update
from .norms import there
from .nothing_left import NOTHING_THERE, nothing_left
from .skipping import Count
from .state import Hyper, complete

if TYPE_CHECKING:
    from .optimizer import FusedAccumAdamW
    from .runtime import Runtime


def factors_of(opt: FusedAccumAdamW, scale: Any, weight: Any) -> tuple[float | Tensor, float | Tensor | None]:
    """Both as floats; but what lies on a device stays there, as float64, where all kernels read it there."""
    read = window.host_number
    if opt._run.backward is None and (window.on_device(scale) or window.on_device(weight)):
        buckets = opt._run.buckets(opt.param_groups)
        if buckets and all(bucket.backend.decides_on_device for bucket in buckets):

            def read(name: str, value: Any) -> float | Tensor:  # on one device, so that they can be added up
                return there(window.number(name, value), buckets[0].device)

    scale, weight = read("scale", scale), None if weight is None else read("weight", weight)
    window.refuse_extremes(scale, weight)
    return scale, weight


def _factor(scale: float | Tensor, weight: float | Tensor | None) -> float | Tensor:
    return scale if weight is None else scale * weight


def _is_zero(number: float | Tensor | None) -> bool:
    """Whether the host knows it to be."""
    return not isinstance(number, Tensor) and number == 0


def take_microbatch(opt: FusedAccumAdamW, scale: float | Tensor, weight: float | Tensor | None) -> str | None:
    """Add the gradients in ``p.grad`` to the open window, or only count them where their factor is zero. Returns what
    to warn of.

    While accumulating in backward they are there already.
    """
    run = opt._run
    run.refuse_missing_hooks("accumulate")
    run.stepped_in_backward = False
    if run.backward is not None:
        _refuse_factors("accumulate", run, scale, weight)
        run.backward.refuse_unfinished()
        return None
    factor = _factor(scale, weight)
    adds = not _is_zero(factor)
    buckets, found = run.collect(opt.param_groups, buffers=adds)
    try:
        if not found:
            return None if run.window.open else run.window.once("nothing", NOTHING_THERE.format("accumulate()"))
        run.window.refuse_mixing(weight)
        rejections = None
        if adds:
            taken = skipping.accepted(run, buckets, factor, weight)
            if taken is None:
                take(run, buckets, None, run.window.with_one_rejected())
                return None
            factor, weight, rejections = taken
        if not opt.state and adds:
            _begin_state(opt)
        take(run, buckets, factor if adds else None, run.window.with_one_more(scale, weight, rejections))
        return None
    finally:
        release(buckets)


def _begin_state(opt: FusedAccumAdamW) -> None:
    """Make the state of all parameters with a gradient, in an optimizer without any: one with an open window has
    some. torch.distributed.checkpoint would else make it, by a step of zero gradients that ends the window."""
    opt._run.window.began_state = True
    for group in opt.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                complete(opt.state[p], p, group, opt._run.options)


def end_window(opt: FusedAccumAdamW, scale: float | Tensor, weight: float | Tensor | None) -> str | None:
    """The pipeline of a step. Returns what to warn of."""
    run = opt._run
    run.refuse_missing_hooks("step")
    hypers = Hyper.of_all(opt.param_groups)
    amp = _amp_tensors(opt)
    run.stepped_in_backward = False
    note = None
    if run.backward is not None:
        _refuse_factors("step", run, scale, weight)
        run.backward.refuse_step()
    elif _is_zero(_factor(scale, weight)):
        note = take_microbatch(opt, scale, weight)
        scale, weight = 1.0, None  # nothing is left that they would be of
    buckets, found = run.collect(opt.param_groups, buffers=False)
    factor, books = 1.0, None
    try:
        adds = run.backward is None and found > 0
        if adds:
            run.window.refuse_mixing(weight)
        if found:
            run.idle_steps = 0
        else:
            note = note or nothing_left(run, scale, weight)
        coefficient, found_inf, factors = _amp_factors(opt, amp, buckets)
        factor = _factor(scale, weight)
        if adds and not found_inf:
            taken = skipping.accepted(run, buckets, factor, weight, None if factors is None else factors.skip)
            if taken is None:
                take(run, buckets, None, run.window.with_one_rejected())
                buckets, found = run.collect(opt.param_groups, buffers=False)
                adds = False
            else:
                factor, weight, rejections = taken
                books = run.window.with_one_more(scale, weight, rejections)
        total = run.window.total_weight(weight if found else None)
        if isinstance(total, Tensor) and not _divides_on_device(opt, buckets):
            total = float(total)
        if found_inf or (_is_zero(total) and run.window.microbatches):
            return _abandon_window(opt, buckets, found_inf)
        if any(bucket.device.type == "cuda" for bucket in buckets):
            checks.check_capture(opt.param_groups)
        before = _without_state(opt) if run.options.skip_nonfinite == "step" else []
        for bucket in buckets:
            bucket.prepare(opt.state, opt.param_groups, hypers)
        if isinstance(total, Tensor):
            divided = norms.divided_by(total)
            factors = divided if factors is None else divided.and_(factors)
        elif total is not None:
            coefficient = 1.0 / total * coefficient
        skipped = run.skipped_steps
        if run.options.measures:
            if books is not None:
                run.torn = "step"
            for bucket in buckets:
                bucket.sum_up(there(factor, bucket.device))
            coefficient, factors, skipped = skipping.judge(run, buckets, coefficient, factors)
            if coefficient is None:
                for p in before:
                    opt.state.pop(p, None)
                return _abandon_window(opt, buckets, True, skipped)
        message = update(opt, buckets, books, skipped, (hypers, factor, coefficient, factors))
        return note or message
    except BaseException:
        if run.torn == "step" and run.half_applied is None:
            take_rest(opt, buckets, factor, books)
        raise
    finally:
        release(buckets)


def discard_window(opt: FusedAccumAdamW) -> int:
    """Drop the open window; returns how many explicit micro-batches that cost."""
    run = opt._run
    dropped = 0 if run.backward is not None else run.window.microbatches
    discard(opt)
    return dropped


def _divides_on_device(opt: FusedAccumAdamW, buckets: list[Bucket]) -> bool:
    """Whether what a step divides by may stay on its device, where 0 is nothing to divide by and skips the update."""
    waits = opt._run.options.measures and skipping.on_host(opt._run, buckets)
    return not waits and all(bucket.backend.decides_on_device for bucket in buckets)


def _without_state(opt: FusedAccumAdamW) -> list[Tensor]:
    return [p for group in opt.param_groups for p in group["params"] if not opt.state.get(p)]


def _abandon_window(
    opt: FusedAccumAdamW, buckets: list[Bucket], found_inf: bool, skipped: Count | None = None
) -> str | None:
    """End the window without an update: a gradient is not finite, or there is nothing to divide by."""
    run = opt._run
    count = run.window.microbatches
    drop_window(opt, buckets, skipped or run.skipped_steps)
    if found_inf:
        return None
    return (
        f"the weights of this window's {count} micro-batch(es) add up to 0: there is nothing to average, so "
        "no parameter was updated and the window is closed"
    )


def _refuse_factors(call: str, run: Runtime, scale: float, weight: float | None) -> None:
    if scale != 1.0 or weight is not None:
        given = f"scale={scale:g}" if weight is None else f"weight={weight:g}"
        if not run.backward.installed:
            raise ValueError(
                f"{call}({given}) in a window whose handle was removed before its end: p.grad still holds it, as a "
                "sum that has its factors already; end it with step(), or drop it with zero_grad(), first"
            )
        raise ValueError(
            f"{call}({given}) while accumulating in backward: the gradients are in p.grad already; give the factor "
            f"to the loss instead: optimizer.scale_loss(loss, {given}).backward()"
        )


def _amp_tensors(opt: FusedAccumAdamW) -> tuple[Any, Any] | None:
    """``grad_scale`` and ``found_inf`` as GradScaler has set them on the optimizer; it deletes them itself."""
    if not hasattr(opt, "found_inf"):
        return None
    run = opt._run
    if run.stepped_in_backward:
        del opt.found_inf, opt.grad_scale
        run.half_applied = "an exception inside step_in_backward() (GradScaler's gradients were used scaled)"
        raise RuntimeError(
            "GradScaler.step() after step_in_backward(): the update is done, with gradients that the scaler could "
            "neither inspect nor unscale; use step() with a scaler, or bfloat16 autocast, which needs none. "
            "Parameters and optimizer must be loaded from a checkpoint"
        )
    if run.backward is None and run.window.microbatches:
        del opt.found_inf, opt.grad_scale
        raise RuntimeError(
            f"GradScaler.step() with {run.window.microbatches} explicit micro-batch(es) pending: the scaler inspects "
            "and unscales only p.grad, not the buffer, so the update would be wrong. Accumulate into p.grad instead "
            "(accumulate_in_backward(), or plain backward() calls without accumulate()), or use bfloat16 autocast, "
            "which needs no scaler"
        )
    return opt.grad_scale, opt.found_inf


def _amp_factors(
    opt: FusedAccumAdamW, amp: tuple[Any, Any] | None, buckets: list[Bucket]
) -> tuple[float, bool, norms.Factors | None]:
    """1 / grad_scale, found_inf, and what of them only the device knows."""
    if amp is None:
        return 1.0, False, None
    grad_scale, found_inf = amp
    if _divides_on_device(opt, buckets):
        return 1.0, False, norms.unscaled(grad_scale, found_inf)
    return 1.0 if grad_scale is None else 1.0 / float(grad_scale), float(found_inf) != 0, None
