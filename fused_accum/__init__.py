"""fused_accum: torch.optim.AdamW with exact, fused gradient accumulation."""

from . import ops
from ._version import __version__
from .optimizer import FusedAccumAdamW

__all__ = ["FusedAccumAdamW", "__version__", "ops"]
