"""Plots of a measurement: conditional acceptance against position (the paper's Figure 2), accepted length by task."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dspark_jax.evaluation.measure import PLAIN
from dspark_jax.evaluation.summary import OVERALL, Row, Summary
from dspark_jax.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ACCEPTANCE_PLOT, LENGTH_PLOT = "conditional_acceptance.png", "accepted_length.png"
_FEW = 10
# Okabe and Ito's colours, which colour-blind readers can tell apart.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "osD^vPX"
_INK, _GRID = "#333333", "#dddddd"
_LABEL: dict[str, Any] = {"ha": "center", "fontsize": 8, "color": _INK}


def acceptance_figure(summary: Summary) -> Figure:
    """Conditional acceptance against position: one panel a domain, one line a drafter.

    Points that fewer than 10 rounds reached are hollow and their line is dotted: they say little.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: no drafter was measured.
    """
    drafters, domains = _drafters(summary), _domains(summary)
    columns = min(len(domains), 3)
    lines = math.ceil(len(domains) / columns)
    figure = _figure(width=1.2 + 3.1 * columns, height=0.75 + 2.9 * lines)
    panels = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
    for panel, domain in zip(panels.flat, domains, strict=False):
        for number, name in enumerate(drafters):
            _acceptance_line(panel, _row(summary, name, domain), number)
        panel.set_title(domain, fontsize=11, color=_INK)
        panel.set_ylim(-0.03, 1.03)
    for panel in list(panels.flat)[len(domains) :]:
        panel.set_visible(False)
    for index in range(len(domains)):
        panel = panels.flat[index]
        # The lowest visible panel of a column carries the axis.
        panel.xaxis.set_tick_params(labelbottom=index + columns >= len(domains))
        if index + columns >= len(domains):
            panel.set_xlabel("position in the block")
    for row in panels:
        row[0].set_ylabel("conditional acceptance")
    _legend(figure, panels.flat[0], len(drafters))
    return figure


def length_figure(summary: Summary) -> Figure:
    """Accepted length of every drafter by domain, and the mean over domains, with 95 % intervals.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: no drafter was measured.
    """
    drafters, domains = _drafters(summary), [*_domains(summary), OVERALL]
    figure = _figure(width=max(5.0, 1.6 + 0.5 * len(domains) + 0.42 * len(domains) * len(drafters)), height=3.6)
    axes = figure.subplots()
    width = 0.8 / len(drafters)
    for number, name in enumerate(drafters):
        rows = [_row(summary, name, domain) for domain in domains]
        taus = [row.macro_tau or row.tau for row in rows]
        estimates = np.array([tau.estimate for tau in taus])
        errors = np.array([[t.estimate - t.low for t in taus], [t.high - t.estimate for t in taus]])
        at = np.arange(len(domains)) + (number - (len(drafters) - 1) / 2) * width
        axes.bar(at, estimates, width * 0.92, color=_COLORS[number % len(_COLORS)], label=name)
        axes.errorbar(at, estimates, np.nan_to_num(errors), fmt="none", ecolor=_INK, elinewidth=1, capsize=2.5)
        for x, top, estimate in zip(at, estimates + np.nan_to_num(errors[1]), estimates, strict=True):
            if np.isfinite(estimate):
                axes.annotate(f"{estimate:.2f}", (x, top), (0, 3), textcoords="offset points", **_LABEL)
    axes.axhline(1, color=_INK, linewidth=0.8, linestyle=":")
    axes.text(1.005, 1, "plain\ndecoding", transform=axes.get_yaxis_transform(), va="center", fontsize=8, color=_INK)
    axes.set_xticks(range(len(domains)), [*domains[:-1], "mean over\ndomains"])
    axes.set_ylabel("accepted length τ")
    axes.margins(y=0.12)
    axes.grid(axis="x", visible=False)
    _legend(figure, axes, len(drafters))
    return figure


def write_plots(summary: Summary, folder: str | Path) -> list[Path]:
    """Write both figures as PNG.

    Args:
        summary: the numbers.
        folder: created if needed.

    Returns:
        The files written.

    Raises:
        ModuleNotFoundError: matplotlib is not installed; names the extra that brings it.
        ValueError: no drafter was measured.
    """
    written = []
    for name, figure in ((ACCEPTANCE_PLOT, acceptance_figure(summary)), (LENGTH_PLOT, length_figure(summary))):
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=160)
        with atomic_write(Path(folder) / name) as file:
            file.write(buffer.getvalue())
        written.append(Path(folder) / name)
    return written


def require_matplotlib() -> None:
    """Fail early, before minutes of measuring, where plots cannot be drawn.

    Raises:
        ModuleNotFoundError: matplotlib is not installed; names the extra that brings it.
    """
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("plots need matplotlib: pip install 'dspark-jax[plot]'") from error


def _figure(*, width: float, height: float) -> Figure:
    require_matplotlib()
    from matplotlib.figure import Figure

    # A figure without pyplot opens no window and touches no global state.
    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def _acceptance_line(panel: Any, row: Row, number: int) -> None:
    statistics = row.statistics
    position = np.arange(1, len(statistics.reached_at) + 1)
    color, marker = _COLORS[number % len(_COLORS)], _MARKERS[number % len(_MARKERS)]
    rate = statistics.conditional_acceptance
    style: dict[str, Any] = {"color": color, "marker": marker, "markersize": 5}
    thin = statistics.reached_at < _FEW
    panel.plot(position, rate, color=color, linewidth=1, linestyle=":")
    panel.plot(position, np.where(thin, np.nan, rate), linewidth=1.6, label=row.system, **style)
    panel.plot(position[thin], rate[thin], linestyle="none", markerfacecolor="white", **style)
    panel.set_xticks(position)
    _style(panel)


def _legend(figure: Figure, axes: Any, entries: int) -> None:
    _style(axes)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=min(entries, 4), frameon=False)


def _style(axes: Any) -> None:
    axes.grid(axis="y", color=_GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_INK)


def _drafters(summary: Summary) -> list[str]:
    names = list(dict.fromkeys(row.system for row in summary.rows if row.system != PLAIN))
    if not names:
        raise ValueError("there is nothing to plot: only plain decoding was measured")
    return names


def _domains(summary: Summary) -> list[str]:
    return list(dict.fromkeys(row.domain for row in summary.rows if row.domain != OVERALL))


def _row(summary: Summary, system: str, domain: str) -> Row:
    return next(row for row in summary.rows if (row.system, row.domain) == (system, domain))
