"""The order of what is added to buffers directly, where that happens on several streams.

A layer's backward runs on the stream of its forward. Autograd makes the caller's stream wait for gradients that are
tensors; it knows nothing of what a backward has added to a buffer. So it is done here, with an event
(``wait_stream``): ``record_stream`` would keep memory from being used again, but not order the reading of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def current(device: torch.device) -> Any:
    """The stream that work on ``device`` goes to; None where there are none."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def after(stream: Any, device: torch.device) -> Any:
    """Order what comes on ``device`` after all that is on ``stream`` so far (None: nothing); the current stream."""
    here = current(device)
    if stream is not None and here != stream:
        here.wait_stream(stream)
    return here


def after_all(streams: Iterable[Any]) -> None:
    """``after`` for streams of any devices, each on its own."""
    for stream in streams:
        after(stream, stream.device)
