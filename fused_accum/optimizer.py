"""FusedAccumAdamW: torch.optim.AdamW with the gradient accumulation inside."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from . import checkpoint, checkpoint_checks, norms, pipeline
from .amp import ScalerSupport
from .backward_modes import BackwardModes
from .entry import hooked, one_graph_break
from .looking_in import LookingIn
from .runtime import Runtime
from .state import GroupOption, Option, Options
from .window import count_as_scale


class FusedAccumAdamW(BackwardModes, LookingIn, ScalerSupport, torch.optim.AdamW):
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
        master_weights: for bfloat16 and float16 parameters. "fp32": ``state[p]["master"]`` is a float32 master, made
            from the parameter at its first update; updates work on it, and the parameter is what it rounds to. A
            parameter that is changed from outside (a loaded model) is not: there the next step starts from the
            parameter, element by element. "split", bfloat16 only: ``state[p]["master"]`` is int16, the 16 bits that
            the parameter lacks of the master (which it is, rounded to nearest with ties away from zero); a changed
            element counts as it is but for those bits, less than half a unit in its last place.
        stochastic_rounding: bfloat16 and float16 parameters without masters are rounded up or down by chance, so that
            the mean is exact. The random number depends on ``rounding_seed``, ``state[p]["step"]``, the parameter's
            place in the optimizer and the element's in the parameter alone.
        rounding_seed: int from 0 to 2**64 - 1. With ``stochastic_rounding`` it is in the ``state_dict`` (an entry of
            each group there), and a loaded one replaces it as a loaded lr does.
        max_grad_norm: clip the window's gradient (divided by the sum of weights and by GradScaler's scale) to this
            global L2 norm inside ``step``, with torch.nn.utils.clip_grad_norm_'s coefficient; None: no clipping.
        skip_nonfinite: "step": a window whose gradient has an inf or a NaN is dropped, parameters and state
            untouched; "microbatch" (explicit mode only): a micro-batch with one is rejected before any of it is added
            and its weight does not count; None: it is used as it is. On a GPU (backends "cuda" and "triton") the
            device decides, nothing waits for it, and there is no warning of a window of which all was rejected.
        backend: "auto", or a name from ``python -m fused_accum``.

    Options beyond torch's are attributes that can be read; setting one raises AttributeError.

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
        master_weights: str | None = None,
        stochastic_rounding: bool = False,
        rounding_seed: int = 0,
        max_grad_norm: float | None = None,
        skip_nonfinite: str | None = None,
        backend: str = "auto",
    ) -> None:
        options = Options.checked(
            accum_dtype, state_dtype, backend, master_weights, stochastic_rounding, rounding_seed
        )
        options = options._replace(
            max_grad_norm=norms.checked_max_grad_norm(max_grad_norm),
            skip_nonfinite=norms.checked_skip_nonfinite(skip_nonfinite),
        )
        self._run = Runtime(options, self)
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
        if differentiable:
            raise ValueError(
                "differentiable=True: the fused update writes in place and records no graph; use "
                "torch.optim.AdamW(differentiable=True) to differentiate through the optimizer"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch.optim.Optimizer's; ValueError for an option that only the whole optimizer can have."""
        whole = [name for name in Options._fields if isinstance(param_group, dict) and name in param_group]
        if whole:
            raise ValueError(
                f"a parameter group has {whole[0]}={param_group[whole[0]]!r}, an option of the whole optimizer: pass "
                f"{whole[0]}= to FusedAccumAdamW, or make an optimizer for each value"
            )
        super().add_param_group(param_group)

    # -- a window -------------------------------------------------------------------------------------------

    @one_graph_break
    def accumulate(self, scale: float | Tensor = 1.0, *, weight: float | Tensor | None = None) -> None:
        """Add one micro-batch: ``buffer += scale * weight * p.grad`` for every parameter, then ``p.grad = None``.

        Equation (1) of the README. With weights, ``step`` divides by the window's sum of weights: pass the token
        count of a mean loss, and the update is that of one batch over all tokens. Gradients that are None are
        left alone; a call that finds no gradient at all counts nothing. Gradients are never written to.

        Args:
            scale: number or 0-dim tensor; it, and its product with the weight, 0 or from 1e-18 to 1e18. Backends
                "cuda" and "triton" read tensors on the GPU there, unchecked: the host does not wait for them.
            weight: number or 0-dim tensor, 0 or from 1e-18 to 1e18, in any unit (tokens, samples); all micro-batches
                of a window have one or none has. 0 skips the add, even of NaN.

        Warns, once: an integer scale above 1, which looks like a count of tokens; no gradient and no open window.

        Raises:
            ValueError: scale or weight out of range; weights mixed with none.
            TypeError, RuntimeError: a gradient or parameter that cannot be used (sparse, on another device,
                requiring grad, cast or moved in mid-window); called in a backward or concurrently. Nothing has
                changed then.
        """
        count = count_as_scale(scale, weight)
        scale, weight = pipeline.factors_of(self, scale, weight)
        with self._run.exclusive("accumulate") as _held:
            messages = pipeline.take_microbatch(self, scale, weight), self._run.window.once("count", count)
        for message in filter(None, messages):
            warnings.warn(message, UserWarning, stacklevel=3)

    @hooked
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

        Warns, once each: as ``accumulate``; the sum of scales differs from the window before; the last scale seems
        forgotten; a factor that no gradient was left for; the third call in a row that finds nothing.

        Raises:
            As ``accumulate``; ValueError for hyper-parameters in a group that no step can use (not finite, betas
            outside [0, 1)); RuntimeError also when GradScaler steps with explicit contributions pending.
        """
        loss = self._run.asked_with = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        count = count_as_scale(scale, weight)
        scale, weight = pipeline.factors_of(self, scale, weight)
        with self._run.exclusive("step") as _held:
            messages = pipeline.end_window(self, scale, weight), self._run.window.once("count", count)
        for message in filter(None, messages):
            warnings.warn(message, UserWarning, stacklevel=4)
        return loss

    @one_graph_break
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard everything not yet stepped: ``p.grad`` as torch does, and the open window, with a warning.

        There is no warning while accumulating in backward, where ``p.grad`` is the window: GradScaler's loop clears
        so, rightly, what it skips.

        After an exception in a backward, ``discard_microbatch()`` keeps the window instead.
        """
        with self._run.exclusive("zero_grad") as _held:
            self._run.torn = "zero_grad"
            self._run.asked_with = None
            dropped = pipeline.discard_window(self)
            super().zero_grad(set_to_none)
            if self._run.backward is not None:
                self._run.backward.discarded()
            self._run.torn = None
        if dropped:
            warnings.warn(
                f"zero_grad() dropped {dropped} accumulated micro-batch(es) that were not stepped; call it only "
                "after step() (where it is not needed), or discard_microbatch() to drop the last gradients alone",
                UserWarning,
                stacklevel=3,
            )

    @one_graph_break
    def discard_microbatch(self) -> None:
        """Set every ``p.grad`` to None and keep the window: what to do when a backward was not finished.

        Raises RuntimeError while accumulating in backward, where ``p.grad`` is the window.
        """
        with self._run.exclusive("discard_microbatch") as _held:
            if self._run.backward is not None:
                raise RuntimeError(
                    "discard_microbatch() while accumulating in backward: p.grad holds the whole window, of which "
                    "one micro-batch cannot be taken out again; call zero_grad() and repeat the window"
                )
            self._run.torn = "discard_microbatch"
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad = None
            self._run.torn = None

    # -- checkpoints ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """torch.optim.AdamW's state_dict; in mid-window also ``state[i]["accum"]`` and ``accum_*`` group entries.

        With ``master_weights`` also ``state[i]["master"]``; with ``stochastic_rounding`` a group entry
        ``rounding_seed``. A run resumed from it continues bit-identically. Warns once in mid-window.
        """
        with self._run.exclusive("state_dict") as _held:
            result = checkpoint.state_dict(self)
        checkpoint.warn_mid_window_save(self._run)
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state_dict of this class or of torch.optim.AdamW; moments become ``state_dtype`` uncast by the
        parameter's dtype. An open window is discarded with a warning, a saved one restored. ValueError, with nothing
        loaded, for what lacks AdamW's entries, and for a saved window that is not whole."""
        run = self._run
        owner = run.owner()
        if owner is not self:  # the wrapper's attributes are not the optimizer's, which torch's loading assigns to
            owner.load_state_dict(state_dict)
            return
        dropped = run.window.microbatches

        def remember(_: Any, incoming: dict[str, Any]) -> None:
            checkpoint_checks.refuse_foreign(incoming)
            checkpoint_checks.refuse_other_masters(self, incoming)
            checkpoint_checks.refuse_partial_window(self, incoming)
            checkpoint_checks.saved_seed(self, incoming)
            run.incoming = incoming

        with run.exclusive("load_state_dict") as _held:
            handle = self.register_load_state_dict_pre_hook(remember)  # the last one sees what the others return
            try:
                super().load_state_dict(state_dict)
                run.half_applied = run.torn = None
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


for _name in Options._fields:
    setattr(FusedAccumAdamW, _name, Option(_name))
for _name in ("lr", "betas", "eps", "weight_decay"):
    setattr(FusedAccumAdamW, _name, GroupOption(_name))
