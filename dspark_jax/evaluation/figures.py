"""What all pictures share: colours, axes, and writing a PNG."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark_jax.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"
INK, GRID = "#333333", "#dddddd"


def require_matplotlib() -> None:
    """Fail early, before minutes of measuring, where plots cannot be drawn.

    Raises:
        ModuleNotFoundError: matplotlib is not installed; names the extra that brings it.
    """
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("plots need matplotlib: pip install 'dspark-jax[plot]'") from error


def new_figure(*, width: float, height: float) -> Figure:
    """An empty figure of a size in inches; without pyplot, it opens no window and touches no global state."""
    require_matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def style(axes: Any) -> None:
    """Quiet axes: a light horizontal grid, no frame."""
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK)


def save_figure(figure: Figure, path: str | Path) -> Path:
    """Write a PNG, atomically; returns its path."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160)
    with atomic_write(path) as file:
        file.write(buffer.getvalue())
    return Path(path)
