"""What a run leaves to look at: a log of JSON lines, and a plot and a record of its losses made from it."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks import JobError
from benchmarks.results import environment
from benchmarks.settings import Settings, as_dict


class Log:
    """JSON lines in a file at ``path``, which is written anew, beginning with ``text``: a checkpoint's log so far.

    trouble: what kept the last line from the file, or None. The lines are all here, and the next one brings those
    that are missing. Raises JobError where the file cannot be begun.
    """

    def __init__(self, path: Path, text: str = ""):
        self.path = path
        self.trouble: str | None = None
        self._pieces: list[str] = []
        self._missing = b""
        try:
            # Unbuffered, so that after an error it is known how many bytes are in the file.
            self._file = open(path, "wb", buffering=0)  # noqa: SIM115 - open as long as the run
        except OSError as error:
            raise JobError(f"cannot write {path}: {error.strerror}; choose another --out") from error
        self._append(text)

    def write(self, event: str, **values: Any) -> None:
        self._append(json.dumps({"event": event, **values}) + "\n")

    def text(self) -> str:
        """All that was written so far, before a resume too."""
        return "".join(self._pieces)

    def events(self, event: str) -> list[dict[str, Any]]:
        """All lines of the kind ``event`` so far."""
        lines = map(json.loads, self.text().splitlines())
        return [line for line in lines if line["event"] == event]

    def _append(self, text: str) -> None:
        self._pieces.append(text)
        self._missing += text.encode()
        self.trouble = None
        try:
            while self._missing:
                self._missing = self._missing[self._file.write(self._missing) :]
        except OSError as error:
            self.trouble = f"cannot write {self.path}: {error.strerror}"


def peak_memory(device: torch.device) -> int:
    """Highest memory so far, in bytes: allocated on a GPU, resident of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():
        # getrusage's figure would be that of the process this one was forked from, where that was larger.
        return next(int(line.split()[1]) << 10 for line in status.read_text().splitlines() if "VmHWM" in line)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def plot(log: Log, path: Path, title: str) -> None:
    """Draw training and held-out loss over the steps, and the bigram's loss as a line, into a PNG at ``path``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    windows, held_out = log.events("window"), log.events("held-out")
    for k, side in enumerate(dict.fromkeys(line["optimizer"] for line in windows)):
        own = [line for line in windows if line["optimizer"] == side]
        style = "-" if k == 0 else "--"
        axes.plot(
            [w["step"] for w in own], [w["loss"] for w in own], style, color=f"C{k}", lw=0.8, alpha=0.6,
            label=f"training, {side}",
        )  # fmt: skip
        own = [line for line in held_out if line["optimizer"] == side]
        axes.plot(
            [h["step"] for h in own], [h["loss"] for h in own], style, color=f"C{k}", marker="o",
            label=f"held out, {side}",
        )  # fmt: skip
    axes.axhline(held_out[-1]["bigram"], color="black", ls=":", label="held out, bigram model")
    axes.set(xlabel="optimizer step", ylabel="loss (nats per byte)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise JobError(f"cannot write {path}: {error.strerror}") from error
    finally:
        pyplot.close(figure)


def write_record(log: Log, path: Path, settings: Settings, text: str, device: torch.device) -> None:
    """Write the held-out losses, with environment and settings, as the other benchmarks' --json."""
    rows = [{key: line[key] for key in line if key != "event"} for line in log.events("held-out")]
    result = {
        "benchmark": "pretrain",
        "environment": environment(device, settings.backend),
        "settings": as_dict(settings),
        "text": text,
        "rows": rows,
    }
    try:
        path.write_text(json.dumps(result, indent=1) + "\n")
    except OSError as error:
        raise JobError(f"--json: cannot write {path}: {error.strerror}") from error
