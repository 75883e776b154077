"""Checkpoints: everything a run needs to go on bit-identically, written so that a crash never costs the last one."""

from __future__ import annotations

import os
import pickle
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks import JobError
from fused_accum import FusedAccumAdamW

FORMAT = "fused_accum pretrain 2"


def save(path: Path, content: dict[str, Any]) -> None:
    """Write ``content`` and torch's random state to ``path``, replacing it only when all of it is on the disk.

    Raises JobError when it cannot be written; what was at ``path`` is then still there.
    """
    aside = path.with_name(path.name + ".partial")
    try:
        with open(aside, "wb") as file:
            torch.save({"format": FORMAT, "random": _random_state(), **content}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the renaming itself
        finally:
            os.close(folder)
    except (OSError, RuntimeError) as error:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        kept = "; the checkpoint written before is still there" if path.exists() else ""
        raise JobError(f"cannot write {path}: {_reason(error)}{kept}") from error


def _reason(error: BaseException) -> str:
    """In words. torch.save puts an error of its own ("unexpected pos") over that of a file it cannot write."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__context__
    return str(cause or error)


def load(path: Path) -> dict[str, Any]:
    """What ``save`` wrote, on the CPU. Raises JobError when it cannot be read or is something else."""
    if not path.exists():
        raise JobError(f"no checkpoint {path} to resume from; start a run without --resume")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, KeyError, ValueError, pickle.UnpicklingError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise JobError(
            f"cannot read {path} as a checkpoint ({reason}); name another file with --resume, or start a new run"
        ) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise JobError(f"{path} is not a checkpoint of this program (format {FORMAT!r}); name another file")
    return content


def _random_state() -> dict[str, Any]:
    return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all()}


def restore_random_state(content: dict[str, Any]) -> None:
    torch.set_rng_state(content["random"]["cpu"])
    if torch.cuda.device_count() == len(content["random"]["cuda"]):
        torch.cuda.set_rng_state_all(content["random"]["cuda"])


def training_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Weights, optimizer (its open window too) and gradients in flight, at any point between two micro-batches."""
    with warnings.catch_warnings():
        # FusedAccumAdamW warns in mid-window that other optimizers would lose the window. This is resumed with it.
        warnings.simplefilter("ignore", UserWarning)
        optimizer_state = optimizer.state_dict()
    # torch.optim.AdamW has no buffer: its open window is what lies in p.grad, which no state_dict holds.
    # Where backward accumulates, p.grad is the window itself, which the state_dict does hold.
    held = isinstance(optimizer, FusedAccumAdamW) and optimizer.accumulates_in_backward
    gradients = {} if held else {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"model": model.state_dict(), "optimizer": optimizer_state, "gradients": gradients}


def restore_training_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, saved: dict[str, Any]
) -> None:
    """Mutates ``model`` and ``optimizer`` into what ``training_state`` saw."""
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    for name, gradient in saved["gradients"].items():
        p = model.get_parameter(name)
        p.grad = gradient.to(p.device)
