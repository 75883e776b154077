"""Stopping a run between two of its steps."""

from __future__ import annotations

import signal
from types import FrameType


class StopRequest:
    """While inside, the first SIGINT or SIGTERM is only noted, in ``signal``; a second one acts as ever."""

    def __enter__(self) -> StopRequest:
        self.signal: int | None = None
        self._before = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.signal = number
        signal.signal(number, self._before[number])
