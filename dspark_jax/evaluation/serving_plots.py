"""Pictures of serving: step costs, throughput against a user's speed (Figure 7), and against load (Figure 8)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark_jax.engine.profile import StepProfile
from dspark_jax.evaluation.figures import COLORS, MARKERS, new_figure, save_figure, style
from dspark_jax.evaluation.serving import LoadRow

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FRONTIER_PLOT, LOAD_PLOT = "throughput_and_speed.png", "throughput_and_load.png"


def profile_figure(profile: StepProfile) -> Figure:
    """Seconds of a round against its rows, with and without drafts."""
    figure = new_figure(width=5.0, height=3.4)
    axes = figure.subplots()
    axes.step(
        profile.rows, [1e3 * s for s in profile.curve.bucket_seconds], where="pre", color=COLORS[0], label="round"
    )
    axes.plot(profile.rows, [1e3 * s for s in profile.step], "o", color=COLORS[0], markersize=3, label="verification")
    plain = profile.rows[: len(profile.plain)]
    axes.plot(plain, [1e3 * s for s in profile.plain], "s", color=COLORS[1], markersize=3, label="without drafts")
    axes.set_xlabel("rows of a round")
    axes.set_ylabel("milliseconds")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    style(axes)
    return figure


def write_profile_plot(profile: StepProfile, path: str | Path) -> None:
    """Write the cost curve as PNG."""
    save_figure(profile_figure(profile), path)


def frontier_figure(rows: Sequence[LoadRow]) -> Figure:
    """Aggregate throughput against the median speed of a request: one line a system, one point a concurrency."""
    figure = new_figure(width=6.0, height=4.0)
    axes = figure.subplots()
    for system, some, look in _systems(rows):
        axes.plot([r.user for r in some], [r.throughput for r in some], label=system, **look)
        axes.annotate(f"{some[-1].concurrency}", (some[-1].user, some[-1].throughput), fontsize=8)
    axes.set_xlabel("tokens a second of one request (median)")
    axes.set_ylabel("tokens a second of all")
    axes.legend(frameon=False, fontsize=8)
    style(axes)
    return figure


def load_figure(rows: Sequence[LoadRow]) -> Figure:
    """Throughput and rows a request against concurrency."""
    figure = new_figure(width=9.0, height=3.8)
    throughput, budget = figure.subplots(1, 2)
    loads = sorted({r.concurrency for r in rows})
    for system, some, look in _systems(rows):
        load = [r.concurrency for r in some]
        throughput.plot(load, [r.throughput for r in some], label=system, **look)
        budget.plot(load, [r.budget / r.concurrency for r in some], **look)
    for axes, label in ((throughput, "tokens a second"), (budget, "verified rows of a request and round")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(loads, [str(c) for c in loads])
        axes.set_xlabel("requests in flight")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        style(axes)
    throughput.legend(frameon=False, fontsize=8)
    return figure


def write_load_plots(rows: Sequence[LoadRow], folder: str | Path) -> list[Path]:
    """Write both pictures; returns their paths."""
    paths = [Path(folder) / FRONTIER_PLOT, Path(folder) / LOAD_PLOT]
    for figure, path in zip((frontier_figure(rows), load_figure(rows)), paths, strict=True):
        save_figure(figure, path)
    return paths


def _systems(rows: Sequence[LoadRow]) -> list[tuple[str, list[LoadRow], dict[str, Any]]]:
    names = list(dict.fromkeys(r.system for r in rows))
    return [
        (
            name,
            [r for r in rows if r.system == name],
            {"color": COLORS[i % len(COLORS)], "marker": MARKERS[i % len(MARKERS)], "markersize": 4, "linewidth": 1.4},
        )
        for i, name in enumerate(names)
    ]
