"""FusedAccumAdamW: torch.optim.AdamW with the gradient accumulation inside."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from . import checkpoint
from .buckets import Bucket
from .runtime import Runtime
from .state import Hyper, Options
from .window import Pending, host_number


class BackendRow(NamedTuple):
    """How many parameters run on which backend, and why."""

    parameters: int
    backend: str
    reason: str


class FusedAccumAdamW(torch.optim.AdamW):
    r"""AdamW that accumulates micro-batches itself: one persistent buffer, one fused pass per micro-batch.

    A window is the micro-batches of one update. ``accumulate()`` adds each ``p.grad`` into the parameter's buffer
    and frees it; ``step()`` adds what is left in ``p.grad``, updates, and zeroes the buffer, in one pass. Without
    ``accumulate()`` it is a fused torch.optim.AdamW that reads ``p.grad`` and allocates no buffer.

    Update: Loshchilov & Hutter, arXiv 1711.05101, as torch.optim.AdamW computes it, in float32 (float64 for
    float64 parameters); ``state[p]["step"]`` counts the updates in which ``p`` had a gradient.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize: as in torch.optim.AdamW.
        foreach, capturable, fused: accepted for swap-in; no effect on the CPU (``fused=True`` lets
            torch.amp.GradScaler hand its scale to ``step``).
        differentiable: must be False.
        accum_dtype: dtype of the buffers: float32 or bfloat16 (float64 for float64 parameters).
        state_dtype: dtype of exp_avg, exp_avg_sq, max_exp_avg_sq: float32 or bfloat16 (float64 for float64
            parameters); None: the parameter's, as torch.
        backend: "auto", or a name from ``python -m fused_accum``.

    Raises:
        ValueError, TypeError, RuntimeError: what torch.optim.AdamW raises, and for options of ours out of range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        accum_dtype: torch.dtype = torch.float32,
        state_dtype: torch.dtype | None = torch.float32,
        backend: str = "auto",
    ) -> None:
        if differentiable:
            raise ValueError(
                "differentiable=True: the fused update writes in place and records no graph; use "
                "torch.optim.AdamW(differentiable=True) to differentiate through the optimizer"
            )
        self._run = Runtime(Options.checked(accum_dtype, state_dtype, backend))
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )

    # -- a window -------------------------------------------------------------------------------------------

    @torch._disable_dynamo
    def accumulate(self, scale: float | Tensor = 1.0, *, weight: float | Tensor | None = None) -> None:
        """Add one micro-batch: ``buffer += scale * weight * p.grad`` for every parameter, then ``p.grad = None``.

        Equation (1) of the README. With weights, ``step`` divides by the window's sum of weights: pass the token
        count of a mean loss, and the update is that of one batch over all tokens. Gradients that are None are
        left alone; a call that finds no gradient at all counts nothing. Gradients are never written to.

        Args:
            scale: number or 0-dim tensor, finite, >= 0.
            weight: number or 0-dim tensor, finite, >= 0, in any unit (tokens, samples); all micro-batches of a
                window have one or none has. 0 skips the add, even of NaN.

        Raises:
            ValueError: scale or weight out of range; weights mixed with none.
            TypeError, RuntimeError: a gradient or parameter that cannot be used (sparse, on another device,
                requiring grad, cast or moved in mid-window); called in a backward or concurrently. Nothing has
                changed then.
        """
        scale, weight = _host_factors(scale, weight)
        with self._run.exclusive("accumulate"):
            self._take_microbatch(scale, weight)

    @torch._disable_dynamo
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        scale: float | Tensor = 1.0,
        weight: float | Tensor | None = None,
    ) -> Any:
        """End the window: add what is left in ``p.grad`` as its last micro-batch, update, zero the buffers.

        Equations (2) to (6) of the README. ``step(scale, weight=w)`` equals ``accumulate(scale, weight=w);
        step()`` bit for bit. Parameters without a contribution are untouched, their state too. Consumed gradients
        are None afterwards; unlike torch's, a second ``step()`` therefore does nothing.

        Args:
            closure: evaluated first, with grad enabled; its gradients count (it may call ``accumulate``).
            scale, weight: of the last micro-batch, as in ``accumulate``; unused when no gradient is left.

        Returns:
            The closure's result, or None.

        Raises:
            As ``accumulate``; RuntimeError also when GradScaler steps with explicit contributions pending.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale, weight = _host_factors(scale, weight)
        with self._run.exclusive("step"):
            message = self._end_window(scale, weight)
        if message:
            warnings.warn(message, UserWarning, stacklevel=4)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard everything not yet stepped: ``p.grad`` as torch does, and the open window, with a warning.

        After an exception in a backward, ``discard_microbatch()`` keeps the window instead.
        """
        with self._run.exclusive("zero_grad"):
            dropped = self._run.window.microbatches
            self._run.discard()
            super().zero_grad(set_to_none)
        if dropped:
            warnings.warn(
                f"zero_grad() dropped {dropped} accumulated micro-batch(es) that were not stepped; call it only "
                "after step() (where it is not needed), or discard_microbatch() to drop the last gradients alone",
                UserWarning,
                stacklevel=2,
            )

    def discard_microbatch(self) -> None:
        """Set every ``p.grad`` to None and keep the window: what to do when a backward was not finished."""
        with self._run.exclusive("discard_microbatch"):
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad = None

    def _take_microbatch(self, scale: float, weight: float | None) -> None:
        """Add the gradients in ``p.grad`` to the open window, or only count them where their factor is zero."""
        run = self._run
        factor = _factor(scale, weight)
        buckets, found = run.collect(self.param_groups, buffers=factor != 0)
        try:
            if not found:
                return
            run.window.refuse_mixing(weight)
            # Counted before the kernels run: an interrupt during them is raised right after, never between.
            run.window.add(scale, weight)
            for bucket in buckets:
                if factor != 0:
                    bucket.accumulate(factor)
                else:
                    bucket.drop_gradients()
        finally:
            _release(buckets)

    def _end_window(self, scale: float, weight: float | None) -> str | None:
        """The pipeline of a step: collect, coefficient, update, clear. Returns what to warn of."""
        run = self._run
        amp = self._amp_tensors()
        if _factor(scale, weight) == 0:
            self._take_microbatch(scale, weight)
        buckets, found = run.collect(self.param_groups, buffers=False)
        try:
            if found:
                run.window.refuse_mixing(weight)
            inverse_grad_scale, found_inf = _amp_factors(amp, buckets)
            total = run.window.total_weight(weight if found else None)
            if found_inf or (total == 0 and run.window.microbatches):
                return self._abandon_window(buckets, found_inf)
            hypers = [Hyper.of(group) for group in self.param_groups]
            for bucket in buckets:
                bucket.prepare(self.state, self.param_groups, hypers)
            if found:
                run.window.add(scale, weight)
            message = run.window.close()
            coefficient = (1.0 if total is None else 1.0 / total) * inverse_grad_scale
            for bucket in buckets:
                bucket.step(self.state, hypers, _factor(scale, weight), coefficient)
            return message
        finally:
            _release(buckets)

    def _abandon_window(self, buckets: list[Bucket], found_inf: bool) -> str | None:
        """End the window without an update: GradScaler found an inf, or there is nothing to divide by."""
        for bucket in buckets:
            bucket.drop_gradients()
        count = self._run.window.microbatches
        self._run.discard()
        if found_inf:
            return None
        return (
            f"the weights of this window's {count} micro-batch(es) add up to 0: there is nothing to average, so "
            "no parameter was updated and the window is closed"
        )

    # -- GradScaler -----------------------------------------------------------------------------------------

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Makes torch.amp.GradScaler call ``step`` itself with ``grad_scale`` and ``found_inf`` set: where it was
        asked for (fused=True), and while a window is open, so that ``step`` can refuse."""
        return self._run.amp_requested or self._run.window.microbatches > 0

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        self._run.amp_requested = bool(value)

    def _amp_tensors(self) -> tuple[Any, Any] | None:
        """``grad_scale`` and ``found_inf`` as GradScaler has set them on the optimizer; it deletes them itself."""
        if not hasattr(self, "found_inf"):
            return None
        if self._run.window.microbatches:
            del self.found_inf, self.grad_scale
            raise RuntimeError(
                f"GradScaler.step() with {self._run.window.microbatches} explicit micro-batch(es) pending: the "
                "scaler inspects and unscales only p.grad, not the buffer, so the update would be wrong. "
                "Accumulate into p.grad instead (accumulate_in_backward(), or plain backward() calls without "
                "accumulate()), or use bfloat16 autocast, which needs no scaler"
            )
        return self.grad_scale, self.found_inf

    # -- looking in -----------------------------------------------------------------------------------------

    @property
    def pending(self) -> Pending:
        """``(microbatches, weight)`` of the open window: how many had a gradient, the sum of their weights."""
        return self._run.window.pending

    @property
    def backends(self) -> list[BackendRow]:
        """``(parameters, backend, reason)`` for every bucket of parameters."""
        buckets = self._run.buckets(self.param_groups)
        return [BackendRow(len(bucket.params), bucket.backend.name, bucket.reason) for bucket in buckets]

    # -- checkpoints ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """torch.optim.AdamW's state_dict; in mid-window also ``state[i]["accum"]`` and ``accum_*`` group entries.

        A run resumed from it continues bit-identically. Warns once in mid-window.
        """
        with self._run.exclusive("state_dict"), checkpoint.visible_window(self):
            result = super().state_dict()
        checkpoint.warn_mid_window_save(self._run)
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state_dict of this class or of torch.optim.AdamW; moments become ``state_dtype`` uncast by the
        parameter's dtype. An open window is discarded with a warning, a saved one restored."""
        run = self._run
        dropped = run.window.microbatches

        def remember(_: Any, incoming: dict[str, Any]) -> None:
            run.incoming = incoming

        with run.exclusive("load_state_dict"):
            handle = self.register_load_state_dict_pre_hook(remember)  # the last one sees what the others return
            try:
                super().load_state_dict(state_dict)
            finally:
                handle.remove()
                run.incoming = None
        if dropped:
            warnings.warn(
                f"load_state_dict() dropped {dropped} accumulated micro-batch(es) that were not stepped",
                UserWarning,
                stacklevel=2,
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), checkpoint.PICKLE_KEY: checkpoint.pickled(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        saved = state.pop(checkpoint.PICKLE_KEY, None)
        super().__setstate__(state)
        if saved is not None:
            checkpoint.unpickle(self, saved)
        elif self._run.incoming is not None:
            checkpoint.reinstate(self)


def _factor(scale: float, weight: float | None) -> float:
    return scale if weight is None else scale * weight


def _amp_factors(amp: tuple[Any, Any] | None, buckets: list[Bucket]) -> tuple[float, bool]:
    """(1 / grad_scale, found_inf); (1, False) where there are none, and where all buckets heed them on the device."""
    if amp is None:
        return 1.0, False
    grad_scale, found_inf = amp
    if all(bucket.reads_factors(grad_scale, found_inf) for bucket in buckets):
        for bucket in buckets:
            bucket.factors = amp
        return 1.0, False
    return 1.0 if grad_scale is None else 1.0 / float(grad_scale), float(found_inf) != 0


def _host_factors(scale: Any, weight: Any) -> tuple[float, float | None]:
    return host_number("scale", scale), None if weight is None else host_number("weight", weight)


def _release(buckets: list[Bucket]) -> None:
    for bucket in buckets:
        bucket.release()
