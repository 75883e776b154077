"""The optimizer state of one parameter, as a registry: a new kind of state is one more row of ``MOMENTS``."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

PARAMETER_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ACCUM_DTYPES = (torch.float32, torch.bfloat16)
STATE_DTYPES = (torch.float32, torch.bfloat16, None)


class StateSpec(NamedTuple):
    """One per-parameter state tensor: shaped like the parameter, zero at first."""

    name: str
    only_if: str | None = None  # a group flag that must be set


MOMENTS = (
    StateSpec("exp_avg"),
    StateSpec("exp_avg_sq"),
    StateSpec("max_exp_avg_sq", only_if="amsgrad"),
)


class Options(NamedTuple):
    """What the constructor was given beyond torch.optim.AdamW's arguments."""

    accum_dtype: torch.dtype
    state_dtype: torch.dtype | None
    backend: str
    max_grad_norm: float | None = None
    skip_nonfinite: str | None = None

    @property
    def measures(self) -> bool:
        """Whether a step needs the norm of the whole gradient before it updates anything."""
        return self.max_grad_norm is not None or self.skip_nonfinite == "step"

    @classmethod
    def checked(cls, accum_dtype: Any, state_dtype: Any, backend: Any) -> Options:
        """The options, or ValueError for one out of range."""
        if accum_dtype not in ACCUM_DTYPES:
            raise ValueError(
                f"accum_dtype is {accum_dtype!r}; it must be torch.float32 or torch.bfloat16 (float16 would "
                "overflow at 65504; float64 parameters always accumulate in float64)"
            )
        if state_dtype not in STATE_DTYPES:
            raise ValueError(
                f"state_dtype is {state_dtype!r}; it must be torch.float32, torch.bfloat16 or None (the "
                "parameter's dtype; float64 parameters always have float64 state)"
            )
        from . import backends  # which import this module

        if backend != "auto" and backend not in (names := backends.registry()):
            raise ValueError(f"backend is {backend!r}; it must be 'auto' or one of {', '.join(map(repr, names))}")
        return cls(accum_dtype, state_dtype, backend)

    def accum_dtype_for(self, p: Tensor) -> torch.dtype:
        return torch.float64 if p.dtype == torch.float64 else self.accum_dtype

    def state_dtype_for(self, p: Tensor) -> torch.dtype:
        if p.dtype == torch.float64 or self.state_dtype is None:
            return p.dtype
        return self.state_dtype


class Hyper(NamedTuple):
    """One group's hyper-parameters, read from the group at every step."""

    lr: float | Tensor  # a tensor stays where it is if that is a GPU
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    maximize: bool
    amsgrad: bool

    @classmethod
    def of(cls, group: dict[str, Any]) -> Hyper:
        beta1, beta2 = group["betas"]
        lr = group["lr"]
        return cls(
            lr if isinstance(lr, Tensor) and lr.device.type != "cpu" else float(lr),
            float(beta1),
            float(beta2),
            float(group["eps"]),
            float(group["weight_decay"]),
            bool(group["maximize"]),
            bool(group["amsgrad"]),
        )


def new_step() -> Tensor:
    """torch.optim's per-parameter count of updates: a 0-dim CPU tensor of its own."""
    wide = torch.get_default_dtype() == torch.float64
    return torch.zeros((), dtype=torch.float64 if wide else torch.float32, device="cpu")


def complete(state: dict[str, Any], p: Tensor, group: dict[str, Any], options: Options) -> None:
    """Add to ``state`` what an update of ``p`` needs and ``state`` lacks; mutates ``state`` only."""
    with torch.inference_mode(False), torch.no_grad():
        step = state.get("step")
        if not isinstance(step, Tensor):
            state["step"] = new_step() if step is None else torch.full_like(new_step(), float(step))
        elif not step.is_floating_point():
            state["step"] = step.to(torch.float32)
        for spec in MOMENTS:
            if spec.name not in state and (spec.only_if is None or group[spec.only_if]):
                state[spec.name] = torch.zeros_like(
                    p, dtype=options.state_dtype_for(p), memory_format=torch.preserve_format
                ).detach()
