"""All mutable run-time state of an optimizer, in one object.

Wrappers (Lightning's) run the optimizer's methods with another ``self``: what they would assign to attributes
there must be mutated in place here.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from . import backends, checks
from ._native import same_objects
from .amp import Scaler
from .buckets import Bucket, Stale
from .buffers import Accum
from .exclusive import Exclusive
from .in_backward import InBackward
from .norms import Norms
from .skipping import Count, Offender
from .state import Options
from .window import Window


class Runtime:
    """owner: the optimizer itself, for a method that runs on a wrapper and must assign attributes."""

    def __init__(self, options: Options, owner: Optimizer) -> None:
        self.options = options
        self.owner = weakref.ref(owner)
        self.window = Window()
        self.amp_requested = False
        self.scaler: Scaler | None = None  # that stepped this optimizer last
        self.asked_with: weakref.ref | None = None  # a gradient when it asked; None since step or zero_grad
        self.incoming: dict[str, Any] | None = None
        self.warned_mid_window_save = False
        self.backward: InBackward | None = None  # p.grad, not the buckets, says what the open window holds
        self.hooks_missing = False  # a copy of an optimizer that accumulated in backward
        self.half_applied: str | None = None  # what has stopped a step in the middle; load_state_dict() helps
        self.torn: str | None = None  # the call that has the window in hand, or has left it so; zero_grad() helps
        self.stepped_in_backward = False  # the last window, and no backward since
        self.norms: Norms | None = None  # of the last step that needed them
        self.idle_steps = 0  # in a row, which found nothing
        self.offender: Offender | Norms | None = None  # what was skipped last
        self.skipped_steps = Count()
        self._groups: Sequence[dict[str, Any]] = []
        self._where: dict[int, tuple[Bucket, int]] = {}
        self._members: list[list[Tensor]] = []  # of every group
        self._buckets: list[Bucket] = []
        self.busy: dict[str, Exclusive] = {}  # the running call, as "holder"

    def exclusive(self, call: str) -> Exclusive:
        """``with run.exclusive(call) as _held``: see Exclusive. Between windows saving and loading compute nothing,
        so that they are torch's in a FakeTensorMode too."""
        if self.window.microbatches or call not in ("state_dict", "load_state_dict"):
            checks.refuse_fake_mode(call)
        return Exclusive(self, call)

    def refuse_half_applied(self, call: str) -> None:
        if self.half_applied is not None:
            raise RuntimeError(
                f"{call}: {self.half_applied} left some parameters updated and others not; load a checkpoint into "
                "the model and, with load_state_dict(), into the optimizer"
            )
        again = call == self.torn == "discard_microbatch"
        if self.torn is not None and call not in ("zero_grad", "state_dict") and not again:
            raise RuntimeError(
                f"{call}: an exception in the middle of {self.torn}() left the open window incomplete; call "
                "zero_grad() to drop it, then repeat its micro-batches"
            )

    def reseed(self, rounding_seed: int) -> None:
        """Go on with this seed; buckets, which hold it, are made anew."""
        if rounding_seed != self.options.rounding_seed:
            self.options = self.options._replace(rounding_seed=rounding_seed)
            self._members = []

    # -- accumulation in backward -----------------------------------------------------------------------------

    def start_backward(
        self, groups: Sequence[dict[str, Any]], explicit: bool = False, kind: type[InBackward] = InBackward
    ) -> InBackward:
        """Install hooks on all parameters of ``groups``; raises with nothing changed where that cannot be.

        explicit: whether explicit micro-batches may be pending.
        """
        if self.options.skip_nonfinite == "microbatch":
            raise RuntimeError(
                "skip_nonfinite='microbatch' rejects a micro-batch before any of it is added, but here backward adds "
                "each gradient as it comes; construct the optimizer with skip_nonfinite='step', or call accumulate() "
                "after every backward"
            )
        session = self.backward
        if session is not None and session.installed:
            raise RuntimeError("this optimizer already accumulates in backward; remove() the first handle before")
        restored = session is None and not explicit and self.window.restored > 0
        pending = self.window.microbatches - self.window.restored
        if session is None and pending and not explicit and not self.hooks_missing:
            raise RuntimeError(
                f"{pending} explicit micro-batch(es) are pending, which backward cannot add to; call step() or "
                "zero_grad() before accumulating in backward"
            )
        if session is None:
            session = kind(self)
        elif type(session) is not kind:
            raise RuntimeError("the window of another backward mode is still open; call step() or zero_grad() first")
        buckets = self.buckets(groups)
        if restored:
            self.refuse_gradients(buckets)
        session.cover(p for bucket in buckets for p in bucket.params)
        session.leftover = any(p.grad is not None for bucket in buckets for p in bucket.params)
        session.installed = True
        self.backward = session
        if self.hooks_missing or restored:
            self.hooks_missing = False
            self.window.restored = 0
            session.publish()
        return session

    def refuse_gradients(self, buckets: Sequence[Bucket]) -> None:
        """Raise where a gradient is in the place of a restored sum."""
        held = [p for bucket in buckets for p in bucket.params if p.grad is not None]
        if held:
            raise RuntimeError(
                f"p.grad of parameter {self.name_of(held[0])} holds a gradient from before, where the "
                f"{self.window.restored} micro-batch(es) are to be that load_state_dict() has restored: drop it with "
                "discard_microbatch(), and put its backward after this call"
            )

    def refuse_missing_hooks(self, call: str) -> None:
        if self.hooks_missing:
            raise RuntimeError(
                f"{call}() of a copy of an optimizer that accumulated in backward: hooks are not copied, so backward "
                "does not accumulate here; call accumulate_in_backward() (or direct_wgrad()) on the copy first; its "
                "remove() then leaves an ordinary optimizer"
            )

    # -- buckets --------------------------------------------------------------------------------------------

    def buckets(self, groups: Sequence[dict[str, Any]]) -> list[Bucket]:
        """The buckets of ``groups`` (param_groups), made anew when their parameters have changed."""
        self._groups = groups
        if not same_objects([group["params"] for group in groups], self._members):
            self.rebuild(groups)
            if self.backward is not None and self.backward.installed:
                self.backward.cover(p for bucket in self._buckets for p in bucket.params)
        return self._buckets

    def built(self) -> list[Bucket]:
        """The buckets of the groups last seen."""
        return self.buckets(self._groups)

    def find(self, p: Tensor) -> tuple[Bucket, int]:
        """The bucket of ``p`` and its row there."""
        found = self._where.get(id(p))
        if found is None or found[0].device != p.device:
            self.rebuild(self._groups)
            found = self._where[id(p)]
        return found

    def name_of(self, p: Tensor) -> str:
        return self.find(p)[0].name_of(p)

    def rebuild(self, groups: Sequence[dict[str, Any]]) -> None:
        """Sort the parameters of ``groups`` into buckets; buffers and open window are kept."""
        checks.refuse_fake_mode("optimizer")
        where: dict[torch.device, tuple[list[Tensor], list[int], list[int]]] = {}
        names: dict[int, str] = {}
        for index, group in enumerate(groups):
            for position, p in enumerate(group["params"]):
                if id(p) in names:
                    continue  # listed twice: one parameter, one update
                names[id(p)] = checks.name_in(group, index, position)
                members, owners, places = where.setdefault(p.device, ([], [], []))
                places.append(len(names) - 1)
                members.append(p)
                owners.append(index)

        def name_of(p: Tensor) -> str:
            return names[id(p)]

        for members, _, _ in where.values():
            for p in members:
                checks.check_options(names[id(p)], p, self.options)
        chosen = {device: self.choose(device) for device in where}
        for bucket in self._buckets:
            bucket.settle()
        accums = self.export()
        fresh = []
        for device, (members, owners, places) in where.items():
            backend, reason = chosen[device]
            bucket = backend.bucket_type(backend, reason, device, members, owners, name_of, self.options, places)
            bucket.adopt(accums)
            fresh.append(bucket)
        lost = sum(accum.present != 0 for accum in accums.values())
        if lost:
            warnings.warn(
                f"{lost} parameter(s) with contributions to the open window are no longer in param_groups; "
                "their part of the window is dropped (call step() before removing parameters)",
                UserWarning,
                stacklevel=5,
            )
        self._where = {id(p): (bucket, row) for bucket in fresh for row, p in enumerate(bucket.params)}
        self._buckets = fresh
        self._members = [list(group["params"]) for group in groups]  # last: if all of it was done

    def choose(self, device: torch.device) -> tuple[backends.Backend, str]:
        if device.type == "meta":  # a gradient there is refused; the parameter may be materialized before it has one
            return backends.registry()["reference"], "no data yet"
        return backends.choose(self.options.backend, device)

    def collect(self, groups: Sequence[dict[str, Any]], buffers: bool) -> tuple[list[Bucket], int]:
        """Validate all gradients of all buckets before anything changes; returns the buckets and their count."""
        while True:
            found = self.buckets(groups)
            try:
                return found, sum([bucket.collect(buffers) for bucket in found])
            except Stale:
                for bucket in found:
                    bucket.release()
                self.rebuild(groups)
            except BaseException:
                for bucket in found:
                    bucket.release()
                raise

    # -- the window's content -------------------------------------------------------------------------------

    def settle(self) -> None:
        """Learn what of the open window only a device knows: which micro-batches it has rejected, and so which
        parameters have a contribution. Waits for it."""
        for bucket in self._buckets:
            bucket.settle()
        self.window.settle()

    def export(self) -> dict[int, Accum]:
        accums: dict[int, Accum] = {}
        for bucket in self._buckets:
            accums.update(bucket.export())
        return accums

    def contributions(self) -> list[tuple[Tensor, Tensor]]:
        """(parameter, sum) of every parameter that has a contribution in the open window."""
        if self.backward is not None:
            return self.backward.sums()
        return [
            (p, a)
            for bucket in self._buckets
            for p, a, present in zip(bucket.params, bucket.accums, bucket.present)
            if present
        ]

    def has_whole_window(self) -> bool:
        """Whether a window is open, of whole micro-batches; warns when a failed backward has spoiled it."""
        if self.backward is not None:
            self.backward.settle()
        spoiled = self.spoiled()
        if spoiled is not None:
            warnings.warn(
                f"{spoiled}; the open window is left out of what is saved (zero_grad() drops it)",
                UserWarning,
                stacklevel=4,
            )
        return spoiled is None and self.window.microbatches > 0

    def spoiled(self) -> str | None:
        """Why the open window holds a part of a micro-batch, if it does."""
        if self.torn is not None:
            return f"an exception in the middle of {self.torn}() left the window incomplete"
        if self.backward is not None and self.backward.tasks.unfinished():
            return "a backward did not finish, so p.grad holds part of a micro-batch"
        return None

    def discard(self) -> None:
        """Drop the open window: its counts and its sums."""
        for bucket in self._buckets:
            bucket.clear_window()
        self.window.clear()

    def restore(self, groups: Sequence[dict[str, Any]], accums: dict[int, tuple[Tensor, Tensor]]) -> None:
        """Fill the buffers from ``accums`` (by ``id(parameter)``: parameter and saved sum) as the open window."""
        for bucket in self.buckets(groups):
            rows = [i for i, p in enumerate(bucket.params) if id(p) in accums]
            bucket.allocate([i for i in rows if bucket.accums[i] is None])
            for i in rows:
                with torch.no_grad():
                    bucket.accums[i].copy_(accums[id(bucket.params[i])][1])
                bucket.present[i] = 1
                bucket.known[i] = 0
        if self.backward is not None:
            self.backward.publish()
