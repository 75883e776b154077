"""The optimizer's methods for accumulation by backward itself."""

from __future__ import annotations

from typing import Any

from .in_backward import Handle
from .runtime import Runtime


class BackwardModes:
    """Part of FusedAccumAdamW."""

    _run: Runtime
    param_groups: list[dict[str, Any]]

    def accumulate_in_backward(self) -> Handle:
        """Let every backward accumulate into the buffers: no ``accumulate()``, and gradients freed one by one.

        From the first micro-batch on ``p.grad`` is the parameter's buffer (``accum_dtype``, also for bf16 parameters:
        ``p.grad_dtype`` is set to None), and autograd adds into it. ``p.grad`` is the authority: what clips,
        unscales, replaces or clears it changes what ``step()`` uses, and a parameter takes part when its ``p.grad``
        is not None. A ``g = p.grad`` kept across ``step()`` reads zero.

        Parameters added or unfrozen later are included. A backward that fails in the middle is noticed: the next
        backward, ``accumulate()`` or ``step()`` raises until ``zero_grad()``.

        Returns:
            A handle; ``remove()`` takes the hooks out, as does leaving ``with`` it. A window that is open then can
            still be stepped.

        Raises:
            RuntimeError: explicit micro-batches are pending; this optimizer, or another one with a parameter of this
                one, accumulates in backward already.
        """
        with self._run.exclusive("accumulate_in_backward"):
            return Handle(self._run.start_backward(self.param_groups))

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
