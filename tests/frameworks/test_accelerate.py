"""accelerate: prepare, accumulate, clip, save_state and load_state; the same training as with torch.optim.AdamW."""

import copy
import itertools
from typing import Any

import pytest
import torch
from harness import assert_same_run
from training import (
    LARGE,
    MAX_NORM,
    MODES,
    Net,
    Run,
    assert_same_training,
    mean_loss,
    net,
    package,
    sequences,
    switch_on,
    trained_by_hand,
    trained_tokens,
)

from fused_accum import FusedAccumAdamW

accelerate = package("accelerate")
pytestmark = pytest.mark.usefixtures("one_thread")

ACCUMULATION, ROWS, EPOCHS = 4, 10, 2  # windows of 4, 4 and 2, twice
UPDATES = 6


@pytest.fixture(autouse=True)
def fresh_accelerator():
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()


class Training:
    """The loop of accelerate's documentation. after: whether the mode is chosen after prepare(), not before."""

    def __init__(self, start: Net, rows: list, cls: type, mode: str = "plain", after: bool = False, **options: Any):
        self.accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION)
        model = copy.deepcopy(start)
        optimizer = cls(model.parameters(), **LARGE, **options)
        loader = torch.utils.data.DataLoader(rows, batch_size=1)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.2, total_iters=UPDATES)
        if not after:
            switch_on(mode, optimizer, model)
        prepared = self.accelerator.prepare(model, optimizer, loader, scheduler)
        self.model, self.optimizer, self.loader, self.scheduler = prepared
        if after:
            switch_on(mode, self.optimizer.optimizer, self.model)
        assert self.optimizer.optimizer is optimizer
        self.curve = []

    def epoch(self, done: int = 0, end: int = ROWS) -> None:
        loader = self.accelerator.skip_first_batches(self.loader, done)
        for batch in itertools.islice(loader, end - done):
            with self.accelerator.accumulate(self.model):
                loss = mean_loss(self.model(batch["input_ids"]), batch["labels"])
                self.accelerator.backward(loss)
                norm = None
                if self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), MAX_NORM)
                    assert norm > MAX_NORM
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
                self.curve.append((loss.item(), float(norm or 0.0)))

    @property
    def run(self) -> Run:
        return Run(self.model, self.optimizer.optimizer, self.curve)


@pytest.fixture(scope="module")
def data():
    torch.manual_seed(2)
    return net(), sequences(ROWS)


@pytest.fixture
def torchs(data):
    training = Training(*data, torch.optim.AdamW)
    for _ in range(EPOCHS):
        training.epoch()
    return training.run


@pytest.mark.parametrize("after", [False, True], ids=["", "chosen after prepare"])
@pytest.mark.parametrize("mode", MODES)
def test_same_training(data, torchs, mode, after):
    ours = Training(*data, FusedAccumAdamW, mode, after)
    for _ in range(EPOCHS):
        ours.epoch()
    assert_same_training(ours.run, torchs, UPDATES)


@pytest.mark.parametrize("mode", MODES)
def test_save_state_and_load_state(data, torchs, tmp_path, mode):
    """Between two windows, into new objects; torch.optim.AdamW goes on from that state too."""
    saved, resumed = (Training(*data, FusedAccumAdamW, mode) for _ in range(2))
    saved.epoch()
    saved.accelerator.save_state(str(tmp_path))
    resumed.accelerator.load_state(str(tmp_path))
    resumed.curve = list(saved.curve)
    resumed.epoch()
    assert_same_training(resumed.run, torchs, UPDATES)
    torchs_own = Training(*data, torch.optim.AdamW)
    torchs_own.accelerator.load_state(str(tmp_path))
    torchs_own.curve = list(saved.curve)
    torchs_own.epoch()
    assert_same_training(torchs_own.run, torchs, UPDATES)


@pytest.mark.parametrize("mode", ["in-backward", "direct"])
def test_save_state_in_mid_window(data, tmp_path, mode):
    """Six micro-batches are one window and half the next one: the resumed run has the bits of one never stopped."""
    whole, saved, resumed = (Training(*data, FusedAccumAdamW, mode) for _ in range(3))
    whole.epoch()
    saved.epoch(end=6)
    with pytest.warns(UserWarning, match="mid-window: it holds 2 micro-batch"):
        saved.accelerator.save_state(str(tmp_path))
    resumed.accelerator.load_state(str(tmp_path))
    assert resumed.optimizer.optimizer.pending.microbatches == 2
    resumed.epoch(done=6)
    assert_same_run(resumed.optimizer.optimizer, whole.optimizer.optimizer)
    assert resumed.curve == whole.curve[6:]


@pytest.mark.parametrize("mode", MODES)
def test_token_weights_reach_the_optimizer_through_the_wrapper(data, mode):
    """accumulate(weight=), or scale_loss(), of the wrapped optimizer; the windows are ours, not accelerate's."""
    start, rows = data
    accelerator, model, curve = accelerate.Accelerator(cpu=True), copy.deepcopy(start), []
    inner = FusedAccumAdamW(model.parameters(), **LARGE, max_grad_norm=MAX_NORM)
    model, optimizer, loader = accelerator.prepare(model, inner, torch.utils.data.DataLoader(rows, batch_size=1))
    switch_on(mode, inner, model)
    for n, batch in enumerate(loader):
        loss, tokens = mean_loss(model(batch["input_ids"]), batch["labels"]), trained_tokens(batch["labels"])
        curve.append(loss.item())
        if mode == "plain":
            accelerator.backward(loss)
            optimizer.optimizer.accumulate(weight=tokens)
        else:
            accelerator.backward(optimizer.optimizer.scale_loss(loss, weight=tokens))
        if (n + 1) % ACCUMULATION == 0 or n + 1 == ROWS:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_training(Run(model, inner, curve), trained_by_hand(start, rows, ACCUMULATION, MAX_NORM), updates=3)


@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
@pytest.mark.parametrize("mode", MODES)
def test_with_a_scaler_the_wrapper_replaces_step_on_the_optimizer(data, mode, fused):
    """What mixed_precision="fp16" makes of the optimizer, which accelerate refuses on the CPU. The second of three
    windows overflows; a window after it is clean."""
    start, rows = data
    runs = []
    for cls in (FusedAccumAdamW, torch.optim.AdamW):
        accelerate.Accelerator(cpu=True)
        model, curve = copy.deepcopy(start).float(), []
        fused = fused and cls is FusedAccumAdamW  # GradScaler then calls step on an overflow too
        inner = cls(model.parameters(), **LARGE, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        optimizer = accelerate.optimizer.AcceleratedOptimizer(inner, scaler=scaler)
        if cls is FusedAccumAdamW:
            switch_on(mode, inner, model)
        skipped = []
        for n, row in enumerate(rows[: 3 * ACCUMULATION - 2]):
            loss = mean_loss(model(row["input_ids"]), row["labels"]) / ACCUMULATION
            curve.append(loss.item())
            scaler.scale(loss * (float("inf") if n == 5 else 1.0)).backward()
            if (n + 1) % ACCUMULATION == 0 or n + 1 == ROWS:
                scaler.unscale_(inner)
                torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                skipped.append(optimizer.step_was_skipped)
                optimizer.zero_grad()
        runs.append(Run(model, inner, curve))
        assert scaler.get_scale() == 2.0**9
        assert skipped == [False, not fused, False]
    assert_same_training(*runs, updates=2)
