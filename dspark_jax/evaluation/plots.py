"""Plots of a measurement: conditional acceptance against position (the paper's Figure 2), accepted length by task."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dspark_jax.evaluation.figures import COLORS, INK, MARKERS, new_figure, save_figure, style
from dspark_jax.evaluation.measure import PLAIN
from dspark_jax.evaluation.summary import OVERALL, Row, Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ACCEPTANCE_PLOT, LENGTH_PLOT = "conditional_acceptance.png", "accepted_length.png"
_FEW = 10
_LABEL: dict[str, Any] = {"ha": "center", "fontsize": 8, "color": INK}


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
    figure = new_figure(width=1.2 + 3.1 * columns, height=0.75 + 2.9 * lines)
    panels = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
    for panel, domain in zip(panels.flat, domains, strict=False):
        for number, name in enumerate(drafters):
            _acceptance_line(panel, _row(summary, name, domain), number)
        panel.set_title(domain, fontsize=11, color=INK)
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
    figure = new_figure(width=max(5.0, 1.6 + 0.5 * len(domains) + 0.42 * len(domains) * len(drafters)), height=3.6)
    axes = figure.subplots()
    width = 0.8 / len(drafters)
    for number, name in enumerate(drafters):
        rows = [_row(summary, name, domain) for domain in domains]
        taus = [row.macro_tau or row.tau for row in rows]
        estimates = np.array([tau.estimate for tau in taus])
        errors = np.array([[t.estimate - t.low for t in taus], [t.high - t.estimate for t in taus]])
        at = np.arange(len(domains)) + (number - (len(drafters) - 1) / 2) * width
        axes.bar(at, estimates, width * 0.92, color=COLORS[number % len(COLORS)], label=name)
        axes.errorbar(at, estimates, np.nan_to_num(errors), fmt="none", ecolor=INK, elinewidth=1, capsize=2.5)
        for x, top, estimate in zip(at, estimates + np.nan_to_num(errors[1]), estimates, strict=True):
            if np.isfinite(estimate):
                axes.annotate(f"{estimate:.2f}", (x, top), (0, 3), textcoords="offset points", **_LABEL)
    axes.axhline(1, color=INK, linewidth=0.8, linestyle=":")
    axes.text(1.005, 1, "plain\ndecoding", transform=axes.get_yaxis_transform(), va="center", fontsize=8, color=INK)
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
    folder = Path(folder)
    return [
        save_figure(acceptance_figure(summary), folder / ACCEPTANCE_PLOT),
        save_figure(length_figure(summary), folder / LENGTH_PLOT),
    ]


def _acceptance_line(panel: Any, row: Row, number: int) -> None:
    statistics = row.statistics
    position = np.arange(1, len(statistics.reached_at) + 1)
    color, marker = COLORS[number % len(COLORS)], MARKERS[number % len(MARKERS)]
    rate = statistics.conditional_acceptance
    look: dict[str, Any] = {"color": color, "marker": marker, "markersize": 5}
    thin = statistics.reached_at < _FEW
    panel.plot(position, rate, color=color, linewidth=1, linestyle=":")
    panel.plot(position, np.where(thin, np.nan, rate), linewidth=1.6, label=row.system, **look)
    panel.plot(position[thin], rate[thin], linestyle="none", markerfacecolor="white", **look)
    panel.set_xticks(position)
    style(panel)


def _legend(figure: Figure, axes: Any, entries: int) -> None:
    style(axes)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=min(entries, 4), frameon=False)


def _drafters(summary: Summary) -> list[str]:
    names = list(dict.fromkeys(row.system for row in summary.rows if row.system != PLAIN))
    if not names:
        raise ValueError("there is nothing to plot: only plain decoding was measured")
    return names


def _domains(summary: Summary) -> list[str]:
    return list(dict.fromkeys(row.domain for row in summary.rows if row.domain != OVERALL))


def _row(summary: Summary, system: str, domain: str) -> Row:
    return next(row for row in summary.rows if (row.system, row.domain) == (system, domain))
