"""Bytes that an optimizer's tensors hold and move, by mode, beside torch.optim.AdamW. Needs no torch.

Counted are elements only, from the dtypes: what each pass must read and write of parameters, gradients,
buffer and moments. Nothing here is measured; allocator rounding and activations are not in it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

SIZES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
MASTERS = {None: (0, tuple(SIZES)), "fp32": (4, ("bf16", "fp16")), "split": (2, ("bf16",))}  # bytes; for which


@dataclass(frozen=True)
class Mode:
    """One row, in bytes per parameter.

    Attributes:
        params, moments, masters: held all the time.
        gradients: ``.grad`` at its peak, all parameters at once.
        buffer: the accumulation buffer.
        total: the sum of the five.
        traffic: read and written in a window of N micro-batches, by accumulation, step and zeroing.
    """

    name: str
    params: int
    gradients: int
    buffer: int
    moments: int
    traffic: int
    masters: int = 0

    @property
    def total(self) -> int:
        return self.params + self.gradients + self.buffer + self.moments + self.masters


def modes(
    param: str, accum: str, state: str | None, microbatches: int, amsgrad: bool = False, master: str | None = None
) -> list[Mode]:
    """The rows for one choice of dtypes, named as in ``SIZES``.

    Args:
        param: of parameters and gradients. fp64 makes buffer and moments fp64, as the optimizer does.
        accum: of the buffer, fp32 or bf16.
        state: of the moments; None: the parameter's.
        microbatches: N, at least 1.
        amsgrad: a third moment.
        master: "fp32", "split" or None: what bf16 and fp16 parameters have beside them. torch has no such thing.

    Raises:
        ValueError: ``master`` with parameters that have none (fp32, fp64; split: fp16 too),
            ``accum`` is fp16, which overflows, or ``microbatches`` is below 1.
    """
    if accum == "fp16":
        raise ValueError("accum_dtype is fp16, whose range is too small for a sum; it must be fp32 or bf16")
    if microbatches < 1:
        raise ValueError(f"n_microbatches is {microbatches}; a window has at least 1")
    if master not in MASTERS or param not in MASTERS[master][1]:
        raise ValueError(
            f"master_weights is {master!r} for {param} parameters; it is None, 'fp32' for bf16 and fp16, or 'split' "
            "for bf16"
        )
    if param == "fp64":
        accum = state = "fp64"
    p, a, s, n = SIZES[param], SIZES[accum], SIZES[state or param], microbatches
    kept = 3 if amsgrad else 2
    w = MASTERS[master][0]
    # An fp32 master is read and written, the parameter then only written; a half needs the parameter too.
    extra = 2 * w - (p if master == "fp32" else 0)

    def update(moment: int) -> int:
        return 2 * p + 2 * kept * moment  # parameter and moments, read and written

    rows = [
        Mode("torch.optim.AdamW, N=1", p, p, 0, kept * p, update(p) + p),
        Mode("fused_accum, N=1", p, p, 0, kept * s, update(s) + extra + p, w),
    ]
    if n > 1:
        # torch: the first backward leaves its gradient in .grad, later ones add to it (two reads, a write).
        torch = Mode(f"torch.optim.AdamW, N={n}", p, p, 0, kept * p, (n - 1) * 3 * p + update(p) + p)
        first, add, last = p + a, p + 2 * a, p + 2 * a + update(s) + extra
        ours = Mode(f"fused_accum, N={n}", p, p, a, kept * s, first + (n - 2) * add + last, w)
        rows += [torch, ours]
    return rows


def as_json(rows: list[Mode], params: float) -> str:
    """Per parameter and in all, in bytes."""
    return json.dumps(
        {
            "params": int(params),
            "modes": [
                {
                    "name": row.name,
                    "bytes_per_param": numbers(row),
                    "bytes": {k: int(v * params) for k, v in numbers(row).items()},
                }
                for row in rows
            ],
        },
        indent=2,
    )


def numbers(row: Mode) -> dict[str, int]:
    return {k: v for k, v in asdict(row).items() if k != "name"} | {"total": row.total}


def as_text(rows: list[Mode], params: float) -> str:
    """A table of bytes per parameter, and of the totals."""
    heads = ("params", "gradients", "buffer", "moments", "masters", "total")
    width = max(len(row.name) for row in rows)
    lines = [f"{'bytes per parameter':<{width}}  {'  '.join(heads)}   held in all  moved per window"]
    for row in rows:
        held = numbers(row)
        cells = "  ".join(f"{held[head]:>{len(head)}}" for head in heads)
        moved = f"{row.traffic} ({human(row.traffic * params)})"
        lines.append(f"{row.name:<{width}}  {cells}  {human(row.total * params):>12}  {moved:>16}")
    lines += [
        f"{params:.4g} parameters. Computed from dtypes, not measured; activations are not in it.",
        "Gradients: the peak, all .grad at once. torch keeps their sum and moments in the parameter's dtype.",
    ]
    return "\n".join(lines)


def human(number: float) -> str:
    """1536 -> '1.50 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if number < 1024 or unit == "TiB":
            break
        number /= 1024
    return f"{number:.2f} {unit}"
