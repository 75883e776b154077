"""A byte-level GPT: pre-norm blocks, rotary positions, tied embedding and head, of nn.Linear and nn.Embedding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.batches import IGNORED


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x = x + self._drop(self._attention(self.attention_norm(x), rotation))
        return x + self._drop(self.mlp_out(F.relu(self.mlp_in(self.mlp_norm(x))).square()))

    def _attention(self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        # Padding is on the right, so the causal mask already hides it from every real position.
        mixed = F.scaled_dot_product_attention(_rotate(q, rotation), _rotate(k, rotation), v, is_causal=True)
        return self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))

    def _drop(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, self.dropout, self.training)


def _rotate(x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotary positions, Su et al., arXiv 2104.09864: halves of each head are the coordinates that turn."""
    cos, sin = rotation
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class GPT(nn.Module):
    """inputs: int64 (batch, length <= context) bytes. Weights are drawn from torch's global generator."""

    def __init__(self, width: int, layers: int, heads: int, context: int, dropout: float = 0.0):
        super().__init__()
        self.context = context
        self.embedding = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.embedding.weight
        half = width // heads // 2
        angle = torch.outer(torch.arange(context), 10000.0 ** -(torch.arange(half) / half))
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Branches that start at zero make the deep model start as the shallow one.
                std = 0.0 if name.endswith("_out.weight") else 0.02 if "embedding" in name else width**-0.5
                nn.init.normal_(parameter, std=std)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Logits, (batch, length, 256)."""
        rotation = self.cos[: inputs.shape[1]], self.sin[: inputs.shape[1]]
        x = self.embedding(inputs)
        for block in self.blocks:
            x = block(x, rotation)
        return self.head(self.norm(x))

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy over the targets that are not IGNORED, in nats per byte, 0-dim."""
        return F.cross_entropy(self(inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)

    def parameter_groups(self, weight_decay: float) -> list[dict]:
        """Optimizer groups: matrices decay; norms, and the embedding that is also the head, do not."""
        matrices = [p for n, p in self.named_parameters() if p.dim() == 2 and "embedding" not in n]
        others = [p for n, p in self.named_parameters() if p.dim() != 2 or "embedding" in n]
        return [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]

    @torch.no_grad()
    def generate(self, prompt: bytes, length: int, temperature: float, seed: int) -> bytes:
        """``length`` bytes sampled after ``prompt`` (at least one byte), by a generator of its own."""
        device = self.embedding.weight.device
        generator = torch.Generator().manual_seed(seed)
        text = torch.tensor([list(prompt)])
        for _ in range(length):
            logits = self(text[:, -self.context :].to(device))[:, -1].float().cpu()
            following = torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator)
            text = torch.cat((text, following), dim=1)
        return bytes(text[0, len(prompt) :].tolist())
