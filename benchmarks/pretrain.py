"""Pretrain a byte-level GPT on real text with gradient accumulation: ``python -m benchmarks.pretrain``.

By default on the sources of Python's standard library, in about a minute on two CPU cores; on a GPU where there is
one. Leaves log.jsonl, loss.png and checkpoint.pt in --out. Ctrl-C saves and stops, in mid-window too; --resume goes
on, from the last checkpoint where the run was killed, and ends with the very bits of a run never stopped (same
machine, same number of threads). A disk that is full in mid-run ends no training: the last good checkpoint stays,
the next save is tried as ever, and a run whose last save failed ends with status 1. The lines to copy into a training
loop are in benchmarks/loops.py.
"""

from __future__ import annotations

import os

if __name__ == "__main__":
    # Read by OpenMP when torch loads it. Threads that wait then sleep; spinning, as is the default, made this job
    # five times slower on cores that other programs use too.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import math
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks import JobError, train_state
from benchmarks.batches import MicroBatches, Windows
from benchmarks.run_log import Log, peak_memory, plot, write_record
from benchmarks.settings import Request, as_dict, parse
from benchmarks.side import Side
from benchmarks.stop_request import StopRequest
from benchmarks.summary import comparison, readable, shown, size
from benchmarks.text import bigram_loss, load_text

CHECKPOINT = "checkpoint.pt"


class Run:
    """A run: its text, its sides, and how far it has come. ``position``, in micro-batches, is the data position too.

    Raises JobError.
    """

    def __init__(self, request: Request):
        self.out, self.json = Path(request.out), request.json
        saved = None
        if request.resume is not None:
            saved = train_state.load(Path(request.resume or self.out / CHECKPOINT))
        self.settings = s = request.settings(saved and saved["settings"])
        self.text = load_text(s.text, s.context, s.max_bytes)
        if saved and saved["text"] != self.text.digest:
            raise JobError(
                f"--text: the bytes found ({self.text.description}) are not those the run to resume was trained "
                "on; give the same text, or start a new run in another --out"
            )
        self.held_out = self.text.held_out.spread(s.eval_bytes)
        self.bigram = bigram_loss(self.text.train, self.held_out)
        self.batches = MicroBatches(self.text.train, s.passages, s.seed)
        self.windows = Windows(s.microbatches, min(s.epoch, self.batches.per_pass))
        self.end = self.windows.first(s.steps)
        self.device = _device()
        self.sides = [Side(name, s, self.device) for name in s.sides()]
        self.position, self.tokens, self.seconds = 0, 0, 0.0
        self.unsaved: str | None = None  # why the last checkpoint could not be written
        if saved:
            self._restore(saved)
        try:
            self.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise JobError(f"cannot make the folder {self.out}: {error.strerror}; choose another --out") from error
        self.log = Log(self.out / "log.jsonl", saved["log"] if saved else "")

    def introduce(self) -> None:
        """Print, and log, what is about to happen."""
        s, model = self.settings, self.sides[0].model
        parameters = sum(p.numel() for p in model.parameters())
        threads = f", {torch.get_num_threads()} threads" if self.device.type == "cpu" else ""
        print(f"text: {self.text.description}")
        print(f"model: {parameters:,} parameters, {s.layers} layers of {s.model_width}, on {self.device}{threads}")
        for side in self.sides:
            print(f"optimizer {side.name}: {side.runs_on}")
        print(f"{s.steps} steps; {self.windows.describe()}; a micro-batch is {s.passages} passages")
        if self.position:
            print(f"resumed after micro-batch {self.position} of {self.end}")
        self.log.write(
            "resumed" if self.position else "started",
            settings=as_dict(s),
            parameters=parameters,
            device=str(self.device),
            threads=torch.get_num_threads(),
            torch=torch.__version__,
            position=self.position,
        )
        if self.log.trouble:
            raise JobError(f"{self.log.trouble}; make room, or choose another --out")

    def lr(self, window: int) -> float:
        """Linear warm-up, then a cosine down to a twentieth."""
        s = self.settings
        warm = min(1.0, (window + 1) / (s.warmup + 1))
        through = max(0, window - s.warmup) / max(1, s.steps - s.warmup)
        return s.lr * warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * through)))

    def advance(self) -> bool:
        """Train on the next micro-batch; two sides take turns by the window. True when a window was completed."""
        window = self.windows.of(self.position)
        window_end = self.windows.first(window + 1)
        stop = window_end if len(self.sides) > 1 else self.position + 1
        batches = [self.batches.get(k, self.windows, self.device) for k in range(self.position, stop)]
        order = self.sides if window % 2 == 0 else self.sides[::-1]
        for side in order:
            # Both sides draw the same dropout.
            with torch.random.fork_rng(enabled=side is not order[-1]):
                for batch in batches:
                    side.micro_batch(batch, self.lr(window))
        self.position = stop
        return stop == window_end

    def must_go_on(self) -> bool:
        """Whether a stop has to wait: an update inside a backward is never begun and left."""
        in_window = self.position > self.windows.first(self.windows.of(self.position))
        return self.settings.mode == "step-in-backward" and in_window

    def log_window(self) -> dict[str, dict[str, Any]]:
        """Log the window just completed; returns its lines by side."""
        window = self.windows.of(self.position - 1)
        first = self.windows.first(window)
        tokens = sum(map(self.batches.tokens, range(first, self.position)))
        self.tokens += tokens
        lines = {}
        for side in self.sides:
            loss_sum, seconds = side.end_window()
            if not math.isfinite(loss_sum):
                raise JobError(
                    f"the loss of step {window + 1} ({side.name}) is {loss_sum}; try a lower --lr or a longer "
                    "--warmup (checkpoints are saved while it is finite)"
                )
            self.seconds += seconds
            lines[side.name] = line = {
                "optimizer": side.name,
                "step": window + 1,
                "epoch": first // self.windows.epoch + 1,
                "microbatches": self.position - first,
                "tokens": tokens,
                "loss": loss_sum / tokens,
                "lr": self.lr(window),
                "seconds": seconds,
                "gradient_bytes": side.gradient_bytes,
                "peak_bytes": peak_memory(self.device),
            }
            self.log.write("window", **line)
        return lines

    def log_held_out(self) -> str:
        """Measure and log the held-out loss of every side; returns it in words."""
        step = self.windows.of(self.position - 1) + 1
        losses = {side.name: side.held_out_loss(self.held_out) for side in self.sides}
        for name, loss in losses.items():
            self.log.write("held-out", optimizer=name, step=step, loss=loss, bigram=self.bigram)
        each = ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items())
        return f"step {step}: held-out loss {each}, bigram model {self.bigram:.4f} nats per byte"

    def save(self) -> None:
        """Write the checkpoint; ``unsaved`` tells of an error, which does not end the training.

        Memory then holds the only copy of what was learned since the last one, and there may be room the next time.
        """
        content = {
            "settings": as_dict(self.settings),
            "text": self.text.digest,
            "threads": torch.get_num_threads(),
            "position": self.position,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "log": self.log.text(),
            "sides": {side.name: side.state() for side in self.sides},
        }
        try:
            train_state.save(self.out / CHECKPOINT, content)
            self.unsaved = None
        except JobError as error:
            self.unsaved = str(error)

    def require_saved(self) -> None:
        """Raise JobError where the last checkpoint or the log's last lines could not be written."""
        troubles = [trouble for trouble in (self.unsaved, self.log.trouble) if trouble]
        if troubles:
            raise JobError("; ".join(troubles))

    def report(self) -> None:
        """Print, log and draw what came out."""
        s = self.settings
        if s.sample:
            # Begins like the first held-out document does.
            opening = bytes(self.text.held_out.stream[1:33].tolist()).partition(b"\n")[0]
            text = self.sides[0].model.generate(b"\n" + opening, s.sample, temperature=0.8, seed=s.seed)
            print("sample:\n    " + shown(opening + text).replace("\n", "\n    "))
            self.log.write("sample", prompt=opening.decode(errors="replace"), text=text.decode(errors="replace"))
        if s.compare:
            print(comparison(self.log))
        last = self.log.events("held-out")[-len(self.sides) :]
        for line in last:
            verdict = "below" if line["loss"] < self.bigram else "NOT below"
            print(
                f"{line['optimizer']}: held-out loss {line['loss']:.4f} nats per byte, {verdict} the bigram model's "
                f"{self.bigram:.4f}"
            )
        plot(self.log, self.out / "loss.png", f"Byte-level GPT, {s.layers} layers of {s.model_width}")
        if self.json:
            write_record(self.log, Path(self.json), s, self.text.description, self.device)
        print(
            f"{self.tokens:,} tokens per optimizer, {self.seconds:.0f} s of training, peak memory "
            f"{size(peak_memory(self.device))}"
        )
        self.require_saved()
        print(f"log.jsonl, loss.png and {CHECKPOINT} are in {self.out}")

    def _restore(self, saved: dict[str, Any]) -> None:
        for side in self.sides:
            side.restore(saved["sides"][side.name])
        self.position, self.tokens, self.seconds = saved["position"], saved["tokens"], saved["seconds"]
        train_state.restore_random_state(saved)
        if saved["threads"] != torch.get_num_threads():
            print(
                f"note: saved with {saved['threads']} threads, resumed with {torch.get_num_threads()}: the result "
                "may differ in the last bits from that of a run never stopped"
            )


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    # A resumed run ends with the same bits only where kernels do not race; cuBLAS reads this at its first use.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # costs time, changes no result
    return torch.device("cuda")


def train(run: Run, stop: StopRequest) -> bool:
    """Train to the end, or to the end of the micro-batch in which a stop was requested; returns whether to the end.

    Saves with every held-out loss, at the end, and when stopped. A file that cannot be written is told of at once.
    """
    from tqdm import tqdm

    s, lost_lines = run.settings, False
    done = run.windows.of(run.position)
    seconds = 0.5 if sys.stderr.isatty() else 10  # between two drawings: in a file each is a line
    with tqdm(total=s.steps, initial=done, unit="step", dynamic_ncols=True, mininterval=seconds) as bar:
        while run.position < run.end and (stop.signal is None or run.must_go_on()):
            if not run.advance():
                continue
            bar.set_postfix_str(readable(run.log_window()), refresh=False)
            bar.update()
            if bar.n % s.eval_every == 0 or run.position == run.end:
                bar.write(run.log_held_out())
                run.save()
                if run.unsaved:
                    bar.write(f"pretrain: {run.unsaved}; training goes on, and saves again later", file=sys.stderr)
            if run.log.trouble and not lost_lines:
                bar.write(f"pretrain: {run.log.trouble}; the log goes on in memory", file=sys.stderr)
            lost_lines = run.log.trouble is not None
    if run.position < run.end:
        run.save()
    return run.position == run.end


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0 at the end, 1 after an error, 128 plus the signal's number when stopped by one."""
    request = parse(arguments)
    try:
        import matplotlib  # noqa: F401 - found missing before the run, not after it
        import tqdm  # noqa: F401
    except ImportError as error:
        print(f"pretrain: {error}; pip install -e '.[bench]'", file=sys.stderr)
        return 1
    with StopRequest() as stop:
        try:
            run = Run(request)
            run.introduce()
            if not train(run, stop):
                run.require_saved()
                print(f"stopped after micro-batch {run.position} of {run.end}; go on with --resume --out {run.out}")
                return 128 + stop.signal
            run.report()
        except JobError as error:
            print(f"pretrain: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
