"""The main job: what it is asked for and cannot do is one line that says why and what to do instead."""

import pytest
import torch
from pretraining import TINY, job_fixture, text_fixture  # noqa: F401

from benchmarks import pretrain


def refused(capsys, *options, status=1):
    """The one line on stderr of a run that is refused."""
    try:
        result = pretrain.main(list(options))
    except SystemExit as exit_:
        result = exit_.code
    assert result == status
    message = capsys.readouterr().err
    assert "Traceback" not in message
    return message.strip().splitlines()[-1]


def test_unusable_text_is_refused(tmp_path, capsys):
    out = ["--out", str(tmp_path / "out")]
    assert "no such file or folder" in refused(capsys, "--text", str(tmp_path / "nowhere"), *out)
    (tmp_path / "empty").mkdir()
    assert "no text in it" in refused(capsys, "--text", str(tmp_path / "empty"), *out)
    (tmp_path / "small").write_text("too little")
    assert "too small: 9 bytes to train on" in refused(capsys, "--text", str(tmp_path / "small"), *out)
    (tmp_path / "binary").write_bytes(b"\0\1" * 4000)
    assert "binary" in refused(capsys, "--text", str(tmp_path / "binary"), *out)


def test_unusable_checkpoint_is_refused(text, tmp_path, capsys):
    common = ["--text", str(text), "--out", str(tmp_path), *TINY, "--resume"]
    assert "no checkpoint" in refused(capsys, *common)
    for content in b"", b"not a checkpoint", b"PK\3\4 nor this":
        (tmp_path / "checkpoint.pt").write_bytes(content)
        assert "as a checkpoint" in refused(capsys, *common)
    torch.save({"model": {}}, tmp_path / "checkpoint.pt")
    assert "not a checkpoint of this program" in refused(capsys, *common)


def test_resuming_with_other_settings_names_them(job, text, tmp_path, capsys):
    out = job("--steps", "1", "--sample", "0")
    common = ["--out", str(out), "--resume"]
    for option, value in ("--layers", "3"), ("--lr", "0.5"), ("--optimizer", "torch"), ("--steps", "7"):
        assert refused(capsys, *common, option, value).startswith(f"pretrain: {option} is {value}, but the run")
    (tmp_path / "other").write_bytes(b"other text\n" * 500)
    assert "--text: the bytes found" in refused(capsys, *common, "--text", str(tmp_path / "other"))
    assert pretrain.main([*common, "--sample", "5"]) == 0  # what does not change the training may change


def test_unwritable_folder_is_refused(text, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    message = refused(capsys, "--text", str(text), *TINY, "--out", str(tmp_path / "file" / "out"))
    assert "cannot make the folder" in message
    (tmp_path / "out" / "log.jsonl").mkdir(parents=True)
    assert "cannot write" in refused(capsys, "--text", str(text), *TINY, "--out", str(tmp_path / "out"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "--steps: 0 must be a whole number of at least 1"),
        (["--steps", "many"], "--steps: 'many' must be a whole number"),
        (["--microbatches", "2.5"], "--microbatches: '2.5' must be a whole number"),
        (["--lr", "nan"], "--lr: nan must be a number above 0"),
        (["--lr", "0"], "--lr: 0 must be a number above 0"),
        (["--lr", "-1"], "--lr: -1 must be a number above 0"),
        (["--weight-decay", "inf"], "--weight-decay: inf must be a number of at least 0"),
        (["--dropout", "1"], "--dropout: 1 must be a number of at least 0 and below 1"),
        (["--text", ""], "--text: an empty path"),
        (["--mode", "magic"], "--mode: invalid choice"),
    ],
)
def test_bad_numbers_are_refused(capsys, options, message):
    assert message in refused(capsys, *options, status=2)


def test_divergence_is_reported(job, capsys):
    job("--lr", "1e30", "--dropout", "0", status=1)
    assert "try a lower --lr" in capsys.readouterr().err


def test_contradictory_options_are_refused(text, capsys):
    assert "multiple of 6" in refused(capsys, "--model-width", "64", "--heads", "3")
    assert "--compare trains with both" in refused(capsys, "--compare", "--optimizer", "torch")
    options = ["--text", str(text), *TINY]
    assert "--backend nonsense" in refused(capsys, *options, "--backend", "nonsense")
