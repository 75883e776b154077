"""What accumulate() and step() warn of where they find no gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from .runtime import Runtime

NOTHING_THERE = (
    "{} found no gradient in any parameter, and no window is open: either no backward() came before, or it did not "
    "reach this optimizer's parameters (p.grad cleared in between, a loss made under no_grad, parameters replaced or "
    "frozen after the optimizer was made)"
)
IDLE_STEPS = 3  # in a row: one alone may be meant, as for the order of calls that torch's schedulers want


def nothing_left(run: Runtime, scale: float | Tensor, weight: float | Tensor | None) -> str | None:
    """What to warn of where a step found no gradient in p.grad: that its factor was not used though no micro-batch
    had one, or that there is nothing to step at all, again and again."""
    if run.backward is not None and run.backward.finishing:
        return None
    if run.window.open:
        run.idle_steps = 0
        plain = not isinstance(scale, Tensor) and scale == 1
        given = "weight" if weight is not None else None if plain else "scale"
        if not given or not run.window.unscaled:
            return None
        return run.window.once(
            "unused",
            f"step({given}=) found no gradient left in p.grad, so {given} was not used: the micro-batches that "
            f"accumulate() has taken had none. Pass {given}= to every accumulate(); step() is given that of a last "
            "micro-batch still in p.grad",
        )
    run.idle_steps += 1
    if run.idle_steps < IDLE_STEPS:
        return None
    return run.window.once("nothing", NOTHING_THERE.format(f"step(), {IDLE_STEPS} times in a row,"))
