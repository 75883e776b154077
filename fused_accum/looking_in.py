"""What an optimizer tells of itself: the open window, norms, what was skipped, its backends."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from .runtime import Runtime
from .window import Pending


class BackendRow(NamedTuple):
    """How many parameters run on which backend, and why."""

    parameters: int
    backend: str
    reason: str


class LookingIn:
    """Part of FusedAccumAdamW."""

    _run: Runtime
    param_groups: list[dict[str, Any]]

    @property
    def pending(self) -> Pending:
        """``(microbatches, weight)`` of the open window: how many had a gradient, the sum of their weights.

        While accumulating in backward, how many backwards have finished. Reading it waits for a GPU that holds a
        weight, or that has judged micro-batches (``skip_nonfinite="microbatch"``).
        """
        if self._run.backward is not None:
            self._run.backward.settle()
        self._run.settle()
        return self._run.window.pending

    @property
    def grad_norm(self) -> Tensor | None:
        """The global L2 norm of the last stepped (or skipped) window's gradient before clipping, a new 0-dim tensor.

        Of what the update uses: divided by the sum of weights and by GradScaler's scale. float32, or float64 where a
        parameter is. None before the first step, and without ``max_grad_norm`` and ``skip_nonfinite="step"``.
        """
        found = self._run.norms
        return None if found is None else found.total().to(found.dtype)

    def grad_norms(self) -> dict[Tensor, Tensor]:
        """The L2 norm of every parameter's part of ``grad_norm``'s gradient, 0-dim, by parameter; those without a
        contribution are left out; where only a GPU knows that, they are 0. Empty where ``grad_norm`` is None."""
        found = self._run.norms
        return {} if found is None else found.each()

    @property
    def skipped_steps(self) -> int:
        """How many steps ``skip_nonfinite="step"`` has dropped (those that GradScaler drops are not counted).

        On a GPU reading it waits for the device.
        """
        return self._run.skipped_steps.read()

    @property
    def skipped_microbatches(self) -> int:
        """How many micro-batches ``skip_nonfinite="microbatch"`` has rejected.

        On a GPU reading it waits for the device.
        """
        return self._run.window.rejections.read()

    @property
    def nonfinite_parameter(self) -> str | None:
        """The name of the first parameter with an inf or a NaN in what was skipped last; None: nothing was.

        On a GPU reading it waits for the device.
        """
        found = self._run.offender
        return None if found is None else found.nonfinite()

    @property
    def backends(self) -> list[BackendRow]:
        """``(parameters, backend, reason)`` for every bucket of parameters."""
        buckets = self._run.buckets(self.param_groups)
        return [BackendRow(len(bucket.params), bucket.backend.name, bucket.reason) for bucket in buckets]
