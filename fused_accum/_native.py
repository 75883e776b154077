"""The native module fused_accum._C, or why there is none. Imports nothing of torch."""

from __future__ import annotations

import importlib
import json
from functools import cache
from pathlib import Path
from types import ModuleType

_REINSTALL = "then install fused_accum again (pip install --force-reinstall --no-deps --no-cache-dir ...)"


@cache
def load() -> tuple[ModuleType | None, str]:
    """The module and "", or None and a sentence or two: what is missing and how to add it."""
    try:
        return importlib.import_module("fused_accum._C"), ""
    except ImportError as error:
        failure = error
    if not isinstance(failure, ModuleNotFoundError):
        return None, (
            f"fused_accum._C is installed but does not load ({failure}); "
            f"check that it was built for this Python and C++ runtime, {_REINSTALL}"
        )
    try:  # written by setup.py when it could not compile
        note = json.loads(Path(__file__).with_name("_build_failure.json").read_text())
    except FileNotFoundError:
        return None, (
            "fused_accum._C was not built; have a C++17 compiler (Debian, Ubuntu: apt-get install g++), "
            f"{_REINSTALL}"
        )
    return None, f"fused_accum._C was not built: {note['reason']}; {note['remedy']}, {_REINSTALL}"
