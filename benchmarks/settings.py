"""The settings of a pretraining run: command line, defaults, and which of them a resumed run must share."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

from benchmarks import JobError
from benchmarks.loops import MODES


@dataclass(frozen=True)
class Settings:
    """One field per option of the command line; ``--model-width`` is ``model_width``.

    Those marked ``free`` may differ in a resumed run: they do not change what is computed.
    """

    text: str | None = None
    max_bytes: int = 64 << 20
    model_width: int = 256
    layers: int = 3
    heads: int = 4
    context: int = 128
    dropout: float = 0.0
    steps: int = 160
    microbatches: int = 4
    passages: int = 4
    epoch: int = 250
    lr: float = 1.2e-3
    warmup: int = 20
    weight_decay: float = 0.1
    seed: int = 0
    optimizer: str = "fused"
    compare: bool = False
    mode: str = "direct"
    backend: str = "auto"
    eval_every: int = 40
    eval_bytes: int = 32768
    sample: int = 200

    def sides(self) -> list[str]:
        """The optimizers that train, by name."""
        return ["fused", "torch"] if self.compare else [self.optimizer]


# `text` is compared by its bytes, not by its path.
FREE = {"text", "eval_every", "eval_bytes", "sample"}


@dataclass(frozen=True)
class Request:
    """A parsed command line. given: the settings that were on it, by field name. resume: "" for OUT's own. json: a
    file for the record, or None."""

    given: dict[str, Any]
    out: str
    resume: str | None
    json: str | None

    def settings(self, saved: dict[str, Any] | None = None) -> Settings:
        """Defaults, or the ``saved`` settings of the run to resume, overridden by what was given.

        Raises JobError, naming the field, when a given setting contradicts a saved one.
        """
        names = {field.name for field in fields(Settings)}
        if saved is not None:
            if saved.keys() != names:
                raise JobError(
                    f"the checkpoint has settings of another version: {sorted(saved.keys() ^ names)} are on one "
                    "side only; resume it with the version that wrote it"
                )
            for name, value in self.given.items():
                if name not in FREE and value != saved[name]:
                    raise JobError(
                        f"--{name.replace('_', '-')} is {value}, but the run to resume has {saved[name]}; leave "
                        "the option out, or start a new run in another --out"
                    )
        settings = Settings(**{**(saved or {}), **self.given})
        _check(settings)
        return settings


def _check(settings: Settings) -> None:
    if settings.model_width % (2 * settings.heads):
        raise JobError(
            f"--model-width {settings.model_width} with --heads {settings.heads}: every head needs the same, even "
            f"width, so the model's must be a multiple of {2 * settings.heads}"
        )
    if settings.compare and settings.optimizer != "fused":
        raise JobError(f"--compare trains with both optimizers; leave --optimizer {settings.optimizer} out")


def _number(kind: type, at_least: float, below: float = math.inf, *, above: float | None = None) -> Callable:
    def parse(text: str) -> Any:
        rule = f"must be {'a whole' if kind is int else 'a'} number "
        rule += f"above {above:g}" if above is not None else f"of at least {at_least:g}"
        rule += f" and below {below:g}" if below < math.inf else ""
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} {rule}") from None
        if not (math.isfinite(value) and at_least <= value < below) or value == above:
            raise argparse.ArgumentTypeError(f"{text} {rule}")
        return value

    return parse


def _path(text: str) -> str:
    """Absolute: the run may be resumed from another folder."""
    if not text:
        raise argparse.ArgumentTypeError("an empty path; name a file or folder, or leave the option out")
    return os.path.abspath(text)


def parse(arguments: list[str] | None) -> Request:
    """Parse ``arguments`` (None: sys.argv). Exits with status 2 and a message that names the option."""
    default = Settings()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pretrain",
        description="Pretrain a byte-level GPT on real text with gradient accumulation, and report its held-out "
        "loss beside a bigram model's.",
        argument_default=argparse.SUPPRESS,
    )

    def add(name: str, help: str, **options: Any) -> None:
        value = getattr(default, name.strip("-").replace("-", "_"))
        parser.add_argument(name, help=help if value is None else f"{help} (default: {value})", **options)

    positive, share = _number(int, 1), _number(float, 0, 1)
    add("--text", "file or folder to train on (default: the sources of Python's standard library)", type=_path)
    add("--max-bytes", "read no more than this much text", type=positive)
    add("--model-width", "features per position", type=positive)
    add("--layers", "blocks", type=positive)
    add("--heads", "attention heads", type=positive)
    add("--context", "longest passage, in bytes", type=_number(int, 4))
    add("--dropout", "share of each branch's outputs dropped", type=share)
    add("--steps", "optimizer steps: windows to train on", type=positive)
    add("--microbatches", "micro-batches per window", type=positive)
    add("--passages", "passages per micro-batch", type=positive)
    add("--epoch", "micro-batches per epoch, whose last window may be short; at most one pass", type=positive)
    add("--lr", "highest learning rate", type=_number(float, 0, above=0))
    add("--warmup", "steps of linear warm-up, before the cosine", type=_number(int, 0))
    add("--weight-decay", "of the weight matrices", type=_number(float, 0))
    add("--seed", "of the weights and of the order of the passages", type=_number(int, 0, 2**31))
    add("--optimizer", "fused: FusedAccumAdamW, torch: torch.optim.AdamW", choices=["fused", "torch"])
    add("--mode", "how FusedAccumAdamW accumulates", choices=sorted(MODES))
    add("--backend", "of FusedAccumAdamW; see python -m fused_accum")
    add("--eval-every", "steps between held-out losses; a checkpoint is saved with each", type=positive)
    add("--eval-bytes", "held-out bytes in a held-out loss", type=positive)
    add("--sample", "bytes to generate at the end", type=_number(int, 0))
    parser.add_argument(
        "--compare", action="store_true", help="train with both optimizers side by side, and compare"
    )
    parser.add_argument(
        "--out", default="runs/pretrain", help="folder for log, plot and checkpoint (default: %(default)s)"
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const="",
        default=None,
        metavar="CHECKPOINT",
        help="go on from a checkpoint (default: the one in --out), with its settings",
    )
    parser.add_argument(
        "--json", type=_path, default=None, metavar="FILE", help="write environment, settings and held-out losses"
    )
    given = vars(parser.parse_args(arguments))
    out, resume, json = (given.pop(name) for name in ("out", "resume", "json"))
    return Request(given, out, resume, json)


def as_dict(settings: Settings) -> dict[str, Any]:
    return asdict(settings)
