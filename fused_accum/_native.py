"""The native module fused_accum._C, or why there is none. Imports nothing of torch."""

from __future__ import annotations

import importlib
import json
from functools import cache
from operator import is_
from pathlib import Path
from types import ModuleType
from typing import Any

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
    path = Path(__file__).with_name("_build_failure.json")  # from setup.py, when it could not compile
    try:
        note = json.loads(path.read_text())
    except FileNotFoundError:
        return None, (
            f"fused_accum._C was not built; have a C++17 compiler (Debian, Ubuntu: apt-get install g++), {_REINSTALL}"
        )
    more = f" (all of it: {path})" if note["output"] else ""
    return None, f"fused_accum._C was not built: {note['reason']}{more}; {note['remedy']}, {_REINSTALL}"


def same_objects(lists: list[list[Any]], others: list[list[Any]]) -> bool:
    """Whether two lists of lists hold the very same objects, in the same places."""
    module, _ = load()
    if module is not None:
        return module.same_objects(lists, others)
    return len(lists) == len(others) and all(
        len(some) == len(other) and all(map(is_, some, other)) for some, other in zip(lists, others)
    )
