"""Which passages a micro-batch holds, and where windows and epochs end: all a function of the micro-batch's number.

So the data position of a run is one integer, and a resumed run sees exactly the batches it would have seen.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from benchmarks.text import Passages

IGNORED = -100  # torch.nn.functional.cross_entropy's ignore_index: the padding's target
POOL = 16  # micro-batches' worth of passages sorted by length together


class MicroBatch(NamedTuple):
    """inputs, targets: int64 (passages, longest); padded targets are IGNORED. tokens: predicted bytes, not padding.

    window_tokens: those of the whole window; ends_window: this is its last micro-batch.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    tokens: int
    window_tokens: int
    ends_window: bool


class Windows:
    """Epochs of ``epoch`` micro-batches in windows of ``size``; the last window of an epoch may be shorter."""

    def __init__(self, size: int, epoch: int):
        self.size = size
        self.epoch = epoch
        self.per_epoch = -(-epoch // size)

    def first(self, window: int) -> int:
        """The number of the first micro-batch of ``window`` (the number of micro-batches before it)."""
        return window // self.per_epoch * self.epoch + window % self.per_epoch * self.size

    def members(self, window: int) -> range:
        """The numbers of the micro-batches of ``window``."""
        return range(self.first(window), self.first(window + 1))

    def of(self, micro_batch: int) -> int:
        """The window that ``micro_batch`` belongs to."""
        return micro_batch // self.epoch * self.per_epoch + micro_batch % self.epoch // self.size

    def describe(self) -> str:
        full, short = divmod(self.epoch, self.size)
        tail = f" and a last one of {short}, divided by its own token count" if short else ""
        return f"an epoch is {self.epoch} micro-batches: {full} windows of {self.size}{tail}"


class MicroBatches:
    """Micro-batches of ``batch`` passages, drawn pass after pass over the text in an order set by ``seed``.

    Passages of similar length are put together: little padding, and token counts that differ widely from one
    micro-batch to the next.
    """

    def __init__(self, passages: Passages, batch: int, seed: int):
        self.passages = passages
        self.batch = batch
        self.seed = seed
        self.per_pass = -(-len(passages.starts) // batch)
        self._orders: dict[int, list[torch.Tensor]] = {}

    def passages_of(self, micro_batch: int) -> torch.Tensor:
        """int64 indices of the passages of ``micro_batch``."""
        number, position = divmod(micro_batch, self.per_pass)
        if number not in self._orders:
            # A window may reach from one pass into the next.
            self._orders = {k: order for k, order in self._orders.items() if k == number - 1}
            self._orders[number] = self._shuffle(number)
        return self._orders[number][position]

    def tokens(self, micro_batch: int) -> int:
        return int(self.passages.lengths[self.passages_of(micro_batch)].sum())

    def get(self, micro_batch: int, windows: Windows, device: torch.device) -> MicroBatch:
        members = windows.members(windows.of(micro_batch))
        inputs, targets = pad(self.passages, self.passages_of(micro_batch))
        return MicroBatch(
            inputs.to(device),
            targets.to(device),
            tokens=self.tokens(micro_batch),
            window_tokens=sum(map(self.tokens, members)),
            ends_window=micro_batch == members[-1],
        )

    def _shuffle(self, number: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        order = torch.randperm(len(self.passages.starts), generator=generator)
        batches = []
        for pool in order.split(POOL * self.batch):
            by_length = pool[self.passages.lengths[pool].argsort(stable=True)].split(self.batch)
            batches += [by_length[k] for k in torch.randperm(len(by_length), generator=generator)]
        return batches


def pad(passages: Passages, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The chosen passages as (inputs, targets), int64 (passages, longest), padded on the right."""
    starts, lengths = passages.starts[chosen], passages.lengths[chosen]
    within = torch.arange(int(lengths.max()))
    padding = within >= lengths[:, None]
    at = (starts[:, None] + within).masked_fill(padding, 0)
    return passages.stream[at].long(), passages.stream[at + 1].long().masked_fill(padding, IGNORED)
