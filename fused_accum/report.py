"""What works on this machine: the facts behind `python -m fused_accum`. Never raises, and needs no torch."""

from __future__ import annotations

import json
import platform
import re
from typing import Any

from . import _native
from ._version import __version__

NATIVE_WORKS, ONLY_REFERENCE, NO_TORCH = 0, 1, 2  # exit codes

_OLDEST_TORCH = (2, 10)
_GPU_BACKENDS = ("cuda", "triton")  # all others are asked about the CPU


def collect() -> dict[str, Any]:
    """All facts, ready for JSON; ``exit_code`` sums them up."""
    native, problem = _native.load()
    facts: dict[str, Any] = {
        "version": __version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "torch": None,
        "torch_problem": None,
        "native": native.__file__ if native else None,
        "native_problem": problem or None,
        "cpu_isa": None,
        "cpu_isas": {},
        "backends": [],
    }
    if native:
        try:
            facts["cpu_isas"] = dict(native.cpu_isas())
            facts["cpu_isa"] = native.cpu_isa()
        except Exception as error:  # FUSED_ACCUM_CPU_ISA names one that cannot run here
            facts["native_problem"] = str(error)
    facts["torch"], facts["torch_problem"] = _torch_version()
    if facts["torch_problem"] is None:
        facts["backends"] = _backends()
    works = {row["backend"] for row in facts["backends"] if row["works"]}
    if facts["torch_problem"] is not None:
        facts["exit_code"] = NO_TORCH
    else:
        facts["exit_code"] = NATIVE_WORKS if works - {"reference"} else ONLY_REFERENCE
    return facts


def _torch_version() -> tuple[str | None, str | None]:
    """torch's version, or None, and what is wrong with it, or None."""
    oldest = ".".join(map(str, _OLDEST_TORCH))
    remedy = f"pip install 'torch>={oldest}'"
    try:
        import torch
    except ModuleNotFoundError:
        return None, f"torch is not installed; {remedy}"
    except Exception as error:  # a broken installation fails in many ways, OSError among them
        return None, f"torch does not import ({type(error).__name__}: {error}); reinstall it: {remedy}"
    version = str(torch.__version__)
    new_enough = tuple(int(part) for part in re.findall(r"\d+", version)[:2]) >= _OLDEST_TORCH
    return version, None if new_enough else f"torch is {version}, older than {oldest}; {remedy}"


def _backends() -> list[dict[str, Any]]:
    try:
        import torch

        from .backends import registry

        backends = registry()
    except Exception as error:
        reason = f"the registry does not import ({type(error).__name__}: {error}); reinstall fused_accum"
        return [{"backend": "all", "device": "any", "works": False, "reason": reason}]
    rows = []
    for name, backend in backends.items():
        device = "cuda" if name in _GPU_BACKENDS else "cpu"
        try:
            reason = backend.why_not(torch.device(device))
        except Exception as error:
            reason = f"asking failed ({type(error).__name__}: {error})"
        rows.append({"backend": name, "device": device, "works": reason is None, "reason": reason})
    return rows


def as_json(facts: dict[str, Any]) -> str:
    return json.dumps(facts, indent=2)


def as_text(facts: dict[str, Any]) -> str:
    """One line per fact and per backend; reasons end with the remedy."""
    torch = facts["torch"] or "none"
    lines = [
        f"fused_accum {facts['version']}   torch {torch}   Python {facts['python']}   {facts['machine']}",
        f"native module   {facts['native'] or 'none'}",
    ]
    if facts["native_problem"]:
        lines.append(f"                {facts['native_problem']}")
    if facts["cpu_isas"]:
        isas = ", ".join(
            f"{isa} (in use)" if isa == facts["cpu_isa"] else f"{isa} ({why})" if why else isa
            for isa, why in facts["cpu_isas"].items()
        )
        lines.append(f"CPU code        {isas}")
    if facts["torch_problem"]:
        lines.append(f"backends        none: {facts['torch_problem']}")
    for row in facts["backends"]:
        state = "works" if row["works"] else f"no: {row['reason']}"
        lines.append(f"backend {row['backend']:<10}{row['device']:<5} {state}")
    return "\n".join(lines)
