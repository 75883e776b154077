"""The native modules fused_accum._C and fused_accum._C_cuda, or why there is none. Imports nothing of torch."""

from __future__ import annotations

import importlib
import json
from functools import cache
from operator import is_
from pathlib import Path
from types import ModuleType
from typing import Any

_REINSTALL = "then install fused_accum again (pip install --force-reinstall --no-deps --no-cache-dir ...)"
_NOTES = {  # from setup.py, when it could not compile; and what is needed
    "_C": ("_build_failure.json", "a C++17 compiler (Debian, Ubuntu: apt-get install g++)"),
    "_C_cuda": ("_cuda_build_failure.json", "nvcc on PATH (pip: nvidia-cuda-nvcc and nvidia-cuda-runtime)"),
}


@cache
def load(name: str = "_C") -> tuple[ModuleType | None, str]:
    """The module and "", or None and a sentence or two: what is missing and how to add it."""
    full = f"fused_accum.{name}"
    try:
        return importlib.import_module(full), ""
    except ImportError as error:
        failure = error
    if not isinstance(failure, ModuleNotFoundError):
        return None, (
            f"{full} is installed but does not load ({failure}); "
            f"check that it was built for this Python and C++ runtime, {_REINSTALL}"
        )
    note_name, needed = _NOTES[name]
    path = Path(__file__).with_name(note_name)
    try:
        note = json.loads(path.read_text())
    except FileNotFoundError:
        others = sorted(other.name for other in path.parent.glob(f"{name}.*.so"))
        done = f"was built for another Python alone ({', '.join(others)})" if others else "was not built"
        return None, f"{full} {done}; have {needed}, {_REINSTALL}"
    more = f" (all of it: {path})" if note["output"] else ""
    return None, f"{full} was not built: {note['reason']}{more}; {note['remedy']}, {_REINSTALL}"


def same_objects(lists: list[list[Any]], others: list[list[Any]]) -> bool:
    """Whether two lists of lists hold the very same objects, in the same places."""
    module, _ = load()
    if module is not None:
        return module.same_objects(lists, others)
    return len(lists) == len(others) and all(
        len(some) == len(other) and all(map(is_, some, other)) for some, other in zip(lists, others)
    )
