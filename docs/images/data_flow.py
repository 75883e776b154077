"""Draws data_flow.png, the picture of docs/how-it-works.md: `python docs/images/data_flow.py`."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

TENSOR, KERNEL, NORM = "#dbe9f6", "#fde3c3", "#e4f2dc"
GREY = "#555555"


def box(axes, x, y, width, text, color, height=0.62):
    """A rounded box around (x, y); returns its left and right ends."""
    shape = FancyBboxPatch(
        (x - width / 2, y - height / 2), width, height, boxstyle="round,pad=0.04", facecolor=color, edgecolor=GREY
    )
    axes.add_patch(shape)
    axes.text(x, y, text, ha="center", va="center", fontsize=9)


def arrow(axes, start, end, text="", lift=0.13, bend=0.0):
    axes.add_patch(
        FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=12, color=GREY,
                        connectionstyle=f"arc3,rad={bend}", shrinkA=0, shrinkB=0)
    )  # fmt: skip
    axes.text((start[0] + end[0]) / 2, (start[1] + end[1]) / 2 + lift, text, ha="center", fontsize=8, color=GREY)


def draw():
    figure, axes = plt.subplots(figsize=(11, 5.6))
    axes.set_xlim(0, 11)
    axes.set_ylim(0, 5.9)
    axes.axis("off")

    axes.text(0.1, 5.55, "Every micro-batch but the last: one pass", fontsize=11, weight="bold")
    box(axes, 1.4, 4.75, 1.9, "p.grad\n(its own dtype)", TENSOR)
    box(axes, 5.0, 4.75, 2.9, "accumulate\nfirst: a = s·g    later: a = a + s·g", KERNEL)
    box(axes, 9.2, 4.75, 2.0, "buffer a\n(fp32, persistent)", TENSOR)
    arrow(axes, (2.42, 4.75), (3.48, 4.75), "read")
    arrow(axes, (6.52, 4.75), (8.13, 4.75), "write")
    arrow(axes, (8.4, 4.38), (6.2, 4.38), "read, but for the first", lift=-0.34, bend=-0.15)
    axes.text(1.4, 4.12, "then None: its memory is free", ha="center", fontsize=8, color=GREY)

    axes.plot([0.1, 10.9], [3.72, 3.72], color="#bbbbbb", linewidth=0.8)
    axes.text(0.1, 3.36, "The last micro-batch and the update: one pass", fontsize=11, weight="bold")
    rows = {2.75: "p.grad", 2.0: "buffer a", 1.25: "exp_avg, exp_avg_sq", 0.5: "p (or its master)"}
    for y, name in rows.items():
        box(axes, 1.4, y, 1.9, name, TENSOR, 0.42)
        arrow(axes, (2.42, y), (3.48, 1.62 + (y - 1.62) * 0.55))
    lines = ["step", "", "G = c·(a + s·g)", "p = p·(1 - lr·wd)", "moments of G", "p = p - lr·m̂ / (√v̂ + eps)", "a = 0"]
    box(axes, 5.0, 1.62, 2.9, "\n".join(lines), KERNEL, 1.9)
    after = {2.75: "None", 2.0: "buffer reads 0", 1.25: "exp_avg, exp_avg_sq", 0.5: "p (and its master)"}
    for y, name in after.items():
        box(axes, 9.2, y, 2.0, name, TENSOR, 0.42)
        arrow(axes, (6.52, 1.62 + (y - 1.62) * 0.55), (8.13, y))
    note = "only to clip or skip: the last sum is written first,\nits norm makes c, and the update is a second pass"
    box(axes, 8.6, 3.38, 4.3, note, NORM, 0.44)
    arrow(axes, (6.5, 3.12), (5.6, 2.63))
    return figure


if __name__ == "__main__":
    draw().savefig(Path(__file__).with_name("data_flow.png"), dpi=130, bbox_inches="tight")
