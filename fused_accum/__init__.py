"""fused_accum: torch.optim.AdamW with exact, fused gradient accumulation.

torch is imported with the first use of what needs it, so that ``python -m fused_accum`` can say what is missing.
"""

from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from . import ops
    from .optimizer import FusedAccumAdamW

__all__ = ["FusedAccumAdamW", "__version__", "ops"]


def __getattr__(name: str) -> Any:
    import importlib

    if name == "FusedAccumAdamW":
        return importlib.import_module(".optimizer", __name__).FusedAccumAdamW
    if name == "ops":
        return importlib.import_module(".ops", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
