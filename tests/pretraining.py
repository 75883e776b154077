"""What the tests of benchmarks.pretrain share: a configuration of seconds, its text, and comparing two runs."""

import json
import signal
from pathlib import Path

import pytest
import torch

from benchmarks import pretrain, train_state
from benchmarks.side import Side

ROOT = Path(__file__).parents[1]
OPTIMIZERS = ["fused", "torch"]
# Windows of 4, 4 and 2 micro-batches; dropout, so that a lost random state shows.
OPTIONS = {
    "--model-width": 32, "--heads": 2, "--layers": 2, "--context": 48, "--dropout": 0.1,
    "--passages": 4, "--microbatches": 4, "--epoch": 10, "--steps": 9, "--lr": 0.01, "--warmup": 2,
    "--eval-every": 4, "--eval-bytes": 2000, "--sample": 20,
}  # fmt: skip
TINY = [str(x) for option in OPTIONS.items() for x in option]


@pytest.fixture(name="text", scope="module")
def text_fixture(tmp_path_factory):
    """A folder of documents of very different lengths."""
    folder = tmp_path_factory.mktemp("text")
    for k, path in enumerate(sorted((ROOT / "fused_accum").glob("*.py"))):
        (folder / path.name).write_bytes(path.read_bytes()[: 500 + 700 * k])
    return folder


@pytest.fixture(name="job")
def job_fixture(text, tmp_path):
    """Runs the job in this process, on the folder of text, into a folder of its own; returns that folder."""

    def run(*options, out="run", status=0):
        assert pretrain.main(["--text", str(text), "--out", str(tmp_path / out), *TINY, *options]) == status
        return tmp_path / out

    return run


def events(out, kind):
    lines = map(json.loads, (out / "log.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == kind]


def leaves(tree, path=""):
    if isinstance(tree, dict | list):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, value in items:
            yield from leaves(value, f"{path}/{key}")
    else:
        yield path, tree


def assert_same_end(a, b):
    """Two runs ended with the same bits: weights, moments, random state, data position, losses in the log."""
    left, right = (train_state.load(out / "checkpoint.pt") for out in (a, b))
    for content in left, right:
        del content["log"], content["seconds"]
    for (path, x), (other, y) in zip(leaves(left), leaves(right), strict=True):
        assert path == other
        assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y, path
    for kind in "window", "held-out", "sample":
        rows = [[{k: v for k, v in e.items() if k not in UNSTEADY} for e in events(out, kind)] for out in (a, b)]
        assert rows[0] == rows[1]


UNSTEADY = {"seconds", "peak_bytes"}


def interrupt_after(monkeypatch, micro_batches):
    """A SIGINT arrives while that micro-batch (of either side) is computed."""
    original, count = Side.micro_batch, 0

    def micro_batch(self, *arguments):
        nonlocal count
        original(self, *arguments)
        count += 1
        if count == micro_batches:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Side, "micro_batch", micro_batch)
