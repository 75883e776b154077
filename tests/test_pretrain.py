"""The main job, in a configuration of seconds: it learns, resumes to the bit, divides short windows right."""

import copy
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from pretraining import OPTIMIZERS, ROOT, TINY, assert_same_end, events, interrupt_after, job_fixture, text_fixture  # noqa: F401

from benchmarks import JobError, pretrain, train_state
from benchmarks.batches import IGNORED
from benchmarks.gpt import GPT
from benchmarks.settings import parse

# -- training -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_learns_and_leaves_log_plot_checkpoint_and_record(job, capsys, tmp_path, optimizer):
    record = tmp_path / "record.json"
    out = job("--optimizer", optimizer, "--steps", "40", "--dropout", "0", "--epoch", "50", "--json", str(record))
    windows, held_out = events(out, "window"), events(out, "held-out")
    assert [w["step"] for w in windows] == list(range(1, 41))
    assert windows[0]["loss"] > 5
    assert windows[-1]["loss"] < 3.6
    assert held_out[-1]["step"] == 40
    assert held_out[-1]["loss"] < 3.6
    assert all(w["tokens"] > 0 and w["gradient_bytes"] > 0 and w["peak_bytes"] > 2**20 for w in windows)
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    rows = json.loads(record.read_text())["rows"]
    assert rows == [{"optimizer": optimizer, **{k: h[k] for k in ("step", "loss", "bigram")}} for h in held_out]
    printed = capsys.readouterr().out
    assert "an epoch is 50 micro-batches: 12 windows of 4 and a last one of 2" in printed
    assert f"bigram model's {held_out[-1]['bigram']:.4f}" in printed


def test_fused_and_torch_agree_and_are_compared(job, capsys):
    out = job("--compare")
    ours, theirs = ([w for w in events(out, "window") if w["optimizer"] == side] for side in OPTIMIZERS)
    assert len(ours) == len(theirs) == 9
    for a, b in zip(ours, theirs):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
    assert ours[0]["loss"] == theirs[0]["loss"]  # same weights, batches and dropout
    assert ours[-1]["loss"] < ours[0]["loss"] - 0.3
    n_bytes = 4 * sum(p.numel() for p in GPT(32, 2, 2, 32).parameters())
    assert ours[-1]["gradient_bytes"] == theirs[-1]["gradient_bytes"] == n_bytes  # one sum, and no gradient beside it
    printed = capsys.readouterr().out
    assert "held-out loss" in printed
    assert "9 interleaved windows" in printed


# -- resuming -----------------------------------------------------------------------------------------------


# After 6 micro-batches a window is half done, after 8 one is complete, after 9 the short one is half done.
@pytest.mark.parametrize("micro_batches", [1, 6, 8, 9])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_interrupted_and_resumed_ends_with_the_same_bits(job, monkeypatch, optimizer, micro_batches):
    whole = job("--optimizer", optimizer, out="whole")
    with monkeypatch.context() as patch:
        interrupt_after(patch, micro_batches)
        out = job("--optimizer", optimizer, status=128 + signal.SIGINT)
    assert train_state.load(out / "checkpoint.pt")["position"] == micro_batches
    job("--optimizer", optimizer, "--resume")
    assert_same_end(whole, out)


def test_comparison_resumes_too(job, monkeypatch):
    whole = job("--compare", out="whole")
    with monkeypatch.context() as patch:
        interrupt_after(patch, 13)  # in the second window, which is finished for both sides
        out = job("--compare", status=128 + signal.SIGINT)
    assert train_state.load(out / "checkpoint.pt")["position"] == 8
    job("--resume")
    assert_same_end(whole, out)


def test_resumes_into_another_folder_with_the_whole_log(job, tmp_path, monkeypatch):
    whole = job(out="whole")
    with monkeypatch.context() as patch:
        interrupt_after(patch, 6)
        job(out="first", status=128 + signal.SIGINT)
    assert_same_end(whole, job("--resume", str(tmp_path / "first" / "checkpoint.pt"), out="second"))


@pytest.mark.slow
def test_sigint_from_outside_saves_and_stops(job, text, tmp_path):
    out = tmp_path / "outside"
    steps = ["--steps", "120", "--eval-every", "120"]
    command = [sys.executable, "-m", "benchmarks.pretrain", "--text", str(text), "--out", str(out), *TINY, *steps]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        while process.poll() is None and not ((out / "log.jsonl").exists() and len(events(out, "window")) > 2):
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        printed = process.communicate(timeout=120)[0].decode()
    finally:
        process.kill()
    assert process.returncode == 130, printed
    assert "go on with --resume" in printed
    position = train_state.load(out / "checkpoint.pt")["position"]
    assert 0 < position < 400
    resumed = subprocess.run([*command, "--resume"], cwd=ROOT, env=environment, capture_output=True, check=False)
    assert resumed.returncode == 0, resumed.stderr.decode()
    assert f"resumed after micro-batch {position} of 400" in resumed.stdout.decode()
    assert_same_end(job(*steps, out="whole"), out)


def test_a_failed_save_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "checkpoint.pt"
    train_state.save(path, {"position": 1})

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(JobError, match=r"No space left on device.*written before is still there"):
            train_state.save(path, {"position": 2})
    assert train_state.load(path)["position"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.pt"]


@pytest.mark.parametrize("mode", ["explicit", "in-backward", "step-in-backward"])
def test_other_modes_train_like_torch_and_resume(job, monkeypatch, mode):
    """The losses of torch's loop, its gradient memory (explicit: twice that), and the same bits after a resume."""
    both = job("--compare", "--mode", mode, out="both")
    ours, theirs = ([w for w in events(both, "window") if w["optimizer"] == side] for side in OPTIMIZERS)
    for a, b in zip(ours, theirs, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
    # explicit mode holds the buffer and one micro-batch's gradients
    assert ours[-1]["gradient_bytes"] == theirs[-1]["gradient_bytes"] * (2 if mode == "explicit" else 1)
    whole = job("--mode", mode, out="whole")
    with monkeypatch.context() as patch:
        interrupt_after(patch, 6)
        out = job("--mode", mode, status=128 + signal.SIGINT)
    # in mid-window; but an update that happens inside a backward is waited for
    assert train_state.load(out / "checkpoint.pt")["position"] == (8 if mode == "step-in-backward" else 6)
    job("--mode", mode, "--resume")
    assert_same_end(whole, out)


# -- windows and weights ------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("size", [4, 2], ids=["full", "short"])
def test_a_window_is_one_batch_over_its_tokens(text, tmp_path, optimizer, size):
    """The first moment after one update is (1 - beta1) times the gradient of the mean over all the tokens."""
    run = pretrain.Run(
        parse(["--text", str(text), "--out", str(tmp_path), *TINY, "--dropout", "0", "--optimizer", optimizer])
    )
    side = run.sides[0]
    for p in side.model.parameters():
        torch.nn.init.normal_(p, std=0.2)  # branches that start at zero would leave most gradients zero
    reference = copy.deepcopy(side.model)  # whose gradients are tensors
    windows = ([run.batches.get(k, run.windows, run.device) for k in run.windows.members(w)] for w in range(100))
    batches = next(w for w in windows if len(w) == size and len({b.tokens for b in w}) == size)
    assert [b.ends_window for b in batches] == [*[False] * (size - 1), True]

    total = sum(
        torch.nn.functional.cross_entropy(
            reference(b.inputs).flatten(0, 1), b.targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        for b in batches
    )
    tokens = sum(int((b.targets != IGNORED).sum()) for b in batches)
    expected = torch.autograd.grad(total / tokens, list(reference.parameters()))
    for batch in batches:
        side.micro_batch(batch, lr=0.0)
    for p, gradient in zip(side.model.parameters(), expected):
        exp_avg = side.optimizer.state[p]["exp_avg"]
        torch.testing.assert_close(exp_avg, 0.1 * gradient, rtol=1e-4, atol=1e-7)
    loss_sum, _ = side.end_window()
    assert loss_sum == pytest.approx(total.item(), rel=1e-5)
