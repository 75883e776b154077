"""What changes buffers, or parameters, and the window's books: both or neither, whatever exception a signal handler
raises in between. Where one ends a kernel written in Python half way, ``run.torn`` or ``run.half_applied`` stays,
which every later call refuses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from . import norms
from .buckets import Bucket
from .buffers import STEPPED, TAKEN, WRITING
from .norms import there
from .skipping import Count
from .state import Hyper

if TYPE_CHECKING:
    from .optimizer import FusedAccumAdamW
    from .runtime import Runtime


def release(buckets: list[Bucket]) -> None:
    for bucket in buckets:
        bucket.release()


def take(run: Runtime, buckets: list[Bucket], factor: float | Tensor | None, books: tuple) -> None:
    """Add what was collected to the buffers, or drop it (factor None), and write the books."""
    try:
        run.torn = "accumulate"
        _take(run, buckets, factor, books)
    except BaseException:
        progress = [bucket.progress() for bucket in buckets]
        if WRITING not in progress:
            if TAKEN in progress or any(bucket.counts is not None for bucket in buckets):
                _take(run, [b for b, at in zip(buckets, progress) if at != TAKEN], factor, books)
            else:
                run.torn = None
        raise


def _take(run: Runtime, buckets: list[Bucket], factor: float | Tensor | None, books: tuple) -> None:
    for bucket in buckets:
        if factor is None:
            bucket.drop_gradients()
        else:
            bucket.accumulate(there(factor, bucket.device))
    run.window.write(books)
    run.torn = None


def take_rest(opt: FusedAccumAdamW, buckets: list[Bucket], factor: float | Tensor, books: tuple) -> None:
    """After an exception in a step that has added a part of its micro-batch to the buffers: add the rest."""
    run = opt._run
    progress = [bucket.progress() for bucket in buckets]
    if WRITING in progress:
        return
    if TAKEN in progress or any(bucket.counts is not None for bucket in buckets):
        buckets, _ = run.collect(opt.param_groups, buffers=True)
        try:
            _take(run, buckets, factor, books)
        finally:
            release(buckets)
    run.torn = None


def update(
    opt: FusedAccumAdamW, buckets: list[Bucket], books: tuple | None, skipped: Count, step: tuple
) -> str | None:
    """Step and write the books; what to warn of. step: hypers, factor, coefficient, factors."""
    run = opt._run
    try:
        run.half_applied = "an exception in the middle of step()"
        return _step(opt, buckets, books, skipped, *step)
    except BaseException:
        progress = [bucket.progress() for bucket in buckets]
        if WRITING not in progress:
            if STEPPED in progress:
                for bucket, at in zip(buckets, progress):
                    if at == STEPPED:
                        bucket.consumed(bucket.present)
                _step(opt, [b for b, at in zip(buckets, progress) if at != STEPPED], books, skipped, *step)
            else:
                run.half_applied = None
        raise


def _step(
    opt: FusedAccumAdamW, buckets: list[Bucket], books: tuple | None, skipped: Count,
    hypers: list[Hyper], factor: float | Tensor, coefficient: float, factors: norms.Factors | None,
) -> str | None:  # fmt: skip
    run = opt._run
    for bucket in buckets:
        there_too = factors and factors.on(bucket.device)
        bucket.step(opt.state, hypers, there(factor, bucket.device), coefficient, there_too)
    if books is not None:
        run.window.write(books)
    run.skipped_steps = skipped
    message = run.window.close()
    if run.backward is not None:
        run.backward.stepped()
    run.torn = run.half_applied = None
    return message


def drop_window(opt: FusedAccumAdamW, buckets: list[Bucket], skipped: Count) -> None:
    """End the window without an update, as a skipped step of that count."""
    try:
        _drop_all(opt, buckets, skipped)
    except BaseException:
        _drop_all(opt, buckets, skipped)
        raise


def _drop_all(opt: FusedAccumAdamW, buckets: list[Bucket], skipped: Count) -> None:
    """May be repeated after an exception in here."""
    run = opt._run
    run.torn = "zero_grad"
    run.skipped_steps = skipped
    for bucket in buckets:
        bucket.drop_gradients()
        bucket.clear_aliases()
    discard(opt)
    if run.backward is not None:
        run.backward.discarded()
    run.torn = None


def discard(opt: FusedAccumAdamW) -> None:
    """Drop the open window, and the state that only it has called for."""
    if opt._run.window.began_state:
        for group in opt.param_groups:
            for p in group["params"]:
                opt.state.pop(p, None)
    opt._run.discard()
