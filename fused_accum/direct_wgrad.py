"""Weight gradients that are never a tensor of their own: which layers a model has for that, and their forwards."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from .direct_functions import DirectEmbedding, DirectLinear
from .entry import never_compiled
from .slots import Slot

if TYPE_CHECKING:
    from .in_backward import InBackward

LINK = "_fused_accum_direct"
NOT_OURS = "not among the optimizer's parameters that can require grad"


class Link:
    """What a covered layer knows of the optimizer. A copy of the layer, or one from a pickle, is not covered."""

    def __init__(self, session: InBackward) -> None:
        self.session = weakref.ref(session)

    def alive(self) -> InBackward | None:
        session = self.session()
        return None if session is None or session.run() is None or not session.installed else session

    def slot(self, weight: Tensor) -> Slot | None:
        """The weight's, when its gradient is to be added directly; within torch.func's transforms it is not."""
        session = self.alive()
        if session is None:
            return None
        slot = session.slots.get(id(weight))
        hooked = slot is None or slot.param() is not weight or weight._backward_hooks or not weight.requires_grad
        if hooked or not torch.is_grad_enabled() or torch._C._functorch.peek_interpreter_stack() is not None:
            return None
        return slot

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> Any:
        return _nothing, ()


def _nothing() -> None:
    return None


# -- the layers' forwards -----------------------------------------------------------------------------------------


def _refuse_compile() -> None:
    raise RuntimeError(
        "torch.compile traced a layer under direct_wgrad(), whose weight gradient goes straight into the optimizer's "
        "buffer, which a compiled graph cannot hold; compile without direct_wgrad(): accumulate_in_backward() works "
        "with a compiled model"
    )


def _linear(module: nn.Module, x: Tensor, transposed: bool) -> Tensor | None:
    if torch.compiler.is_compiling():
        _refuse_compile()
    link, weight = module.__dict__.get(LINK), module.weight
    if link is None or link.slot(weight) is None:
        return None
    dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else None
    if dtype is not None and x.dtype != torch.float64:
        x = x.to(dtype)
    elif x.dtype == weight.dtype:
        dtype = None
    else:
        return None  # torch's own error
    return DirectLinear.apply(x, weight, module.bias, link, transposed, dtype)


def _linear_forward() -> Any:
    # Pickle finds a bound method by its name: a copy then has the class's own forward.
    @never_compiled
    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        y = _linear(self, x, False)
        return F.linear(x, self.weight, self.bias) if y is None else y

    return forward


def _conv1d_forward() -> Any:
    @never_compiled
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        y = _linear(self, x, True)
        return type(self).forward(self, x) if y is None else y

    return forward


def _embedding_forward() -> Any:
    @never_compiled
    def forward(self: nn.Embedding, index: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            _refuse_compile()
        link = self.__dict__.get(LINK)
        if link is None or link.slot(self.weight) is None:
            return F.embedding(index, self.weight, self.padding_idx)
        return DirectEmbedding.apply(index, self.weight, self.padding_idx, link)

    return forward


FORWARDS = {"Linear": _linear_forward(), "Conv1D": _conv1d_forward(), "Embedding": _embedding_forward()}


def _kind(module: nn.Module) -> str | None:
    """Which forward a layer of exactly this class has."""
    if type(module) is nn.Linear:
        return "Linear"
    if type(module) is nn.Embedding:
        return "Embedding"
    if (type(module).__module__, type(module).__name__) == ("transformers.pytorch_utils", "Conv1D"):
        return "Conv1D"
    return None


def _has_own_forward(module: nn.Module) -> bool:
    """Whether it runs its class's forward: also by way of one of ours whose optimizer is gone (as in a copy), or of
    what a pickle makes of that."""
    forward = module.__dict__.get("forward")
    if forward is None:
        return True
    link, function = module.__dict__.get(LINK), getattr(forward, "__func__", None)
    bare = function is type(module).forward or (function is FORWARDS[_kind(module)] and not (link and link.alive()))
    return bare and forward.__self__ is module


def _give_back(module: nn.Module) -> None:
    """Let a layer run its class's forward."""
    module.__dict__.pop("forward", None)
    module.__dict__.pop(LINK, None)


def _forsake(modules: weakref.WeakSet[nn.Module]) -> None:
    """Give layers back whose optimizer is gone, unless another has covered them since."""
    for module in modules:
        link = module.__dict__.get(LINK)
        if link is not None and not link.alive():
            _give_back(module)


def _why_not(module: nn.Module, slots: dict[int, Slot]) -> str | None:
    """Why a layer stays ordinary; None where its weight can be direct."""
    if isinstance(module, LazyModuleMixin):
        return "it is lazy: its weight has no shape before the model's first forward"
    if _kind(module) is None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            why = "parametrized" if hasattr(module, "parametrizations") else f"a subclass, {type(module).__name__}"
            return f"{why}: what its forward computes is not known"
        return f"{type(module).__name__} has no direct form"
    weight = module._parameters.get("weight")
    if weight is None:
        return "its weight is computed, not a parameter (weight_norm?)"
    if id(weight) not in slots:
        return f"its weight is {NOT_OURS}"
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(module, name) for name in hooks) or weight._backward_hooks:
        return "it or its weight has hooks, which may replace what it computes"
    if len(weight._post_accumulate_grad_hooks or ()) > 1:
        return "its weight has other hooks, which expect a gradient"
    if not _has_own_forward(module):
        return "its forward was replaced"
    if _kind(module) == "Embedding":
        for option in ("sparse", "scale_grad_by_freq", "max_norm"):
            if getattr(module, option):
                return f"{option} is set"
        if not weight.is_contiguous():
            return "its weight is not contiguous"
    elif not (weight.is_contiguous() or weight.t().is_contiguous()):
        return "its weight is neither row- nor column-major"
    return None


class DirectHandle:
    """What ``direct_wgrad`` returns; ``remove()`` undoes it, as does leaving ``with`` it.

    Attributes:
        direct: names of the parameters whose gradients go straight into the buffer.
        ordinary: name of every other parameter of the model -> why (they accumulate in backward all the same).
    """

    def __init__(self, session: InBackward, model: nn.Module, owns: bool, check: bool) -> None:
        self._session, self._owns = session, owns
        self._modules: list[nn.Module] = []
        self.direct: list[str] = []
        self.ordinary: dict[str, str] = {}
        covered: set[int] = set()
        for path, module in model.named_modules():
            why = _why_not(module, session.slots)
            for name, p in module.named_parameters(prefix=path, recurse=False):
                if why is not None:
                    self.ordinary[name] = why
                elif id(p) not in session.slots:
                    self.ordinary[name] = NOT_OURS
                else:
                    self.direct.append(name)
                    if id(p) not in covered:
                        covered.add(id(p))
                        session.direct.append(session.slots[id(p)])
            if why is None:
                self._modules.append(module)
                module.__dict__[LINK] = Link(session)
                module.__dict__["forward"] = FORWARDS[_kind(module)].__get__(module)
        session.check_direct = check
        self._forsaken = weakref.finalize(session.run(), _forsake, weakref.WeakSet(self._modules))
        self._forsaken.atexit = False

    def remove(self) -> None:
        """Give the layers their own forwards back, and end what ``direct_wgrad`` began. Harmless a second time."""
        self._forsaken.detach()
        for module in self._modules:
            link = module.__dict__.get(LINK)
            if link is not None and link.session() is self._session:
                _give_back(module)
        self._modules.clear()
        self._session.direct.clear()
        if self._owns:
            self._session.remove()

    def __enter__(self) -> DirectHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()
