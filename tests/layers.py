"""Models for tests of gradients, and their gradients in float64."""

import copy

import torch
from torch import Tensor, nn


class Conv1D(nn.Module):
    """transformers' layer, as it is there: y = x W + b with W (in, out)."""

    def __init__(self, outputs: int, inputs: int):
        super().__init__()
        self.nf, self.nx = outputs, inputs
        self.weight = nn.Parameter(torch.empty(inputs, outputs).normal_(std=0.02))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        size_out = (*x.size()[:-1], self.nf)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(size_out)


Conv1D.__module__ = "transformers.pytorch_utils"  # by which it is known


class Net(nn.Module):
    """Embedding, linear layers with and without bias, Conv1D, a norm; the head may be the embedding."""

    def __init__(self, tied: bool = False, padding: int | None = None):
        super().__init__()
        self.embedding = nn.Embedding(23, 8, padding_idx=padding)
        self.first = nn.Linear(8, 12)
        self.conv = Conv1D(8, 12)
        self.second = nn.Linear(8, 8, bias=False)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 23, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, index: Tensor) -> Tensor:
        x = self.embedding(index)
        x = x + self.conv(torch.tanh(self.first(x)))
        x = self.norm(x + self.second(x.transpose(0, 1)).transpose(0, 1))  # activations that are not contiguous
        return self.head(x)


def tokens(count: int = 3, shape=(5, 7), device="cpu", high: int = 23) -> list[Tensor]:
    return [torch.randint(high, shape, device=device) for _ in range(count)]


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    y = model(batch).float() if next(model.parameters()).dtype != torch.float64 else model(batch)
    return y.square().sum() / 100 + y.logsumexp(-1).sum()


def exact_gradients(model: nn.Module, batches) -> dict[str, Tensor]:
    """Sums over the batches, in float64."""
    twin = copy.deepcopy(model).double()
    for batch in batches:
        loss_of(twin, batch.double() if batch.is_floating_point() else batch).backward()
    return {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}
