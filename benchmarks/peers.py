"""Whom a window is measured against: torch.optim.AdamW in all its ways, and other packages' optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from benchmarks import harness
from benchmarks.harness import Stage
from benchmarks.kernels import Weights
from fused_accum import FusedAccumAdamW

MAX_NORM = 1.0  # of the clipped lists; that of the random gradients is thousands
HYPER = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}


class Peer:
    """A way through a window. ``stages`` of every run yield what is timed; gradients are given by ``take``."""

    exact = True
    clipped = False
    norm_in_double = False
    optimizer: torch.optim.Optimizer

    def __init__(self, values: Sequence[Tensor]):
        self.params = [torch.nn.Parameter(value.clone()) for value in values]

    def stages(self, grads: Sequence[Sequence[Tensor]]) -> Iterator[Stage]:
        raise NotImplementedError

    def clip(self, params: Sequence[Tensor]) -> None:
        if not self.norm_in_double:
            torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
            return
        norms = torch._foreach_norm([p.grad for p in params], 2, torch.float64)
        torch.nn.utils.clip_grads_with_norm_(params, MAX_NORM, torch.stack(norms).norm())

    def results(self) -> dict[str, Tensor]:
        """Parameters, and the moments of those that call them as torch does."""
        found = {f"parameter {i}": p.detach() for i, p in enumerate(self.params)}
        if isinstance(self.optimizer, torch.optim.AdamW):  # optimi's are divided by their bias already
            for i, state in enumerate(self.optimizer.state.values()):
                found |= {f"{name} {i}": state[name] for name in ("exp_avg", "exp_avg_sq")}
        return found


def give(params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    for p, g in zip(params, grads):
        p.grad = g


class Ours(Peer):
    def __init__(self, values: Sequence[Tensor], backend: str, clipped: bool = False, master: str | None = None):
        super().__init__(values)
        self.optimizer = FusedAccumAdamW(
            self.params, backend=backend, max_grad_norm=MAX_NORM if clipped else None, master_weights=master, **HYPER
        )

    def stages(self, grads: Sequence[Sequence[Tensor]]) -> Iterator[Stage]:
        for k, micro in enumerate(grads):
            last = k == len(grads) - 1
            yield partial(give, self.params, micro), self.optimizer.step if last else self.optimizer.accumulate


class Accumulating(Peer):
    """Any optimizer, with ``p.grad`` as the sum; ``together``: added to by one _foreach_add_."""

    def __init__(
        self, values: Sequence[Tensor], make: Callable[..., torch.optim.Optimizer], exact: bool = True,
        together: bool = False,
    ):  # fmt: skip
        super().__init__(values)
        self.optimizer = make(self.params, **HYPER)
        self.step = self.optimizer.step
        self.exact, self.together = exact, together
        self.fresh = [torch.empty_like(p) for p in self.params]  # what backward would have allocated

    def first(self, micro: Sequence[Tensor]) -> None:
        torch._foreach_copy_(self.fresh, micro)
        give(self.params, self.fresh)

    @torch.no_grad()
    def add(self, micro: Sequence[Tensor]) -> None:
        if self.together:
            torch._foreach_add_([p.grad for p in self.params], list(micro))
            return
        for p, g in zip(self.params, micro):
            p.grad.add_(g)

    def update(self) -> None:
        if self.clipped:
            self.clip(self.params)
        self.step()
        self.optimizer.zero_grad()

    def stages(self, grads: Sequence[Sequence[Tensor]]) -> Iterator[Stage]:
        yield partial(self.first, grads[0]), harness.nothing
        for micro in grads[1:]:
            yield harness.nothing, partial(self.add, micro)
        yield harness.nothing, self.update


class Compiled(Accumulating):
    """torch.optim.AdamW whose step is compiled, in the warm-up; its first compilation takes a minute."""

    def __init__(self, values: Sequence[Tensor], exact: bool):
        super().__init__(values, torch.optim.AdamW, exact)
        self.step = torch.compile(self.optimizer.step)


class Widened(Peer):
    """torch, exact for 16-bit parameters: fp32 sums of fp32 copies of the gradients, AdamW(fused) on fp32 copies.

    ``masters``: the copies are kept from step to step; else they are made anew from the parameters.
    """

    def __init__(self, values: Sequence[Tensor], masters: bool):
        super().__init__(values)
        self.masters = masters
        self.copies = [torch.nn.Parameter(value.float()) for value in values]
        self.optimizer = torch.optim.AdamW(self.copies, fused=True, **HYPER)
        self.sums, self.wide = ([torch.zeros_like(copy) for copy in self.copies] for _ in range(2))
        give(self.copies, self.sums)

    @torch.no_grad()
    def add(self, micro: Sequence[Tensor], first: bool) -> None:
        if first:
            torch._foreach_copy_(self.sums, micro)
            return
        torch._foreach_copy_(self.wide, micro)
        torch._foreach_add_(self.sums, self.wide)

    @torch.no_grad()
    def update(self) -> None:
        if not self.masters:
            torch._foreach_copy_(self.copies, self.params)
        if self.clipped:
            self.clip(self.copies)
        self.optimizer.step()
        torch._foreach_copy_(self.params, self.copies)

    def stages(self, grads: Sequence[Sequence[Tensor]]) -> Iterator[Stage]:
        for k, micro in enumerate(grads):
            yield harness.nothing, partial(self.add, micro, first=k == 0)
        yield harness.nothing, self.update


def peers(
    weights: Weights, device: torch.device, compiled: bool = False
) -> dict[str, Callable[[Sequence[Tensor]], Peer]]:
    """Everything to compare with, by name."""
    if weights.master:
        return {"torch, fp32 masters": partial(Widened, masters=True)}
    exact = weights.dtype == "fp32"
    found: dict[str, Callable[[Sequence[Tensor]], Peer]] = {}
    if not exact:
        found["torch, fp32 copies"] = partial(Widened, masters=False)
    for way in ("fused", "foreach"):
        found[f"torch AdamW({way})"] = partial(
            Accumulating, make=partial(torch.optim.AdamW, **{way: True}), exact=exact
        )
    if device.type != "cpu":  # where launches cost more than there is to add
        make = partial(torch.optim.AdamW, fused=True)
        found["torch AdamW(fused), _foreach_add_"] = partial(Accumulating, make=make, exact=exact, together=True)
    if compiled:
        found["torch AdamW, compiled"] = partial(Compiled, exact=exact)
    for name, make, same in installed(exact, device):
        found[name] = partial(Accumulating, make=make, exact=same)
    return found


def installed(exact: bool, device: torch.device) -> Iterator[tuple[str, Callable[..., torch.optim.Optimizer], bool]]:
    """(name, constructor, whether it makes the same update) of other packages' optimizers that are installed."""
    on_cpu = device.type == "cpu"
    with suppress(ImportError):
        import optimi

        options = {"foreach": True} if on_cpu or not exact else {"triton": True}
        yield "optimi AdamW", partial(optimi.AdamW, **options), exact
    if on_cpu and exact:
        with suppress(ImportError):
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            # Not compared with it yet, so not called exact.
            yield "DeepSpeedCPUAdam", partial(DeepSpeedCPUAdam, adamw_mode=True), False
    if device.type == "cuda" and not exact:
        with suppress(ImportError):
            from flashoptim import FlashAdamW

            yield "flashoptim FlashAdamW", FlashAdamW, False  # 8-bit moments
