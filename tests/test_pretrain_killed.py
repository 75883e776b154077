"""Nothing lost: pretraining killed at any moment, and with a disk that is full or cannot be written."""

import ctypes
import os
import random
import resource
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from pretraining import ROOT, TINY, assert_same_end, events, interrupt_after, job_fixture, text_fixture  # noqa: F401

from benchmarks import JobError, pretrain, train_state
from benchmarks.run_log import Log

# A checkpoint with every window, and more windows than 20 killed runs may see.
OFTEN = {"--steps": 64, "--eval-every": 1, "--eval-bytes": 300, "--microbatches": 2, "--epoch": 7, "--passages": 2,
         "--model-width": 16, "--layers": 1, "--sample": 8}  # fmt: skip


@pytest.mark.slow
def test_killed_at_20_random_moments_it_ends_with_the_same_bits(text, tmp_path):
    """By the clock, after any byte of a checkpoint, before and after each call that makes it last."""
    seed = random.SystemRandom().randrange(2**32)
    options = [*TINY, *(str(x) for option in OFTEN.items() for x in option)]
    command = [sys.executable, str(Path(__file__).with_name("killed_pretrain.py")), str(seed), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    done = subprocess.run(
        [*command, "--text", str(text), *options], env=environment, capture_output=True, text=True, check=False
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"seed {seed}: killed 20 times" in done.stdout
    assert_same_end(tmp_path / "whole", tmp_path / "killed")
    assert len(events(tmp_path / "killed", "window")) == OFTEN["--steps"]


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
    """The folder of the run that nothing disturbs."""
    out = tmp_path_factory.mktemp("undisturbed")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert pretrain.main(["--text", str(text), "--out", str(out), *TINY]) == 0
    torch.set_num_threads(threads)
    return out


# -- a disk that is full, a folder that cannot be written ---------------------------------------------------


@contextmanager
def room_for(n_bytes):
    """While inside, the system refuses to make any file longer: the write fails in the middle, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))  # Python ignores SIGXFSZ
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def read_only(folder):
    """While inside, nothing can be made in ``folder``, not by root either, who then lacks CAP_DAC_OVERRIDE."""
    libc, header = ctypes.CDLL(None, use_errno=True), (ctypes.c_uint32 * 2)(0x20080522, 0)
    capabilities = (ctypes.c_uint32 * 6)()
    assert libc.capget(header, capabilities) == 0
    kept, mode = list(capabilities), folder.stat().st_mode
    capabilities[0] &= ~2  # of the effective ones, which may be raised again
    try:
        folder.chmod(0o555)
        assert libc.capset(header, capabilities) == 0
        with pytest.raises(PermissionError):
            (folder / "new").touch()
        yield
    finally:
        assert libc.capset(header, (ctypes.c_uint32 * 6)(*kept)) == 0
        folder.chmod(mode)


def spoil_saves(monkeypatch, spoil, which):
    """Checkpoints whose number (from 1) is in ``which`` are written inside ``spoil(folder)``."""
    save, count = train_state.save, 0

    def save_spoiled(path, content):
        nonlocal count
        count += 1
        if count in which:
            with spoil(path.parent):
                return save(path, content)
        return save(path, content)

    monkeypatch.setattr(train_state, "save", save_spoiled)


SPOILS = {
    "full disk": (lambda folder: room_for(20_000), "File too large"),
    "read-only folder": (read_only, "Permission denied"),
}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="capabilities are Linux's")
@pytest.mark.parametrize(("spoil", "reason"), SPOILS.values(), ids=SPOILS)
def test_training_goes_on_when_a_checkpoint_cannot_be_written(whole, job, monkeypatch, capsys, spoil, reason):
    """To stop would throw away what only memory holds. What was saved before stays good, and is saved over later."""
    with monkeypatch.context() as patch:
        spoil_saves(patch, spoil, {2})  # of three
        out = job()
    assert_same_end(whole, out)
    message = capsys.readouterr().err
    assert f"{out / 'checkpoint.pt'}: [Errno" in message
    assert f"{reason}" in message
    assert "the checkpoint written before is still there; training goes on" in message


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="capabilities are Linux's")
@pytest.mark.parametrize(("spoil", "reason"), SPOILS.values(), ids=SPOILS)
@pytest.mark.parametrize("end", ["finished", "stopped"])
def test_a_run_whose_last_save_failed_is_an_error(whole, job, monkeypatch, capsys, spoil, reason, end):
    """Not the usual status, and no word of resuming from what is not there; the one before is resumed from."""
    with monkeypatch.context() as patch:
        spoil_saves(patch, spoil, {3} if end == "finished" else {2})
        if end == "stopped":
            interrupt_after(patch, 17)
        out = job(status=1)
    printed = capsys.readouterr()
    assert "go on with --resume" not in printed.out
    assert printed.err.strip().splitlines()[-1].startswith(f"pretrain: cannot write {out / 'checkpoint.pt'}: [Errno")
    assert reason in printed.err.splitlines()[-1]
    steps = 8 if end == "finished" else 4
    assert train_state.load(out / "checkpoint.pt")["position"] == pretrain.Windows(4, 10).first(steps)
    assert not list(out.glob("*.partial"))
    job("--resume")
    assert_same_end(whole, out)


def test_a_full_device_at_the_start_is_refused(job, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "log.jsonl").symlink_to("/dev/full")
    job(status=1)
    assert "log.jsonl: No space left on device; make room, or choose another --out" in capsys.readouterr().err


def test_the_checkpoint_of_a_full_device(tmp_path):
    """A file that takes nothing at all; torch.save's own error would hide why."""
    (tmp_path / "checkpoint.pt.partial").symlink_to("/dev/full")
    with pytest.raises(JobError, match=r"checkpoint.pt: \[Errno 28\] No space left on device$"):
        train_state.save(tmp_path / "checkpoint.pt", {"position": 1, "more": torch.zeros(100_000)})
    assert not list(tmp_path.iterdir())


def test_a_log_without_room_misses_nothing_once_there_is(tmp_path):
    """A line may be cut in the middle: the rest of it follows."""
    log = Log(tmp_path / "log.jsonl", '{"event": "before"}\n')
    log.write("window", step=1)
    with room_for((tmp_path / "log.jsonl").stat().st_size + 10):
        for step in 2, 3:
            log.write("window", step=step)
            assert "File too large" in log.trouble
    assert [line["step"] for line in log.events("window")] == [1, 2, 3]
    assert (tmp_path / "log.jsonl").read_text() == log.text()[: (tmp_path / "log.jsonl").stat().st_size] != log.text()
    log.write("window", step=4)
    assert log.trouble is None
    assert (tmp_path / "log.jsonl").read_text() == log.text()
    assert [line["step"] for line in log.events("window")] == [1, 2, 3, 4]


def test_a_log_without_room_ends_no_training(whole, job, monkeypatch, capsys):
    """Its lines are in memory, and in the checkpoint; where they stay the run ends with an error."""
    write = Log.write

    def write_cut(self, event, **values):
        full = event == end or (event == "window" and values["step"] in (3, 4))
        with room_for(self.path.stat().st_size + 7) if full else nullcontext():
            write(self, event, **values)

    monkeypatch.setattr(Log, "write", write_cut)
    for end, status in ("none", 0), ("sample", 1):
        out = job(out=end, status=status)
        message = capsys.readouterr().err
        assert message.count("File too large; the log goes on in memory") == 1
        last = message.strip().splitlines()[-1]
        assert (last == f"pretrain: cannot write {out / 'log.jsonl'}: File too large") == (status == 1)
        if status == 0:
            assert_same_end(whole, out)


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    done = []

    def noting(name):
        call = getattr(os, name)

        def wrapped(first, *others):
            folder = name == "fsync" and os.path.isdir(f"/proc/self/fd/{first}")
            done.append("fsync of the folder" if folder else name)
            if name == "replace":
                assert train_state.load(Path(first))["position"] == 2
                assert train_state.load(Path(*others))["position"] == 1
            return call(first, *others)

        return wrapped

    train_state.save(tmp_path / "checkpoint.pt", {"position": 1})
    for name in "fsync", "replace":
        monkeypatch.setattr(os, name, noting(name))
    train_state.save(tmp_path / "checkpoint.pt", {"position": 2})
    assert done == ["fsync", "replace", "fsync of the folder"]
