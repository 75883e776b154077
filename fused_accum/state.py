"""The optimizer state of one parameter, as a registry: a new kind of state is one more row of ``STATE``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

PARAMETER_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ACCUM_DTYPES = (torch.float32, torch.bfloat16)
STATE_DTYPES = (torch.float32, torch.bfloat16, None)
STEP_DTYPES = (torch.float32, torch.float64)  # which count on where bfloat16 would stay at 256
LOW_PRECISION = (torch.bfloat16, torch.float16)
MASTER_DTYPES = {"fp32": torch.float32, "split": torch.int16}  # by master_weights; int16: half of a float32
# What 16-bit parameters keep beside them, numbered as enum Weights of csrc/weights.h.
PLAIN, MASTER, SPLIT, STOCHASTIC = range(4)


def checked_rounding_seed(value: Any) -> int:
    """``value``; ValueError for what is no seed."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**64:
        raise ValueError(f"rounding_seed is {value!r}; it must be an int from 0 to 2**64 - 1")
    return value


class Options(NamedTuple):
    """What the constructor was given beyond torch.optim.AdamW's arguments."""

    accum_dtype: torch.dtype
    state_dtype: torch.dtype | None
    backend: str
    max_grad_norm: float | None = None
    skip_nonfinite: str | None = None
    master_weights: str | None = None
    stochastic_rounding: bool = False
    rounding_seed: int = 0

    @property
    def measures(self) -> bool:
        """Whether a step needs the norm of the whole gradient before it updates anything."""
        return self.max_grad_norm is not None or self.skip_nonfinite == "step"

    @classmethod
    def checked(
        cls,
        accum_dtype: Any,
        state_dtype: Any,
        backend: Any,
        master_weights: Any = None,
        stochastic_rounding: bool = False,
        rounding_seed: Any = 0,
    ) -> Options:
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
        if master_weights is not None and master_weights not in MASTER_DTYPES:
            raise ValueError(
                f"master_weights is {master_weights!r}; it must be None, 'fp32' (a float32 master beside each "
                "bfloat16 or float16 parameter) or 'split' (the 16 bits of it that a bfloat16 parameter lacks)"
            )
        if stochastic_rounding and master_weights is not None:
            raise ValueError(
                f"stochastic_rounding=True with master_weights={master_weights!r}: a master keeps what rounding "
                "would lose, and the parameter must be what the master rounds to; choose one of the two"
            )
        checked_rounding_seed(rounding_seed)
        from . import backends  # which import this module

        if backend != "auto" and backend not in (names := backends.registry()):
            raise ValueError(f"backend is {backend!r}; it must be 'auto' or one of {', '.join(map(repr, names))}")
        return cls(
            accum_dtype,
            state_dtype,
            backend,
            master_weights=master_weights,
            stochastic_rounding=bool(stochastic_rounding),
            rounding_seed=rounding_seed,
        )

    @property
    def weights(self) -> int:
        """What 16-bit parameters keep beside them: PLAIN, MASTER, SPLIT or STOCHASTIC."""
        if self.stochastic_rounding:
            return STOCHASTIC
        return {None: PLAIN, "fp32": MASTER, "split": SPLIT}[self.master_weights]

    def weights_for(self, p: Tensor) -> int:
        return self.weights if p.dtype in LOW_PRECISION else PLAIN

    def accum_dtype_for(self, p: Tensor) -> torch.dtype:
        return torch.float64 if p.dtype == torch.float64 else self.accum_dtype

    def state_dtype_for(self, p: Tensor) -> torch.dtype:
        if p.dtype == torch.float64 or self.state_dtype is None:
            return p.dtype
        return self.state_dtype


class Option:
    """An option of the constructor as an attribute of the optimizer: to be read, not set."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, opt: Any, owner: type | None = None) -> Any:
        return self if opt is None else getattr(opt._run.options, self.name)

    def __set__(self, opt: Any, value: Any) -> None:
        raise AttributeError(
            f"{self.name} is set to {value!r}, but it is an option of the constructor: construct the optimizer anew "
            f"with {self.name}={value!r}; load_state_dict() takes over the state of this one"
        )


class GroupOption:
    """No attribute of an optimizer, in torch neither: set as one it would change nothing."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, opt: Any, owner: type | None = None) -> Any:
        raise AttributeError(f"an optimizer has no {self.name}, its groups have: param_groups[i][{self.name!r}]")

    def __set__(self, opt: Any, value: Any) -> None:
        raise AttributeError(
            f"{self.name} of an optimizer is set to {value!r}, which would change nothing; set it in its groups: "
            f"param_groups[i][{self.name!r}] = {value!r}"
        )


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
    def of_all(cls, groups: Sequence[dict[str, Any]]) -> list[Hyper]:
        """Of every group; ValueError for one that no step could use. As in torch lr may be negative."""
        return [cls._of(group, index) for index, group in enumerate(groups)]

    @classmethod
    def _of(cls, group: dict[str, Any], index: int) -> Hyper:
        for name, only in (("differentiable", False), ("decoupled_weight_decay", True)):
            if group.get(name, only) != only:
                raise ValueError(
                    f"param_groups[{index}] holds {name}={group[name]!r}, which the fused update of AdamW cannot do: "
                    f"set it to {only}, or use torch.optim's. Nothing was updated"
                )
        try:
            beta1, beta2 = group["betas"]
            lr = group["lr"]
            found = cls(
                lr if isinstance(lr, Tensor) and lr.device.type != "cpu" else float(lr),
                float(beta1),
                float(beta2),
                float(group["eps"]),
                float(group["weight_decay"]),
                bool(group["maximize"]),
                bool(group["amsgrad"]),
            )
        except (TypeError, ValueError, RuntimeError, KeyError) as error:
            names = ("lr", "betas", "eps", "weight_decay", "maximize", "amsgrad")
            held = ", ".join(f"{name}={group[name]!r}" if name in group else f"no {name}" for name in names)
            raise ValueError(
                f"param_groups[{index}] holds {held}; lr, eps and weight_decay must be numbers or 0-dim tensors, "
                "betas two of these: set them right in optimizer.param_groups"
            ) from error
        size = 0.0 if isinstance(found.lr, Tensor) else found.lr
        size += found.weight_decay
        if not (0 <= found.beta1 < 1 and 0 <= found.beta2 < 1 and found.eps >= 0 and math.isfinite(size + found.eps)):
            held = ", ".join(f"{name}={group[name]!r}" for name in ("lr", "betas", "eps", "weight_decay"))
            raise ValueError(
                f"param_groups[{index}] holds {held}; lr and weight_decay must be finite, eps also not negative, "
                "betas in [0, 1): set right what writes them there (a scheduler?). Nothing was updated"
            )
        return found


def new_step() -> Tensor:
    """torch.optim's per-parameter count of updates: a 0-dim CPU tensor of its own."""
    wide = torch.get_default_dtype() == torch.float64
    return torch.zeros((), dtype=torch.float64 if wide else torch.float32, device="cpu")


class StateSpec:
    """One per-parameter state tensor of the parameter's shape: whether ``p`` has it, its dtype, its first value."""

    def __init__(self, name: str, only_if: str | None = None) -> None:
        self.name, self.only_if = name, only_if  # a group flag that must be set

    def wanted(self, p: Tensor, group: dict[str, Any], options: Options) -> bool:
        return self.only_if is None or bool(group[self.only_if])

    def dtype(self, p: Tensor, options: Options) -> torch.dtype:
        return options.state_dtype_for(p)

    def new(self, p: Tensor, options: Options) -> Tensor:
        return torch.zeros_like(p, dtype=self.dtype(p, options), memory_format=torch.preserve_format).detach()

    def refusal(self, p: Tensor, t: Tensor, options: Options) -> str | None:
        """Why ``t`` cannot be this state of ``p`` (beyond shape and device), or None."""
        return None if t.dtype in PARAMETER_DTYPES else "moments are floating"


class MasterSpec(StateSpec):
    """The float32 master of a 16-bit parameter, or the half of it that the parameter lacks, as int16."""

    def wanted(self, p: Tensor, group: dict[str, Any], options: Options) -> bool:
        return options.weights_for(p) in (MASTER, SPLIT)

    def dtype(self, p: Tensor, options: Options) -> torch.dtype:
        return MASTER_DTYPES[options.master_weights]

    def new(self, p: Tensor, options: Options) -> Tensor:
        if options.master_weights == "split":
            return super().new(p, options)  # of a master that is the parameter all missing bits are 0
        return p.detach().to(torch.float32, memory_format=torch.preserve_format, copy=True)

    def refusal(self, p: Tensor, t: Tensor, options: Options) -> str | None:
        wanted = self.dtype(p, options)
        return None if t.dtype == wanted else f"master_weights={options.master_weights!r} keeps {wanted}"


STATE = (
    StateSpec("exp_avg"),
    StateSpec("exp_avg_sq"),
    StateSpec("max_exp_avg_sq", only_if="amsgrad"),
    MasterSpec("master"),
)


def complete(state: dict[str, Any], p: Tensor, group: dict[str, Any], options: Options) -> None:
    """Add to ``state`` what an update of ``p`` needs and ``state`` lacks, all or nothing; mutates ``state`` only."""
    new = {}
    with torch.inference_mode(False), torch.no_grad():
        step = state.get("step")
        if not isinstance(step, Tensor):
            new["step"] = new_step() if step is None else torch.full_like(new_step(), float(step))
        elif step.dtype not in STEP_DTYPES:  # an integer, or of a state_dict cast as a whole
            new["step"] = step.to(torch.float32)
        for spec in STATE:
            if spec.name not in state and spec.wanted(p, group, options):
                new[spec.name] = spec.new(p, options)
    state.update(new)
