"""benchmarks.pretrain killed 20 times: ``python killed_pretrain.py SEED FOLDER PRETRAIN-OPTIONS``.

Runs it once undisturbed into FOLDER/whole; then again into FOLDER/killed, as one job that is killed with SIGKILL, at
random moments of three kinds in turn, and resumed, until it has been killed 20 times and has come to its end.

Each run is a fork of this process, which has everything imported and has computed nothing: a kill costs no start. No
killed run lives for more than SAVES checkpoints, so that a job of more than SAVES * KILLS is killed that often at any
speed.
"""

import contextlib
import io
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch._dynamo  # what the first optimizer imports, seconds long: once for all forks
import tqdm  # noqa: F401 - likewise
from matplotlib import pyplot  # noqa: F401 - likewise

from benchmarks import pretrain, train_state

KILLS, SAVES = 20, 3


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fork(arguments: list[str], prepare: Callable[[], None] = lambda: None) -> int:
    """pretrain.main in a child, after ``prepare``; returns its process id."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        status = 70
        try:
            prepare()
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
                status = pretrain.main(arguments)
        finally:
            os._exit(status)
    return child


def wait(child: int) -> bool:
    """Whether it was killed; an error of its own ends this program."""
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return True
    if status != 0:
        sys.exit(f"pretrain ended with wait status {status}")
    return False


def after_bytes(save: int, number: int) -> None:
    """In the child: die when ``number`` bytes of its ``save``-th checkpoint are in the file."""

    class Cut(io.FileIO):
        left = number

        def write(self, data):
            data = memoryview(data).cast("B")
            if self.left < len(data):
                super().write(data[: self.left])
                die()
            self.left -= len(data)
            return super().write(data)

    opened = 0

    def open_to_cut(path, mode):
        nonlocal opened
        opened += 1
        return Cut(path, mode) if opened == save else open(path, mode)

    train_state.open = open_to_cut


CALLS = 6  # moments of a save: before and after the file's fsync, the renaming, the folder's fsync


def at_call(number: int) -> None:
    """In the child: die at that moment of its saves."""
    seen = 0

    def dying(call):
        def wrapped(*arguments):
            nonlocal seen
            for moment in "before", "after":
                if seen == number:
                    die()
                seen += 1
                if moment == "before":
                    call(*arguments)

        return wrapped

    os.fsync, os.replace = dying(os.fsync), dying(os.replace)


def doom(kind: str, save: int, call: int, number: int) -> None:
    """In the child: what of its life is left when the clock does not end it."""
    if kind == "bytes":
        after_bytes(save + 1, number)
    at_call(save * CALLS + call if kind == "calls" else SAVES * CALLS - 1)


def main() -> None:
    seed, folder, options = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    torch.set_num_threads(1)
    chance = random.Random(seed)
    whole, killed = ([*options, "--out", str(folder / name)] for name in ("whole", "killed"))
    start = time.monotonic()
    if wait(fork(whole)):
        sys.exit("the run that nobody kills was killed")
    seconds = time.monotonic() - start
    size = (folder / "whole" / "checkpoint.pt").stat().st_size
    checkpoint = folder / "killed" / "checkpoint.pt"

    kills, kinds = 0, {"clock": 0, "bytes": 0, "calls": 0}
    while True:
        arguments = [*killed, "--resume"] if checkpoint.exists() else killed
        kind = list(kinds)[kills % len(kinds)]
        moment = chance.randrange(SAVES), chance.randrange(CALLS), chance.randrange(size)
        child = fork(arguments, partial(doom, kind, *moment) if kills < KILLS else lambda: None)
        if kind == "clock" and kills < KILLS:
            time.sleep(chance.uniform(0, seconds / 8))
            os.kill(child, signal.SIGKILL)
        if not wait(child):
            break
        kills += 1
        kinds[kind] += 1
        at = train_state.load(checkpoint)["position"] if checkpoint.exists() else None
        print(f"kill {kills}, by {kind}: the last checkpoint is after micro-batch {at}", flush=True)
    took = time.monotonic() - start
    print(f"seed {seed}: killed {kills} times, {kinds}; {seconds:.1f} s undisturbed, {took:.1f} s in all")


if __name__ == "__main__":
    main()
