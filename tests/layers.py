"""Models for tests of gradients, and their gradients in float64."""

import copy

import torch
from torch import Tensor, nn

LARGE = {"lr": 0.1, "weight_decay": 0.3}
# Of a sum, by its gradients' dtype.
RTOL = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}


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


def covered(make, model: nn.Module, check: bool = True, **options):
    """An optimizer under LARGE for the model, and the handle of direct_wgrad(), with its self-check."""
    opt = make(model.named_parameters(), **LARGE, **options)
    return opt, opt.direct_wgrad(model, check=check)


def assert_sums(model, exact, dtype=None):
    """p.grad, the window's sum, against float64."""
    for name, p in model.named_parameters():
        if name not in exact:
            assert p.grad is None, name
            continue
        rtol = RTOL[dtype or p.dtype]
        atol = rtol * float(exact[name].abs().max())
        torch.testing.assert_close(p.grad.double(), exact[name], rtol=rtol, atol=atol)
