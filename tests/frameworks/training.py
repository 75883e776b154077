"""What the tests of the training frameworks share: tiny models, uneven data, and the comparison of two trainings."""

import copy
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

# Large, so that a wrong scale, a missed clip or a decay in the wrong place is visible.
LARGE = {"lr": 0.02, "betas": (0.8, 0.95), "weight_decay": 0.3}
MAX_NORM = 0.3  # the clip acts in every window of these models; asserted where the norm is known
MODES = ["plain", "in-backward", "direct"]
IGNORED, VOCABULARY, LENGTH = -100, 23, 9


def package(name: str) -> Any:
    """The framework, or a skip that says how to get it."""
    return pytest.importorskip(name, reason=f"{name} is not installed: pip install 'fused-accum[frameworks]'")


def switch_on(mode: str, optimizer, model: nn.Module) -> None:
    """The one line by which a recipe changes the mode."""
    if mode == "in-backward":
        optimizer.accumulate_in_backward()
    elif mode == "direct":
        handle = optimizer.direct_wgrad(model)
        assert handle.direct
        assert all("no direct form" in why for why in handle.ordinary.values()), handle.ordinary


def sequences(count: int) -> list[dict[str, Tensor]]:
    """Token sequences of which very different numbers of tokens are trained on: a mean of means is far off."""
    rows = []
    for n in range(count):
        tokens = torch.randint(VOCABULARY, (LENGTH,))
        labels = tokens.clone()
        labels[1 + (3 * n) % (LENGTH - 1) : -1] = IGNORED
        rows.append({"input_ids": tokens, "labels": labels})
    return rows


class Net(nn.Module):
    """An embedding, two linear layers (one weight shared with it), a norm and a free parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden, self.norm = nn.Embedding(VOCABULARY, 6), nn.Linear(6, 6), nn.LayerNorm(6)
        self.head = nn.Linear(6, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.ones(6))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(torch.tanh(self.hidden(self.embed(tokens)))) * self.gain)


def net(dtype: torch.dtype = torch.float64) -> Net:
    return Net().to(dtype)


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over the tokens that are trained on, each predicted from the ones before."""
    logits, labels = logits[..., :-1, :].flatten(0, -2), labels[..., 1:].flatten()
    return nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED)


def trained_tokens(labels: Tensor) -> int:
    return int((labels[..., 1:] != IGNORED).sum())


class Run(NamedTuple):
    """A finished training: what it left, and its loss curve."""

    model: nn.Module
    optimizer: torch.optim.AdamW  # the optimizer itself, not a wrapper
    curve: list[Any]


def assert_same_training(ours: Run, torchs: Run, updates: int) -> None:
    """Loss curve, parameters, moments and steps of the two agree; float64 to ten digits, float32 as far as the
    rounding of a few updates goes."""
    assert type(torchs.optimizer) is torch.optim.AdamW
    double = next(ours.model.parameters()).dtype == torch.float64
    rtol, atol = (1e-9, 1e-11) if double else (2e-3, 2e-5)
    assert len(ours.curve) == len(torchs.curve) > 0
    torch.testing.assert_close(torch.tensor(ours.curve), torch.tensor(torchs.curve), rtol=rtol, atol=atol)
    named = dict(torchs.model.named_parameters())
    for name, p in ours.model.named_parameters():
        q = named[name]
        torch.testing.assert_close(p, q, rtol=rtol, atol=atol, msg=lambda why, name=name: f"{name}: {why}")
        state, expected = ours.optimizer.state[p], torchs.optimizer.state[q]
        assert state.keys() == expected.keys()
        assert float(state["step"]) == float(expected["step"]) == updates, name
        for moment in ("exp_avg", "exp_avg_sq"):
            scale = float(expected[moment].abs().max())  # a moment's own size, not 1, is what atol is measured by
            torch.testing.assert_close(
                state[moment], expected[moment], rtol=rtol, atol=atol * scale, msg=lambda w, n=name: f"{n}: {w}"
            )


def trained_by_hand(start: nn.Module, rows: list, accumulation: int, max_norm: float | None) -> Run:
    """An epoch with torch.optim.AdamW, each window the mean over all of its tokens."""
    model, curve = copy.deepcopy(start), []
    optimizer = torch.optim.AdamW(model.parameters(), **LARGE)
    for first in range(0, len(rows), accumulation):
        window = rows[first : first + accumulation]
        total = sum(trained_tokens(row["labels"]) for row in window)
        for row in window:
            loss = mean_loss(model(row["input_ids"]), row["labels"])
            (loss * trained_tokens(row["labels"]) / total).backward()
            curve.append(loss.item())
        if max_norm is not None:
            assert torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm) > max_norm
        optimizer.step()
        optimizer.zero_grad()
    return Run(model, optimizer, curve)
