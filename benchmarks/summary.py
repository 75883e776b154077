"""What a pretraining run prints: progress, and how two optimizers compare."""

from __future__ import annotations

from statistics import median, quantiles
from typing import Any

from benchmarks.run_log import Log


def size(n_bytes: float) -> str:
    return f"{n_bytes / 2**30:.2f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.1f} MiB"


def readable(lines: dict[str, dict[str, Any]]) -> str:
    """The window's log lines, by side, as the text beside a progress bar."""
    loss = "/".join(f"{line['loss']:.3f}" for line in lines.values())
    rate = "/".join(f"{line['tokens'] / line['seconds']:,.0f}" for line in lines.values())
    gradients = "/".join(size(line["gradient_bytes"]) for line in lines.values())
    peak = max(line["peak_bytes"] for line in lines.values())
    return f"loss {loss}, {rate} tokens/s, gradients {gradients}, peak memory {size(peak)}"


def shown(text: bytes) -> str:
    """Bytes from a model, made fit for a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "." for c in text.decode(errors="replace"))


def comparison(log: Log) -> str:
    """FusedAccumAdamW beside torch.optim.AdamW, from the log of a run with ``--compare``."""
    windows = {side: [w for w in log.events("window") if w["optimizer"] == side] for side in ("fused", "torch")}
    held_out = {line["optimizer"]: line["loss"] for line in log.events("held-out")}
    pairs = list(zip(windows["fused"], windows["torch"], strict=True))
    ratios = [ours["seconds"] / theirs["seconds"] for ours, theirs in pairs]
    # The first windows allocate buffers and state and start threads.
    steady = ratios[len(ratios) // 10 :]
    low, _, high = quantiles(steady, n=4) if len(steady) > 1 else steady * 3
    apart = max(abs(ours["loss"] - theirs["loss"]) for ours, theirs in pairs)
    rows = [
        ("", "fused", "torch", "fused against torch"),
        (
            "held-out loss",
            *(f"{held_out[side]:.6f}" for side in windows),
            f"difference {held_out['fused'] - held_out['torch']:+.1e}",
        ),
        (
            "last training loss",
            *(f"{windows[side][-1]['loss']:.6f}" for side in windows),
            f"at most {apart:.1e} apart in any window",
        ),
        (
            "seconds per window",
            *(f"{median(w['seconds'] for w in windows[side]):.4f}" for side in windows),
            f"ratio {median(steady):.3f}, quartiles {low:.3f} to {high:.3f}, {len(steady)} interleaved windows",
        ),
        (
            "gradient memory",
            *(size(max(w["gradient_bytes"] for w in windows[side])) for side in windows),
            "peak, buffer and p.grad together",
        ),
    ]
    return "\n".join(f"  {name:<20}{ours:>12}{theirs:>12}   {note}" for name, ours, theirs, note in rows)
