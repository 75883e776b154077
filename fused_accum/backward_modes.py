"""The optimizer's methods for accumulation by backward itself."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from .direct_wgrad import DirectHandle
from .entry import one_graph_break
from .in_backward import Handle
from .main_grad import MainGrad
from .runtime import Runtime
from .scale_loss import scale_loss
from .step_in_backward import StepInBackward
from .window import count_as_scale, number, refuse_extremes

HALF_LARGEST = torch.finfo(torch.float16).max


class BackwardModes:
    """Part of FusedAccumAdamW."""

    _run: Runtime
    param_groups: list[dict[str, Any]]

    @property
    def accumulates_in_backward(self) -> bool:
        """Whether ``p.grad`` holds the open window: hooks are installed, or were when it began."""
        return self._run.backward is not None

    def accumulate_in_backward(self) -> Handle:
        """Let every backward accumulate into the buffers: no ``accumulate()``, and gradients freed one by one.

        From the first micro-batch on ``p.grad`` is the parameter's buffer (``accum_dtype``, also for bf16 parameters:
        ``p.grad_dtype`` is set to None), and autograd adds into it. ``p.grad`` is the authority: what clips,
        unscales, replaces or clears it changes what ``step()`` uses, and a parameter takes part when its ``p.grad``
        is not None. A ``g = p.grad`` kept across ``step()`` reads zero.

        A window that ``load_state_dict`` has restored is taken over: its sums become ``p.grad``. Parameters added or
        unfrozen later are included. A backward that fails in the middle is noticed: the next
        backward, ``accumulate()`` or ``step()`` raises until ``zero_grad()``.

        Returns:
            A handle; ``remove()`` takes the hooks out, as does leaving ``with`` it. A window that is open then can
            still be stepped.

        Raises:
            RuntimeError: explicit micro-batches are pending; a p.grad is in the place of a restored sum; this
                optimizer, or another one with a parameter of this one, accumulates in backward already.
        """
        with self._run.exclusive("accumulate_in_backward") as _held:
            return Handle(self._run.start_backward(self.param_groups))

    def direct_wgrad(self, model: nn.Module, *, check: bool = False) -> DirectHandle:
        """``accumulate_in_backward()``, with weight gradients that are never a tensor: a GEMM adds into the buffer.

        Covers nn.Linear, nn.Embedding and transformers' Conv1D in ``model``, with their biases; the forward of those
        layers is replaced. Every other parameter of the optimizer accumulates in backward as ever. A subclass, and a
        layer that is hooked, parametrized or has options that need its whole gradient, stays ordinary: the handle's
        ``direct`` and ``ordinary`` list both, with the reason. ``copy.deepcopy`` of the model is an ordinary model.

        Hooks on a covered weight see no gradient. ``torch.autograd.grad`` and ``create_graph=True`` with respect to
        it raise. Within ``torch.compile(fullgraph=True)`` the forward raises; without ``fullgraph`` the graph breaks.

        Args:
            check: count contributions per parameter; ``step`` raises, naming the parameter, when it did not get the
                same number in every backward of the window (or its ``p.grad`` was discarded in between).

        Raises:
            ValueError: the model has no parameter of this optimizer. Otherwise as ``accumulate_in_backward``, where
                that is not installed yet.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(f"direct_wgrad() got a {type(model).__name__}; it needs the model, an nn.Module, itself")
        own = {id(p) for group in self.param_groups for p in group["params"]}
        if not any(id(p) in own for p in model.parameters()):
            raise ValueError(
                f"direct_wgrad() got a {type(model).__name__} of whose parameters none is this optimizer's (a copy "
                "of the model, or another one?); give it the model whose parameters() the optimizer was given"
            )
        with self._run.exclusive("direct_wgrad") as _held:
            session = self._run.backward
            owns = session is None or not session.installed
            if owns:
                session = self._run.start_backward(self.param_groups)
            elif session.direct or type(session) is MainGrad:
                raise RuntimeError("direct_wgrad() or attach_main_grad() is installed already; remove() that first")
            handle = DirectHandle(session, model, owns, check)
        if not handle.direct:
            name, why = next(iter(handle.ordinary.items()))
            warnings.warn(
                f"direct_wgrad() covers no parameter of this {type(model).__name__}: {name}: {why} (the handle's "
                "ordinary lists all). It is as accumulate_in_backward() here",
                UserWarning,
                stacklevel=2,
            )
        return handle

    def attach_main_grad(self) -> Handle:
        """``accumulate_in_backward()``, with each buffer also as ``p.main_grad``, for layers that add to that.

        For Megatron-Core's and TransformerEngine's layers with gradient accumulation fusion: their backward does
        ``p.main_grad += dY^T X`` and returns no gradient, or a dummy where ``p.grad_added_to_main_grad`` exists
        (``zero_out_wgrad`` is honoured). ``main_grad`` (``accum_dtype``, the parameter's shape, contiguous) stays the
        same memory until ``remove()``, reads zero when a window begins, and becomes ``p.grad`` once the parameter has
        a contribution. Parameters of other layers accumulate in backward as ever.

        Discard with the optimizer's ``zero_grad()``: layers would add to what another one leaves in ``main_grad``; a
        ``p.grad`` cleared or replaced in mid-window raises in the next backward. A parameter whose backward ran takes
        part in the step even if its layer added nothing.

        Raises:
            RuntimeError: as ``accumulate_in_backward``; a parameter that is not contiguous.
        """
        with self._run.exclusive("attach_main_grad") as _held:
            return Handle(self._run.start_backward(self.param_groups, kind=MainGrad))

    @one_graph_break
    def scale_loss(
        self, loss: Tensor, scale: float | Tensor = 1.0, *, weight: float | Tensor | None = None
    ) -> Tensor:
        """What ``accumulate(scale, weight=weight)`` is in explicit mode: call backward on what this returns.

        With weights (the token count of a mean loss) ``step`` divides by their sum over the window, as there. A
        weight is recorded when the backward of its loss finishes; a loss that is never backpropagated adds none, and
        setting all ``p.grad`` to None discards the weights. A weight of 0 sends no gradient down, not even NaN.

        While weights are recorded ``p.grad`` is the sum not yet divided by them: changing it (clipping) makes
        ``step`` raise.

        Args:
            loss: any tensor with a graph; not mutated.
            scale, weight: number or 0-dim tensor, as for ``accumulate``; all losses of a window have a weight or none
                has. A tensor on a GPU stays there and is not checked: nothing waits for it (backends "cuda" and
                "triton"); a weight of 0 then sends zeros down, and a window of them is dropped without a warning.

        Returns:
            ``scale * weight * loss``.

        Raises:
            RuntimeError: not accumulating in backward, or no longer; a p.grad from before, with a weight.
            ValueError: scale or weight out of range (with float16 gradients above 65504 too); a loss that has a
                weight already; weights mixed with none (a backward without ``scale_loss`` in a weighted window raises
                when it finishes, and ``step`` then until ``zero_grad``).
        """
        count = count_as_scale(scale, weight)
        scale = number("scale", scale)
        weight = None if weight is None else number("weight", weight)
        refuse_extremes(scale, weight)
        with self._run.exclusive("scale_loss") as _held:
            self._run.refuse_missing_hooks("scale_loss")
            if self._run.backward is None:
                raise RuntimeError(
                    "scale_loss() is for accumulation in backward; call accumulate_in_backward() first, or give the "
                    "factor to accumulate() and step()"
                )
            if not self._run.backward.installed:
                raise RuntimeError(
                    "scale_loss() in a window whose handle was removed before its end: no hook would record the "
                    "factor; p.grad still holds the window: end it with step(), or drop it with zero_grad(), or call "
                    "accumulate_in_backward() (or direct_wgrad()) again, first"
                )
            self._refuse_half_overflow(loss, scale, weight)
            scaled = scale_loss(self._run.backward, loss, scale, weight)
        if message := self._run.window.once("count", count):
            warnings.warn(message, UserWarning, stacklevel=3)
        return scaled

    def _refuse_half_overflow(self, loss: Tensor, scale: float | Tensor, weight: float | Tensor | None) -> None:
        """Raise ValueError for a weight that takes float16 gradients, which it multiplies, out of their range."""
        factor = scale if weight is None else scale * weight
        if weight is None or isinstance(factor, Tensor) or factor <= HALF_LARGEST:
            return
        params = (p for group in self.param_groups for p in group["params"])
        if loss.dtype == torch.float16 or any(p.dtype == torch.float16 for p in params):
            raise ValueError(
                f"scale_loss(weight={weight:g}) with float16 gradients, which backward computes from the weighted "
                f"loss: scale * weight must be at most {HALF_LARGEST:.0f} there, float16's largest. Weights are in "
                "any unit: divide all weights of a window by one number"
            )

    def step_in_backward(self) -> StepInBackward:
        """A context manager around the backward of a window's last micro-batch: the update happens inside.

        Each parameter is updated, and its gradient freed, as soon as that is complete (a tied weight after its last
        use): the kernel reads the buffer and the last gradient, updates, and zeroes the buffer. The result is that of
        the explicit path, bit for bit. Leaving it calls ``step()``, which updates what had no gradient in this
        micro-batch and runs step hooks. Works in every mode; in explicit mode ``scale_loss`` inside it gives the last
        micro-batch its scale or weight.

        Raises:
            RuntimeError: inside a backward; reentrant checkpointing (where it is seen before any update, on entry);
                a second backward inside; after GradScaler.

        An exception inside leaves some parameters updated and others not: every later call raises until
        ``load_state_dict``.
        """
        return StepInBackward(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch.optim's; its parameters are covered by the hooks of a backward mode at once."""
        super().add_param_group(param_group)
        backward = self._run.backward
        if backward is not None and backward.installed:
            try:
                self._run.buckets(self.param_groups)
            except BaseException:
                self.param_groups.pop()
                raise
