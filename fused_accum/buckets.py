"""Buckets: the parameters that one backend updates on one device, their buffers, and the way of a gradient.

A gradient goes one way: ``collect`` (validate, change nothing) -> ``accumulate`` or ``step`` (kernels) -> cleared.
A backend that can do the same faster subclasses ``Bucket`` and keeps its meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from . import checks, norms
from .buffers import BY_GRAD, NOTHING, STEPPED, TAKEN, WRITING, Buffers
from .rows import Rows
from .state import MASTER, PARAMETER_DTYPES, SPLIT, STATE, Hyper, Options, complete

if TYPE_CHECKING:
    from .backends.base import Backend


class Stale(Exception):
    """A parameter has moved to another device since the buckets were made: make them anew."""


class Bucket(Buffers):
    """Parameters of one device under one backend; entry i of every list belongs to ``params[i]``.

    Attributes:
        grads: what ``collect`` found; None before and after.
        known: not 0 where the sum of squares of what the buffer holds is kept from the pass that wrote it.
        measured, squares: rows, and the sums of squares (float64) that ``sum_up`` or ``measure_gradients`` found
            there.
    """

    def __init__(
        self,
        backend: Backend,
        reason: str,
        device: torch.device,
        params: Sequence[Tensor],
        groups: Sequence[int],
        name_of: Callable[[Tensor], str],
        options: Options,
        indices: Sequence[int],
    ) -> None:
        super().__init__(device, params, options)
        self.backend, self.reason = backend, reason
        self.groups, self.name_of = list(groups), name_of
        self.indices = list(indices)  # of the parameters in the optimizer
        self.known = bytearray(len(self.params))
        self.measured: list[int] = []
        self.squares: Tensor = torch.zeros(0, dtype=torch.float64, device=device)
        self.grads: Sequence[Tensor | None] | dict[int, Tensor | None] | None = None
        self.hypers: Sequence[Hyper] = ()  # of the groups, for ``step_row``
        self._progress = NOTHING

    # -- the way of a gradient ------------------------------------------------------------------------------

    def collect(self, buffers: bool) -> int:
        """Read and validate every gradient; with ``buffers`` also make the buffers they need. Returns how many.

        Raises Stale, or what ``checks`` raises, with nothing changed but buffers made.
        """
        self._progress = NOTHING
        self.grads = [p.grad for p in self.params]
        rows = [i for i, g in enumerate(self.grads) if g is not None]
        for i, g in enumerate(self.grads):
            if g is not None:
                self.check(i, g)
            elif self.present[i] == BY_GRAD:
                self.present[i] = 0
        if buffers:
            self.allocate([i for i in rows if self.accums[i] is None])
        return len(rows)

    def progress(self) -> int:
        """How far ``accumulate``, ``drop_gradients``, ``sum_up`` or ``step`` have come since ``collect``."""
        return self._progress

    def accumulate(self, scale: float | Tensor) -> None:
        """(1) for every collected gradient; sets those ``p.grad`` to None.

        scale: on backends that decide on the device also a 0-dim float64 there, where 0 adds nothing."""
        rows = [i for i, g in enumerate(self.grads) if g is not None]
        self.count(rows, scale)
        self._progress = WRITING
        self.add(rows, scale)
        for i in rows:
            self.present[i] = 1
        self._drop()
        self._progress = TAKEN

    def prepare(self, state: dict, groups: Sequence[dict[str, Any]], hypers: Sequence[Hyper]) -> None:
        """Make the state that the collected rows lack and validate what they have; changes nothing else."""
        for i in self.contributing():
            if self.grads[i] is None:
                self.check(i, None)
            self.prepare_row(i, state, groups)

    def prepare_row(self, i: int, state: dict, groups: Sequence[dict[str, Any]]) -> None:
        p, group, name = self.params[i], groups[self.groups[i]], self.name_of(self.params[i])
        checks.check_options(name, p, self.options)
        checks.check_step(name, p, state[p].get("step"))
        self.complete(state[p], p, group, self.options)
        for spec in STATE:
            if spec.name in state[p] and spec.wanted(p, group, self.options):
                checks.check_state(name, spec, p, state[p][spec.name], self.options)

    def sum_up(self, scale: float | Tensor) -> None:
        """After ``prepare``, before a step that needs the norm: what is to be added to a buffer is added, and
        ``measured`` and ``squares`` tell of every row with a contribution. A first one stays in ``p.grad``."""
        rows = self.contributing()
        both = [i for i in rows if self.grads[i] is not None and self.present[i] == 1]
        if both:
            self.count(both, scale)
            self._progress = WRITING
            self.add(both, scale)
            for i in both:
                self.params[i].grad = self.grads[i] = None
            self._progress = TAKEN
        self.measured = rows
        self.squares = self.measure(rows, [self.grads[i] for i in rows], scale)

    def measure_gradients(self, scale: float | Tensor) -> None:
        """``measured`` and ``squares`` of ``scale * p.grad`` for every collected gradient; changes nothing else."""
        self.measured = [i for i, g in enumerate(self.grads) if g is not None]
        self.squares = self.measure(self.measured, [self.grads[i] for i in self.measured], scale)

    def by_row(self) -> Tensor:
        """``squares`` by row, 0 where none was measured."""
        if len(self.measured) == len(self.params):
            return self.squares
        return self.squares.new_zeros(len(self.params)).index_copy_(0, self.places(self.measured), self.squares)

    @torch.no_grad()
    def measure(self, rows: Sequence[int], grads: Sequence[Tensor | None], scale: float) -> Tensor:
        """The sum of squares of each row's buffer, or of the sum that ``grads`` would begin there."""
        found: dict[int, Tensor] = {}
        whole: dict[int, Tensor] = {}
        for i, g in zip(rows, grads):
            if g is None or self.present[i] == BY_GRAD:
                whole[i] = self.accums[i]
            else:
                first = self.first_contribution(i, g, scale)
                if first is g:
                    whole[i] = g
                else:
                    found[i] = norms.norms_of([first])[0]  # one temporary at a time
        if whole:
            found.update(zip(whole, norms.norms_of(list(whole.values()))))
        if not found:
            return torch.zeros(0, dtype=torch.float64, device=self.device)
        return torch.stack([found[i] for i in rows]).square()

    def first_contribution(self, i: int, g: Tensor, scale: float) -> Tensor:
        """What (1) would put into the buffer of row ``i``; ``g`` itself where that is the same."""
        p, dtype = self.params[i], self.options.accum_dtype_for(self.params[i])
        if scale == 1.0 and g.dtype == dtype and g.stride() == p.stride():
            return g
        first = torch.empty_like(p, dtype=dtype, memory_format=torch.preserve_format)
        self.backend.accumulate([first], [g], [True], scale)
        return first

    def step(
        self,
        state: dict,
        hypers: Sequence[Hyper],
        scale: float | Tensor,
        coefficient: float,
        factors: norms.Factors | None = None,
    ) -> None:
        """(2) to (6) for every row with a contribution, after ``prepare``; consumes gradients and buffers."""
        rows = self.contributing()
        table = self.rows(rows, state, hypers, scale, coefficient)
        table.factors, table.counts = factors, self.counted(rows)
        aliases = [g for g, present in zip(self.grads, self.present) if present == BY_GRAD]
        self._progress = WRITING
        self.backend.adamw(table)
        increment_version([*table.written(), *aliases])
        self.consumed(self.present)
        self._drop()
        self._progress = STEPPED

    def step_row(self, i: int, state: dict, groups: Sequence[dict[str, Any]], coefficient: float) -> None:
        """The whole way of one parameter's gradient: collect, prepare, (2) to (6), with ``self.hypers``."""
        p = self.params[i]
        g = p.grad
        self.check(i, g)
        if g is not None and (g.is_neg() or g._is_zerotensor()):
            g = checks.plain_gradient(g)
        self.grads = {i: g}
        self.prepare_row(i, state, groups)
        table = self.rows([i], state, self.hypers, 1.0, coefficient)
        self.backend.adamw(table)
        increment_version([*table.written(), *([g] if self.present[i] == BY_GRAD else [])])
        p.grad = self.grads = None
        if self.present[i]:
            self.stale[i] = self.present[i] = 0

    def complete(self, state: dict[str, Any], p: Tensor, group: dict[str, Any], options: Options) -> None:
        """Add to ``state`` what an update of ``p`` needs and ``state`` lacks."""
        complete(state, p, group, options)
        if self.backend.decides_on_device:
            with torch.inference_mode(False), torch.no_grad():
                state["step"] = state["step"].to(self.device)

    def add(self, rows: Sequence[int], scale: float | Tensor) -> None:
        """(1) for ``rows``, of which all have a gradient."""
        accums = [self.accums[i] for i in rows]
        first = [not self.present[i] for i in rows]
        self.backend.accumulate(accums, [self.grads[i] for i in rows], first, scale)
        increment_version(accums)

    def contributing(self) -> list[int]:
        return [i for i, g in enumerate(self.grads) if g is not None or self.present[i]]

    def drop_gradients(self) -> None:
        """Set every collected ``p.grad`` to None."""
        self._progress = WRITING
        self._drop()
        self._progress = TAKEN

    def _drop(self) -> None:
        for p, g in zip(self.params, self.grads or ()):
            if g is not None:
                p.grad = None
        self.release()

    def release(self) -> None:
        """Forget what ``collect`` found."""
        self.grads = None

    # -- pieces ---------------------------------------------------------------------------------------------

    def rows(
        self, rows: Sequence[int], state: dict, hypers: Sequence[Hyper], scale: float | Tensor, coefficient: float
    ) -> Rows:
        """The launch table of the given rows."""
        states = [state[self.params[i]] for i in rows]
        params = [self.params[i] for i in rows]
        amsgrad = [hypers[self.groups[i]].amsgrad for i in rows]
        return Rows(
            params=params,
            grads=[None if self.present[i] == BY_GRAD else self.grads[i] for i in rows],
            accums=[self.accums[i] for i in rows],
            present=[self.present[i] for i in rows],
            accum_dtypes=[self.options.accum_dtype_for(p) for p in params],
            exp_avgs=[s["exp_avg"] for s in states],
            exp_avg_sqs=[s["exp_avg_sq"] for s in states],
            max_exp_avg_sqs=[s["max_exp_avg_sq"] if a else None for s, a in zip(states, amsgrad)],
            steps=[s["step"] for s in states],
            groups=[self.groups[i] for i in rows],
            hypers=hypers,
            scale=scale,
            coefficient=coefficient,
            masters=[s["master"] if self.options.weights_for(p) in (MASTER, SPLIT) else None
                     for s, p in zip(states, params)],
            rounding_seed=self.options.rounding_seed if self.options.stochastic_rounding else None,
            indices=[self.indices[i] for i in rows],
        )  # fmt: skip

    def check(self, i: int, g: Tensor | None) -> None:
        """Raise unless parameter ``i`` with gradient ``g`` can take part; drops a buffer of another dtype."""
        p = self.params[i]
        name = self.name_of(p)
        checks.check_parameter(name, p)
        if g is not None:
            checks.check_gradient(name, p, g)
            if self.is_buffer(i, g):
                self.present[i] = BY_GRAD
            elif self.present[i] == BY_GRAD:
                self.present[i] = 0
        accum = self.accums[i]
        if accum is not None:
            if self.present[i]:
                checks.check_unchanged(name, p, accum, PARAMETER_DTYPES[self.dtypes[i]])
            elif accum.shape != p.shape or accum.device != p.device or PARAMETER_DTYPES[self.dtypes[i]] != p.dtype:
                self.accums[i] = None
        if p.device != self.device:
            raise Stale
