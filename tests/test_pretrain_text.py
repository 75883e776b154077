"""The main job's text: what is predicted, in which order, and what a bigram makes of it."""

import pytest
import torch

from benchmarks.batches import MicroBatches, Windows, pad
from benchmarks.text import bigram_loss, load_text


@pytest.mark.parametrize(("size", "epoch"), [(4, 10), (4, 8), (3, 1), (1, 5), (8, 3)])
def test_windows_cover_every_micro_batch_once(size, epoch):
    windows = Windows(size, epoch)
    each = [windows.members(w) for w in range(12)]
    assert [k for m in each for k in m] == list(range(windows.first(12)))
    assert all(windows.of(k) == w for w, m in enumerate(each) for k in m)
    assert all(0 < len(m) <= size for m in each)
    assert all(len({k // epoch for k in m}) == 1 for m in each), "a window crosses the end of an epoch"


def test_every_byte_is_predicted_once_and_a_pass_holds_every_passage(tmp_path):
    documents = [b"a line of its own\n\n" * (1 + k * k) + b"x" * 90 * k for k in range(12)]
    for k, document in enumerate(documents):
        (tmp_path / f"{k:02}").write_bytes(document)
    loaded = load_text(str(tmp_path), context=32, max_bytes=1 << 20)
    held_out = [d for k, d in enumerate(documents) if k % 10 == 5]
    predicted = []
    for k in range(len(loaded.held_out.starts)):
        inputs, targets = pad(loaded.held_out, torch.tensor([k]))
        assert inputs[0, 1:].tolist() == targets[0, :-1].tolist()
        predicted += targets[0].tolist()
    assert bytes(predicted) == b"".join(held_out)

    batches = MicroBatches(loaded.train, batch=4, seed=0)
    for number in 0, 1:
        order = [batches.passages_of(number * batches.per_pass + k) for k in range(batches.per_pass)]
        assert sorted(torch.cat(order).tolist()) == list(range(len(loaded.train.starts)))
    tokens = [batches.tokens(k) for k in range(batches.per_pass)]
    assert max(tokens) > 1.5 * min(tokens)


def test_bigram_is_the_add_one_model(tmp_path):
    (tmp_path / "abab").write_bytes(b"ab" * 500)
    loaded = load_text(str(tmp_path / "abab"), context=16, max_bytes=1 << 20)
    # 900 bytes to train on: a follows the newline once and b 449 times, b follows a 450 times; then 100 held out.
    after = {"\n": 2 / 257, "a": 451 / 706, "b": 450 / 705}
    log = {key: torch.tensor(value, dtype=torch.float64).log().item() for key, value in after.items()}
    expected = -(log["\n"] + 50 * log["a"] + 49 * log["b"]) / 100
    assert bigram_loss(loaded.train, loaded.held_out) == pytest.approx(expected, rel=1e-12)
