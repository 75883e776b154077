"""One model in training with one optimizer."""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks import JobError, train_state
from benchmarks.batches import MicroBatch, pad
from benchmarks.gpt import GPT
from benchmarks.loops import MODES, begin, gradient_bytes, torch_adamw
from benchmarks.settings import Settings
from benchmarks.text import Passages
from fused_accum import FusedAccumAdamW

BETAS = (0.9, 0.95)


class Side:
    """``--compare`` has two of these, which start alike and see the same data.

    name: "fused" (FusedAccumAdamW) or "torch" (torch.optim.AdamW). Raises JobError for a backend that does not
    exist or does not work here.
    """

    def __init__(self, name: str, settings: Settings, device: torch.device):
        self.name = name
        torch.manual_seed(settings.seed)
        s = settings
        try:
            self.model = GPT(s.model_width, s.layers, s.heads, s.context, s.dropout).to(device)
        except (MemoryError, RuntimeError) as error:
            raise JobError(
                f"cannot make a model of --layers {s.layers}, --model-width {s.model_width}: "
                f"{str(error).partition(chr(10))[0]}"
            ) from error
        groups = self.model.parameter_groups(s.weight_decay)
        if name == "fused":
            try:
                self.optimizer = FusedAccumAdamW(groups, betas=BETAS, backend=s.backend)
                rows = self.optimizer.backends
            except (ValueError, RuntimeError) as error:
                raise JobError(f"--backend {s.backend}: {error}") from error
            self.runs_on = ", ".join(f"{row.parameters} tensors on backend {row.backend}" for row in rows)
            self._learn, self._mode = MODES[s.mode], begin(s.mode, self.optimizer, self.model)
        else:
            self.optimizer = torch.optim.AdamW(groups, betas=BETAS, fused=True)
            self.runs_on = "torch.optim.AdamW(fused=True)"
            self._learn = torch_adamw
        # Right before the update: the window's sum and the last micro-batch's gradients are both alive then.
        self.optimizer.register_step_pre_hook(self._note_gradient_bytes)
        self.gradient_bytes = 0
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self.seconds = 0.0

    def micro_batch(self, batch: MicroBatch, lr: float) -> None:
        """Forward, backward, and the update if the window ends here; adds to loss_sum and seconds."""
        start = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss = self.model.loss(batch.inputs, batch.targets)
        self._learn(self.optimizer, loss, batch)
        self.loss_sum += loss.detach() * batch.tokens
        if batch.ends_window and batch.inputs.is_cuda:
            torch.cuda.synchronize()
        self.seconds += time.perf_counter() - start

    def end_window(self) -> tuple[float, float]:
        """Sum of the window's losses over its tokens, and its seconds; both start again from zero."""
        loss_sum, seconds = self.loss_sum.item(), self.seconds
        self.loss_sum.zero_()
        self.seconds = 0.0
        return loss_sum, seconds

    @torch.no_grad()
    def held_out_loss(self, passages: Passages) -> float:
        """Mean over the bytes of ``passages``, in nats per byte."""
        self.model.eval()
        total = 0.0
        for chosen in passages.lengths.argsort(stable=True).split(64):
            inputs, targets = (x.to(self.loss_sum.device) for x in pad(passages, chosen))
            total += self.model.loss(inputs, targets).item() * int(passages.lengths[chosen].sum())
        self.model.train()
        return total / int(passages.lengths.sum())

    def state(self) -> dict[str, Any]:
        window = {"loss_sum": self.loss_sum, "seconds": self.seconds, "gradient_bytes": self.gradient_bytes}
        return {**train_state.training_state(self.model, self.optimizer), **window}

    def restore(self, saved: dict[str, Any]) -> None:
        train_state.restore_training_state(self.model, self.optimizer, saved)
        self.loss_sum.copy_(saved["loss_sum"])
        self.seconds, self.gradient_bytes = saved["seconds"], saved["gradient_bytes"]

    def _note_gradient_bytes(self, *_: Any) -> None:
        self.gradient_bytes = max(self.gradient_bytes, gradient_bytes(self.optimizer))
