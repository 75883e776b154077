"""Which blocks a window of training allocates: torch's own records, and every library's through an interposer.

Run as a program with the interposer in LD_PRELOAD, it prints for each mode the blocks of half a direct weight's size
or more (``{"mode": [count, largest]}``).
"""

import ctypes
import json
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.memory import records

WIDTH, ROWS, TOKENS = 384, 1536, 24
SMALLEST = 4 * WIDTH * WIDTH  # bytes of the smallest direct weight; activations are far smaller


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(ROWS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, ROWS, bias=False)

    def forward(self, index: Tensor) -> Tensor:
        x = self.embedding(index)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return nn.functional.cross_entropy(self.head(self.norm(x)), index)


MODES = ["explicit", "in-backward", "direct", "step-in-backward", "direct+step-in-backward"]


class Training:
    """``window()`` trains on one window of four micro-batches."""

    def __init__(self, make: Callable, mode: str, device: str = "cpu"):
        torch.manual_seed(0)
        self.model, self.mode = Model().to(device), mode
        self.opt = make(self.model.parameters(), lr=1e-3)
        self.batches = [torch.randint(ROWS, (TOKENS,), device=device) for _ in range(4)]
        if "direct" in mode:
            self.handle = self.opt.direct_wgrad(self.model)
        elif mode != "explicit":
            self.handle = self.opt.accumulate_in_backward()

    def window(self) -> None:
        *first, last = self.batches
        for batch in first:
            self.model(batch).backward()
            self.opt.accumulate()
        loss = self.model(last)
        if "step" in self.mode:
            with self.opt.step_in_backward():
                loss.backward()
        else:
            loss.backward()
            self.opt.step()


class Blocks(NamedTuple):
    """Of at least a given size: how many were allocated, at most alive at a time, and alive at the end."""

    allocated: int
    at_a_time: int
    left: int


def blocks(call: Callable[[], None], at_least: int) -> Blocks:
    """torch.profiler's memory records of a call."""
    found = records(call)
    assert found, "the profiler recorded no allocation"
    alive, allocated, most = set(), 0, 0
    for _, at, size in found:
        if size >= at_least:
            allocated += 1
            alive.add(at)
            most = max(most, len(alive))
        elif size < 0:
            alive.discard(at)
    return Blocks(allocated, most, len(alive))


def main() -> None:
    from fused_accum import FusedAccumAdamW

    interposer = ctypes.CDLL(None)
    interposer.allocations_largest.restype = ctypes.c_size_t
    found = {}
    for mode in MODES:
        training = Training(FusedAccumAdamW, mode)
        for _ in range(2):  # buffers, moments, and what libraries keep for good
            training.window()
        interposer.allocations_watch(ctypes.c_size_t(SMALLEST // 2))
        training.window()
        training.window()
        found[mode] = [interposer.allocations_count(), interposer.allocations_largest()]
        interposer.allocations_watch(ctypes.c_size_t(2**62))
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
