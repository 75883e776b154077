"""The two ways through a window: one more micro-batch, and its end.

The end is a pipeline: collect (explicit, or from p.grad) -> norm and flag, where wanted -> coefficient -> update ->
clear. What needs the whole sum before any update (a norm, a reduction over ranks) comes before the coefficient.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from torch import Tensor

from . import checks, norms, window
from .buckets import Bucket
from .state import Hyper, complete

if TYPE_CHECKING:
    from .optimizer import FusedAccumAdamW
    from .runtime import Runtime


def factors_of(opt: FusedAccumAdamW, scale: Any, weight: Any) -> tuple[float | Tensor, float | Tensor | None]:
    """Both as floats; but what lies on a device stays there, as float64, where all kernels read it there."""
    there = [f for f in (scale, weight) if window.on_device(f)]
    read = window.host_number
    if there and opt._run.backward is None and not hasattr(opt, "found_inf"):
        buckets = opt._run.buckets(opt.param_groups)
        if all(b.backend.scales_on_device and b.device == f.device for b in buckets for f in there):
            read = window.number
    scale, weight = read("scale", scale), None if weight is None else read("weight", weight)
    window.refuse_extremes(scale, weight)
    return scale, weight


NOTHING_THERE = (
    "{} found no gradient in any parameter, and no window is open: either no backward() came before, or it did not "
    "reach this optimizer's parameters (p.grad cleared in between, a loss made under no_grad, parameters replaced or "
    "frozen after the optimizer was made)"
)
IDLE_STEPS = 3  # in a row: one alone may be meant, as for the order of calls that torch's schedulers want


def _nothing_left(run: Runtime, scale: float | Tensor, weight: float | Tensor | None) -> str | None:
    """What to warn of where a step found no gradient in p.grad: that its factor was not used though no micro-batch
    had one, or that there is nothing to step at all, again and again."""
    if run.backward is not None and run.backward.finishing:
        return None
    if run.window.open:
        run.idle_steps = 0
        plain = not isinstance(scale, Tensor) and scale == 1
        given = "weight" if weight is not None else None if plain else "scale"
        if not given or not run.window.unscaled:
            return None
        return run.window.once(
            "unused",
            f"step({given}=) found no gradient left in p.grad, so {given} was not used: the micro-batches that "
            f"accumulate() has taken had none. Pass {given}= to every accumulate(); step() is given that of a last "
            "micro-batch still in p.grad",
        )
    run.idle_steps += 1
    if run.idle_steps < IDLE_STEPS:
        return None
    return run.window.once("nothing", NOTHING_THERE.format(f"step(), {IDLE_STEPS} times in a row,"))


def _factor(scale: float | Tensor, weight: float | Tensor | None) -> float | Tensor:
    return scale if weight is None else scale * weight


def _is_zero(number: float | Tensor | None) -> bool:
    """Whether the host knows it to be."""
    return not isinstance(number, Tensor) and number == 0


def _release(buckets: list[Bucket]) -> None:
    for bucket in buckets:
        bucket.release()


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
        if adds and _rejected(opt, buckets, factor):
            return None
        if not opt.state and adds:
            _begin_state(opt)
        # Counted before the kernels run: an interrupt during them is raised right after, never between.
        run.window.add(scale, weight)
        for bucket in buckets:
            if adds:
                bucket.accumulate(factor)
            else:
                bucket.drop_gradients()
        return None
    finally:
        _release(buckets)


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
    try:
        if run.backward is None and found:
            run.window.refuse_mixing(weight)
        if found:
            run.idle_steps = 0
        else:
            note = note or _nothing_left(run, scale, weight)
        inverse_grad_scale, found_inf = _amp_factors(amp, buckets, on_device=not run.options.measures)
        if run.backward is None and found and not found_inf and _rejected(opt, buckets, _factor(scale, weight)):
            buckets, found = run.collect(opt.param_groups, buffers=False)
        total = run.window.total_weight(weight if found else None)
        if isinstance(total, Tensor) and not _divides_on_device(opt, buckets, amp is not None):
            total = float(total)
        if found_inf or (_is_zero(total) and run.window.microbatches):
            return _abandon_window(opt, buckets, found_inf)
        if any(bucket.device.type == "cuda" for bucket in buckets):
            checks.check_capture(opt.param_groups)
        before = _without_state(opt) if run.options.skip_nonfinite == "step" else []
        for bucket in buckets:
            bucket.prepare(opt.state, opt.param_groups, hypers)
        if run.backward is None and found:
            run.window.add(scale, weight)
        coefficient, factors = inverse_grad_scale, None
        if isinstance(total, Tensor):
            factors = norms.divided_by(total)
        elif total is not None:
            coefficient = 1.0 / total * inverse_grad_scale
        if run.options.measures:
            for bucket in buckets:
                bucket.sum_up(_factor(scale, weight))
            coefficient, factors = _judge(opt, buckets, coefficient, factors)
            if coefficient is None:
                for p in before:
                    opt.state.pop(p, None)
                return _abandon_window(opt, buckets, True)
        message = run.window.close()
        for bucket in buckets:
            bucket.step(
                opt.state, hypers, _factor(scale, weight), coefficient, factors and factors.on(bucket.device)
            )
        if run.backward is not None:
            run.backward.stepped()
        return note or message
    finally:
        _release(buckets)


def discard_window(opt: FusedAccumAdamW) -> int:
    """Drop the open window; returns how many explicit micro-batches that cost."""
    run = opt._run
    dropped = 0 if run.backward is not None else run.window.microbatches
    _discard(opt)
    return dropped


def _discard(opt: FusedAccumAdamW) -> None:
    """Drop the open window, and the state that only it has called for."""
    if opt._run.window.began_state:
        for group in opt.param_groups:
            for p in group["params"]:
                opt.state.pop(p, None)
    opt._run.discard()


def on_host(opt: FusedAccumAdamW, buckets: list[Bucket]) -> bool:
    """Whether a step must know the norm on the host: for parameters there, or for a backend that cannot skip."""
    skips = opt._run.options.skip_nonfinite == "step"
    return any(b.device.type == "cpu" or (skips and not b.backend.skips_on_device) for b in buckets)


def _divides_on_device(opt: FusedAccumAdamW, buckets: list[Bucket], scaled: bool) -> bool:
    """Whether a sum of weights may stay on its device, where 0 is nothing to divide by and skips the update."""
    waits = scaled or (opt._run.options.measures and on_host(opt, buckets))
    return not waits and all(bucket.backend.skips_on_device for bucket in buckets)


def _judge(
    opt: FusedAccumAdamW, buckets: list[Bucket], coefficient: float, known: norms.Factors | None
) -> tuple[float | None, norms.Factors | None]:
    """The clipped coefficient (None: skip the step), and what of it only the device knows; ``known``: as yet."""
    run, options = opt._run, opt._run.options
    if not any(bucket.measured for bucket in buckets):
        return coefficient, known
    run.norms = found = norms.Norms(buckets, coefficient if known is None else coefficient * known.clip)
    skips = options.skip_nonfinite == "step"
    if not on_host(opt, buckets):
        factors = norms.factors(found.total(), options.max_grad_norm, skips)
        if skips:
            before = 0 if run.skipped_on_device is None else run.skipped_on_device
            run.skipped_on_device = factors.skip.long() + before
            run.offender = found
        return coefficient, factors if known is None else factors.and_(known)
    norm = found.on_host()
    if skips and not math.isfinite(norm):
        run.skipped_steps += 1
        run.offender = found
        return None, None
    if options.max_grad_norm is None:
        return coefficient, None
    return coefficient * norms.clip_coefficient(norm, options.max_grad_norm), None


def _rejected(opt: FusedAccumAdamW, buckets: list[Bucket], factor: float) -> bool:
    """Whether the collected micro-batch is not finite and is to be skipped; its gradients are gone then."""
    run = opt._run
    if run.options.skip_nonfinite != "microbatch":
        return False
    for bucket in buckets:
        bucket.measure_gradients(factor)
    found = norms.Norms(buckets, 1.0)
    if found.nonfinite() is None:
        return False
    run.offender = found
    run.skipped_microbatches += 1
    run.window.rejected += 1
    for bucket in buckets:
        bucket.drop_gradients()
    return True


def _without_state(opt: FusedAccumAdamW) -> list[Tensor]:
    return [p for group in opt.param_groups for p in group["params"] if not opt.state.get(p)]


def _abandon_window(opt: FusedAccumAdamW, buckets: list[Bucket], found_inf: bool) -> str | None:
    """End the window without an update: a gradient is not finite, or there is nothing to divide by."""
    run = opt._run
    for bucket in buckets:
        bucket.drop_gradients()
        bucket.clear_aliases()
    count = run.window.microbatches
    _discard(opt)
    if run.backward is not None:
        run.backward.discarded()
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
        run.half_applied = "GradScaler's scaled gradients were used as they were"
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


def _amp_factors(amp: tuple[Any, Any] | None, buckets: list[Bucket], on_device: bool) -> tuple[float, bool]:
    """(1 / grad_scale, found_inf); (1, False) where there are none, and where all buckets heed them on the device,
    which ``on_device`` allows: a norm of the unscaled gradient needs them here."""
    if amp is None:
        return 1.0, False
    grad_scale, found_inf = amp
    if on_device and all(bucket.reads_factors(grad_scale, found_inf) for bucket in buckets):
        for bucket in buckets:
            bucket.factors = amp
        return 1.0, False
    return 1.0 if grad_scale is None else 1.0 / float(grad_scale), float(found_inf) != 0
