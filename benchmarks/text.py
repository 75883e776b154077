"""The text a model is pretrained on: which bytes, which of them are held out, and what a bigram makes of them.

A document is one file. It is cut into passages, at blank lines or line ends, so passages have very different
lengths: the reason micro-batches hold different numbers of tokens. Everything here is a function of the files
alone; two readings of the same files give the same tensors.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import JobError

HELD_OUT_SHARE = 10  # one document (or one tenth of each document, where there are few) of this many
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


@dataclass(frozen=True)
class Passages:
    """A byte stream and the passages in it.

    stream: uint8, 1-D. Every document is preceded by one newline, so each byte of a document has a predecessor.
    starts, lengths: int64, 1-D, in bytes. Passage ``k`` predicts ``stream[starts[k] + 1 :][: lengths[k]]``, each
    byte from those before it in the same passage and the one byte before the passage.
    """

    stream: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor

    def spread(self, n_bytes: int) -> Passages:
        """Evenly spaced passages of about ``n_bytes`` bytes in all (all of them, if there are fewer)."""
        total = int(self.lengths.sum())
        keep = min(len(self.lengths), max(1, round(len(self.lengths) * n_bytes / total)))
        chosen = torch.linspace(0, len(self.lengths) - 1, keep).round().long()
        return Passages(self.stream, self.starts[chosen], self.lengths[chosen])


@dataclass(frozen=True)
class Text:
    """Training and held-out passages of one text. ``digest`` identifies the bytes; ``description`` is for people."""

    train: Passages
    held_out: Passages
    digest: str
    description: str


def load_text(path: str | None, context: int, max_bytes: int) -> Text:
    """Read ``path`` (a file, a folder, or None for the standard library's sources) and cut it into passages.

    context: the longest passage, in bytes. max_bytes: reading stops before the document that would exceed it.
    Raises JobError.
    """
    documents, description = _read_standard_library(max_bytes) if path is None else _read_path(Path(path), max_bytes)
    if len(documents) >= HELD_OUT_SHARE:
        # Whole documents: the held-out loss is then about files the model has never seen a line of.
        held_out = documents[HELD_OUT_SHARE // 2 :: HELD_OUT_SHARE]
        train = [d for k, d in enumerate(documents) if k % HELD_OUT_SHARE != HELD_OUT_SHARE // 2]
    else:
        cuts = [len(d) - len(d) // HELD_OUT_SHARE for d in documents]
        train = [d[:cut] for d, cut in zip(documents, cuts, strict=True)]
        held_out = [d[cut:] for d, cut in zip(documents, cuts, strict=True)]
    n_train, n_held_out = sum(map(len, train)), sum(map(len, held_out))
    if n_train < 4 * context or n_held_out < context:
        raise JobError(
            f"the text ({description}) is too small: {n_train} bytes to train on and {n_held_out} held out; "
            f"context {context} needs at least {4 * context} and {context}. Give more text, or a smaller --context"
        )
    digest = hashlib.sha256()
    for document in documents:
        digest.update(len(document).to_bytes(8, "little") + document)
    return Text(
        train=_cut(train, context),
        held_out=_cut(held_out, context),
        digest=digest.hexdigest(),
        description=f"{description}, {n_train:,} bytes to train on, {n_held_out:,} held out",
    )


def _read_standard_library(max_bytes: int) -> tuple[list[bytes], str]:
    root = Path(sysconfig.get_path("stdlib"))
    documents, left_out = _read_files(_walk(root, ".py"), max_bytes)
    if not documents:
        raise JobError(f"no Python sources of the standard library below {root}; give a file or folder with --text")
    return documents, f"Python's standard library, {len(documents)} files{left_out}"


def _read_path(path: Path, max_bytes: int) -> tuple[list[bytes], str]:
    if not path.exists():
        raise JobError(f"--text {path}: no such file or folder")
    documents, left_out = _read_files([path] if path.is_file() else _walk(path, ""), max_bytes)
    if not documents:
        raise JobError(
            f"--text {path}: no text in it within --max-bytes {max_bytes:,} (empty and binary files are skipped)"
        )
    return documents, f"{path}, {len(documents)} file{'s' * (len(documents) > 1)}{left_out}"


def _walk(root: Path, suffix: str) -> list[Path]:
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [s for s in subfolders if s not in SKIPPED_FOLDERS and not s.startswith(".")]
        found += [Path(folder, n) for n in names if n.endswith(suffix) and not n.startswith(".")]
    # Sorted by the path below the root: os.walk's order is the file system's, and differs between machines.
    return sorted((p for p in found if p.is_file()), key=lambda p: p.relative_to(root).as_posix())


def _read_files(paths: list[Path], max_bytes: int) -> tuple[list[bytes], str]:
    documents, total = [], 0
    for k, path in enumerate(paths):
        try:
            document = path.read_bytes()
        except OSError as error:
            raise JobError(f"cannot read {path}: {error.strerror}") from error
        if not document or b"\0" in document[:8192]:
            continue
        if total + len(document) > max_bytes:
            return documents, f" (the {len(paths) - k} others are beyond --max-bytes {max_bytes:,})"
        documents.append(document)
        total += len(document)
    return documents, ""


def _cut(documents: list[bytes], context: int) -> Passages:
    stream, starts, lengths = bytearray(), [], []
    for document in documents:
        base = len(stream)
        stream += b"\n" + document
        position = 0
        while position < len(document):
            end = min(position + context, len(document))
            if end < len(document):
                shortest = position + context // 4
                blank_line = document.rfind(b"\n\n", shortest, end)
                line_end = document.rfind(b"\n", shortest, end)
                end = blank_line + 2 if blank_line >= 0 else line_end + 1 if line_end >= 0 else end
            starts.append(base + position)
            lengths.append(end - position)
            position = end
    return Passages(torch.frombuffer(stream, dtype=torch.uint8), torch.tensor(starts), torch.tensor(lengths))


def bigram_loss(train: Passages, held_out: Passages) -> float:
    """Held-out loss, in nats per byte, of an add-one smoothed bigram model fitted to the training bytes."""
    counts = _pair_counts(train) + 1
    log_probability = (counts / counts.sum(dim=1, keepdim=True)).log()
    pairs = _pair_counts(held_out)
    return -float((pairs * log_probability).sum() / pairs.sum())


def _pair_counts(passages: Passages) -> torch.Tensor:
    """float64 (256, 256): how often byte ``j`` follows byte ``i`` where a passage predicts ``j``."""
    within = torch.arange(int(passages.lengths.max()))
    counts = torch.zeros(256 * 256, dtype=torch.int64)
    for starts, lengths in zip(passages.starts.split(4096), passages.lengths.split(4096), strict=True):
        at = (starts[:, None] + within)[within < lengths[:, None]]
        pairs = passages.stream[at].long() * 256 + passages.stream[at + 1].long()
        counts += torch.bincount(pairs, minlength=256 * 256)
    return counts.view(256, 256).double()
