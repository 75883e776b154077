"""What is skipped because it is not finite, and who knows: the host, or the device alone, for which nothing waits.

Where the device decides, it multiplies what is skipped by 0, which adds nothing there, not even NaN, and a step
updates only parameters that something was added for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from . import norms

if TYPE_CHECKING:
    from .buckets import Bucket
    from .runtime import Runtime


class Count(NamedTuple):
    """How many were skipped: ``known`` to the host, and of ``judged`` more those that have not ``passed``.

    passed: 0-dim int64 on a device; None: that has judged none.
    """

    known: int = 0
    judged: int = 0
    passed: Tensor | None = None

    def one_more(self) -> Count:
        return self._replace(known=self.known + 1)

    def judge(self, passes: Tensor) -> Count:
        """With one more, which only the device knows to be skipped or not."""
        passed = passes.long() if self.passed is None else self.passed + passes.to(self.passed.device)
        return Count(self.known, self.judged + 1, passed)

    def read(self) -> int:
        """The number; waits for a device that has judged."""
        return self.known + (0 if self.passed is None else self.judged - int(self.passed))


class Offender:
    """What was skipped last, where only the device knows whether it was now or before: a row's sum of squares."""

    def __init__(self, buckets: Sequence[Bucket], passes: Tensor, before: Offender | norms.Norms | None) -> None:
        known = {id(params): squares for params, _, squares in before.parts} if type(before) is Offender else {}
        self.parts = []
        for bucket in buckets:
            squares = bucket.by_row()
            if id(bucket.params) in known:
                there = passes.to(bucket.device, non_blocking=True)
                squares = torch.where(there, known[id(bucket.params)], squares)
            self.parts.append((bucket.params, bucket.name_of, squares))

    def nonfinite(self) -> str | None:
        """The name of the first parameter that was not finite; waits for the device."""
        for params, name_of, squares in self.parts:
            for p, square in zip(params, squares.tolist()):
                if not math.isfinite(square):
                    return name_of(p)
        return None


def on_host(run: Runtime, buckets: Sequence[Bucket]) -> bool:
    """Whether norms, and what is skipped for them, must be known to the host: for parameters there, and for a backend
    that cannot skip."""
    skips = run.options.skip_nonfinite is not None
    return any(b.device.type == "cpu" or (skips and not b.backend.decides_on_device) for b in buckets)


def accepted(
    run: Runtime,
    buckets: Sequence[Bucket],
    factor: float | Tensor,
    weight: float | Tensor | None,
    dropped: Tensor | None = None,
) -> tuple[float | Tensor, float | Tensor | None, Count] | None:
    """Factor and weight of the collected micro-batch, of which nothing has been added, 0 on the device where that
    rejects it, and how many then were rejected; None where the host rejects it.

    dropped: on the device, not 0 where the whole window is dropped anyway, which is no rejection.
    """
    window = run.window
    if run.options.skip_nonfinite != "microbatch":
        return factor, weight, window.rejections
    for bucket in buckets:
        bucket.measure_gradients(norms.there(factor, bucket.device))
    found = norms.Norms(buckets, 1.0)
    if on_host(run, buckets):
        if found.nonfinite() is None:
            return factor, weight, window.rejections
        run.offender = found
        return None
    passes = found.finite()
    if dropped is not None:
        passes = passes | (dropped != 0).to(passes.device)
    passes = passes.to(buckets[0].device, non_blocking=True)
    run.offender = Offender(buckets, passes, run.offender)
    weight = None if weight is None else where(passes, weight)
    return where(passes, factor), weight, window.rejections.judge(passes)


def where(passes: Tensor, number: float | Tensor) -> Tensor:
    """``number`` where ``passes``, else 0; 0-dim float64 on the device of ``passes``."""
    if isinstance(number, Tensor):
        return torch.where(passes, number, 0.0)
    return passes.double() * number


def judge(
    run: Runtime, buckets: Sequence[Bucket], coefficient: float, known: norms.Factors | None
) -> tuple[float | None, norms.Factors | None, Count]:
    """The clipped coefficient of a step (None: skip it), what of it only the device knows (``known``: as yet), and
    how many steps then were skipped."""
    options, skipped = run.options, run.skipped_steps
    if not any(bucket.measured for bucket in buckets):
        return coefficient, known, skipped
    whole = coefficient if known is None or known.clip is None else coefficient * known.clip
    run.norms = found = norms.Norms(buckets, whole)
    skips = options.skip_nonfinite == "step"
    if not on_host(run, buckets):
        factors = norms.factors(found.total(), options.max_grad_norm, skips)
        if skips:
            passes = factors.skip == 0
            if known is not None and known.skip is not None:
                passes = passes | (known.skip != 0).to(passes.device)
            skipped = skipped.judge(passes)
            run.offender = Offender(buckets, passes, run.offender)
        return coefficient, factors if known is None else factors.and_(known), skipped
    norm = found.on_host()
    if skips and not math.isfinite(norm):
        run.offender = found
        return None, None, skipped.one_more()
    if options.max_grad_norm is None:
        return coefficient, known, skipped
    return coefficient * norms.clip_coefficient(norm, options.max_grad_norm), known, skipped
