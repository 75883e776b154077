"""A loop like nanoGPT's: GradScaler, a schedule written into the groups, fused=True, checkpoints of its own."""

import copy
import math

import pytest
import torch
from harness import assert_same_run
from training import MAX_NORM, MODES, Run, assert_same_training, mean_loss, net, sequences, switch_on

from fused_accum import FusedAccumAdamW

pytestmark = pytest.mark.usefixtures("one_thread")

ACCUMULATION, ITERATIONS, OVERFLOW = 4, 6, 2
LARGEST, SMALLEST, WARMUP = 0.05, 0.005, 2


def learning_rate(iteration: int) -> float:
    if iteration < WARMUP:
        return LARGEST * (iteration + 1) / (WARMUP + 1)
    done = (iteration - WARMUP) / (ITERATIONS - WARMUP)
    return SMALLEST + 0.5 * (1.0 + math.cos(math.pi * done)) * (LARGEST - SMALLEST)


def configure(model, cls, fused):
    """Decay for matrices only, as in nanoGPT's configure_optimizers()."""
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.3},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    return cls(groups, lr=LARGEST, betas=(0.9, 0.95), **({"fused": True} if fused else {}))


def train(start, rows, cls, mode="plain", fused=True, scaled=True, checkpoint=None, until=ITERATIONS):
    """The loop; ``checkpoint`` continues one that this returned. Gives the run and a checkpoint."""
    model = copy.deepcopy(start)
    optimizer = configure(model, cls, fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
    switch_on(mode, optimizer, model)
    first, curve = 0, []
    if checkpoint is not None:
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(copy.deepcopy(checkpoint["optimizer"]))  # loading shares tensors
        scaler.load_state_dict(checkpoint["scaler"])
        first, curve = checkpoint["iteration"], list(checkpoint["curve"])
    for iteration in range(first, until):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(iteration)
        for step in range(ACCUMULATION):
            row = rows[iteration * ACCUMULATION + step]
            loss = mean_loss(model(row["input_ids"]), row["labels"]) / ACCUMULATION
            curve.append(loss.item())
            overflow = scaled and iteration == OVERFLOW and step == 1
            scaler.scale(loss * torch.inf if overflow else loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    saved = {
        "model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict(),
        "iteration": until, "curve": curve,
    }  # fmt: skip
    return Run(model, optimizer, curve), copy.deepcopy(saved)


@pytest.fixture(scope="module")
def data():
    torch.manual_seed(4)
    return net(), sequences(ITERATIONS * ACCUMULATION)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("fused", "scaled"),
    [(True, True), (False, True), (True, False)],
    ids=["fused", "not fused", "fused, without a scaler"],
)
@pytest.mark.parametrize("mode", MODES)
def test_same_training_and_resumed(data, mode, fused, scaled):
    expected, torchs = train(*data, torch.optim.AdamW, fused=fused, scaled=scaled)
    updates = ITERATIONS - scaled
    ours, saved = train(*data, FusedAccumAdamW, mode, fused, scaled)
    assert_same_training(ours, expected, updates)
    assert saved["scaler"] == torchs["scaler"]
    _, half = train(*data, FusedAccumAdamW, mode, fused, scaled, until=3)
    again, _ = train(*data, FusedAccumAdamW, mode, fused, scaled, checkpoint=half)
    assert_same_run(again.optimizer, ours.optimizer)
    back, _ = train(*data, torch.optim.AdamW, fused=fused, scaled=scaled, checkpoint=half)
    assert_same_training(back, expected, updates)
