"""What the Triton kernels read from device memory: tables of rows, maps of blocks."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor


def current_stream(device: torch.device) -> int:
    return 0 if device.type == "cpu" else torch.accelerator.current_stream(device).stream_id


class Recent:
    """The last few things made, by what they were made from. Optimizers of several threads share it."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.kept: OrderedDict[Hashable, Tensor] = OrderedDict()
        self.lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        with self.lock:
            if key not in self.kept:
                self.kept[key] = make()
                if len(self.kept) > self.limit:
                    self.kept.popitem(last=False)
            self.kept.move_to_end(key)
            return self.kept[key]


def upload(host: Tensor, device: torch.device) -> Tensor:
    """``host`` on ``device``, in order on the current stream, without waiting for it."""
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def device_table(content: bytes, device: torch.device) -> Tensor:
    return upload(torch.frombuffer(bytearray(content), dtype=torch.int64), device)


def block_map(counts: Sequence[int], device: torch.device) -> Tensor:
    """The row of every program, made on the device: for large models it is megabytes."""
    rows = torch.arange(len(counts), dtype=torch.int32, device=device)
    repeats = upload(torch.tensor(counts, device="cpu"), device)
    return rows.repeat_interleave(repeats, output_size=sum(counts))
