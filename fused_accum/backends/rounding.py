"""How a 16-bit parameter keeps what its dtype cannot hold, in plain torch: csrc/weights.h element by element."""

from __future__ import annotations

import torch
from torch import Tensor

from ..rows import Rows
from ..state import LOW_PRECISION, MASTER, PLAIN, SPLIT

WORD = 0xFFFFFFFF
NAN = 0x7FC00000
INFINITY = 0x7F800000


def kept(rows: Rows, i: int) -> Kept:
    """How the weight of row ``i`` is kept."""
    p = rows.params[i]
    kind = rows.weights if p.dtype in LOW_PRECISION else PLAIN
    if kind == PLAIN:
        return Kept(p)
    if kind == MASTER:
        return KeptWithMaster(p, rows.masters[i])
    if kind == SPLIT:
        return KeptSplit(p, rows.masters[i])
    return KeptByChance(p, rows.rounding_seed, rows.indices[i])


class Kept:
    """The parameter alone, rounded to nearest even."""

    def __init__(self, p: Tensor) -> None:
        self.p = p

    def load(self) -> Tensor:
        """The weight to update."""
        return self.p

    def store(self, weight: Tensor, step: int) -> None:
        """Keep the updated weight; ``step``: number of the update."""
        self.p.copy_(weight)


class KeptWithMaster(Kept):
    def __init__(self, p: Tensor, master: Tensor) -> None:
        self.p, self.master = p, master

    def load(self) -> Tensor:
        """The master where the parameter is what it rounds to, else (changed from outside) the parameter."""
        return torch.where(self.master.to(self.p.dtype) == self.p, self.master, self.p.float())

    def store(self, weight: Tensor, step: int) -> None:
        self.master.copy_(weight)
        self.p.copy_(weight)


class KeptSplit(Kept):
    def __init__(self, p: Tensor, low: Tensor) -> None:
        self.p, self.low = p, low

    def load(self) -> Tensor:
        return joined(self.p, self.low)

    def store(self, weight: Tensor, step: int) -> None:
        high, low = split(weight)
        self.p.copy_(high)
        self.low.copy_(low)


class KeptByChance(Kept):
    def __init__(self, p: Tensor, seed: int, index: int) -> None:
        self.p, self.seed, self.index = p, seed, index

    def store(self, weight: Tensor, step: int) -> None:
        words = random_words(self.seed, step, self.index, self.p.numel(), self.p.device).reshape(self.p.shape)
        self.p.copy_(rounded_by_chance(weight, words, self.p.dtype))


def patterns(x: Tensor) -> Tensor:
    """The bits of float32 as int64 from 0 to 2^32 - 1."""
    return x.contiguous().view(torch.int32).to(torch.int64) & WORD


def floats(bits: Tensor) -> Tensor:
    return signed(bits, 32).to(torch.int32).view(torch.float32)


def signed(bits: Tensor, width: int) -> Tensor:
    half = 1 << width - 1
    return (bits & 2 * half - 1 ^ half) - half


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """bfloat16 (float32 ``master`` to nearest, ties away from zero) and int16: the pattern is high * 2^16 + low."""
    u = torch.where(master.isnan(), NAN, patterns(master))
    high = signed(u + 0x8000 >> 16, 16).to(torch.int16).view(torch.bfloat16)
    return high, signed(u, 16).to(torch.int16)


def joined(high: Tensor, low: Tensor) -> Tensor:
    """The float32 that ``split`` took apart; of two halves that are no code, ``high`` alone."""
    top = patterns(high.float())
    u = top + low.to(torch.int64) & WORD
    return floats(torch.where(u & 0x7FFFFFFF > INFINITY, top, u))


def philox(counter: list[Tensor], key: tuple[int, int]) -> list[Tensor]:
    """Philox4x32-10: Salmon, Moraes, Dror & Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # modulo 2^64, as int64
        c0, c1, c2, c3 = (b >> 32 ^ c1 ^ k0) & WORD, b & WORD, (a >> 32 ^ c3 ^ k1) & WORD, a & WORD
        k0, k1 = k0 + 0x9E3779B9 & WORD, k1 + 0xBB67AE85 & WORD
    return [c0, c1, c2, c3]


def random_words(seed: int, step: int, index: int, numel: int, device: torch.device) -> Tensor:
    """A 32-bit word for every element in row-major order, as int64."""
    blocks = torch.arange(-(-numel // 4), device=device)
    fixed = [torch.full_like(blocks, number & WORD) for number in (index, step)]
    words = philox([blocks & WORD, blocks >> 32, *fixed], (seed & WORD, seed >> 32))
    return torch.stack(words, dim=1).flatten()[:numel]


def rounded_by_chance(x: Tensor, words: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 to bfloat16 or float16: away from zero with the chance that the part cut off is of a unit."""
    u = patterns(x)
    if dtype == torch.bfloat16:
        cut = torch.where(x.isnan(), NAN >> 16, u + (words >> 16) >> 16)
        return signed(cut, 16).to(torch.int16).view(torch.bfloat16)
    sign, magnitude = u >> 16 & 0x8000, u & 0x7FFFFFFF
    normal = (magnitude - (112 << 23) + (words >> 19) >> 13).clamp(max=0x7C00)
    tiny = magnitude < 113 << 23
    small = floats(torch.where(tiny, magnitude, 0)).double()
    subnormal = (small * 2.0**55).to(torch.int64) + (words >> 1) >> 31
    special = torch.where(magnitude > INFINITY, 0x7E00, 0x7C00)
    half = torch.where(magnitude >= 0x47800000, special, torch.where(tiny, subnormal, normal))
    return signed(sign | half, 16).to(torch.int16).view(torch.float16)
