"""Plots of a calibration: reliability diagrams (the paper's Figure 6) and the threshold sweep (its Figure 5)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dspark_jax.evaluation.calibration import Assessment
from dspark_jax.evaluation.figures import COLORS, INK, new_figure, save_figure, style
from dspark_jax.spec.metrics import ConfidenceMetrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RELIABILITY_PLOT, SWEEP_PLOT = "reliability.png", "threshold_sweep.png"
_FEW = 20
_CALIBRATED, _RAW, _RATE = COLORS[:3]


def reliability_figure(assessment: Assessment) -> Figure:
    """Observed against predicted survival, one panel a position, without and with the temperatures.

    Bins of fewer than 20 blocks are hollow: they say little.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    size = len(assessment.temperatures)
    columns = min(size, 4)
    lines = math.ceil(size / columns)
    figure = new_figure(width=0.6 + 2.5 * columns, height=0.6 + 2.5 * lines)
    panels = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
    for k, panel in enumerate(panels.flat):
        if k >= size:
            panel.set_visible(False)
            continue
        panel.plot([0, 1], [0, 1], color=INK, linewidth=0.8, linestyle=":")
        for label, metrics, color in (
            ("as trained", assessment.raw, _RAW),
            ("calibrated", assessment.calibrated, _CALIBRATED),
        ):
            _reliability_line(panel, metrics, k, label, color)
        raw, calibrated = assessment.raw.ece[k], assessment.calibrated.ece[k]
        panel.set_title(f"position {k + 1}: ECE {_percent(raw)} → {_percent(calibrated)}", fontsize=9, color=INK)
        panel.set_xlim(-0.03, 1.03)
        panel.set_ylim(-0.03, 1.03)
        # The lowest visible panel of a column carries the axis.
        lowest = k + columns >= size
        panel.xaxis.set_tick_params(labelbottom=lowest)
        panel.set_xlabel("predicted survival" if lowest else "")
        style(panel)
    for row in panels:
        row[0].set_ylabel("observed survival")
    handles, labels = panels.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False)
    return figure


def sweep_figure(assessment: Assessment) -> Figure:
    """Accepted and rejected draft tokens a step, and acceptance, against the threshold: one panel a domain.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    columns = min(len(assessment.sweeps), 4)
    lines = math.ceil(len(assessment.sweeps) / columns)
    figure = new_figure(width=1.2 + 2.9 * columns, height=0.7 + 2.7 * lines)
    panels = figure.subplots(lines, columns, squeeze=False, sharey=True)
    for panel, (name, points) in zip(panels.flat, assessment.sweeps.items(), strict=False):
        at = np.array([p.threshold for p in points])
        accepted, rejected = np.array([p.accepted for p in points]), np.array([p.rejected for p in points])
        panel.bar(at, accepted, 0.08, color=_CALIBRATED, label="accepted")
        panel.bar(at, rejected, 0.08, bottom=accepted, color=_RAW, label="rejected")
        panel.set_title(name, fontsize=11, color=INK)
        panel.set_xlabel("confidence threshold")
        style(panel)
        rate = panel.twinx()
        rate.plot(at, [p.acceptance for p in points], color=_RATE, marker="o", markersize=4, label="acceptance")
        rate.set_ylim(0, 1.05)
        rate.spines[["top"]].set_visible(False)
        rate.tick_params(colors=_RATE)
    for panel in list(panels.flat)[len(assessment.sweeps) :]:
        panel.set_visible(False)
    for row in panels:
        row[0].set_ylabel("draft tokens a step")
    shown = [axes for axes in figure.axes if axes.get_visible()]
    handles = [axes.get_legend_handles_labels() for axes in (panels.flat[0], shown[-1])]
    figure.legend(
        handles[0][0] + handles[1][0], handles[0][1] + handles[1][1], loc="outside upper center", ncols=3, frameon=False
    )
    return figure


def write_calibration_plots(assessment: Assessment, folder: str | Path) -> list[Path]:
    """Write both figures as PNG.

    Args:
        assessment: the numbers.
        folder: created if needed.

    Returns:
        The files written.

    Raises:
        ModuleNotFoundError: matplotlib is not installed; names the extra that brings it.
    """
    folder = Path(folder)
    return [
        save_figure(reliability_figure(assessment), folder / RELIABILITY_PLOT),
        save_figure(sweep_figure(assessment), folder / SWEEP_PLOT),
    ]


def _reliability_line(panel: Any, metrics: ConfidenceMetrics, k: int, label: str, color: str) -> None:
    count, predicted, observed = metrics.bin_count[k], metrics.bin_predicted[k], metrics.bin_observed[k]
    many, few = count >= _FEW, (count > 0) & (count < _FEW)
    panel.plot(predicted[many], observed[many], color=color, linewidth=1.4, marker="o", markersize=3.5, label=label)
    panel.plot(
        predicted[few],
        observed[few],
        color=color,
        marker="o",
        markersize=3.5,
        linestyle="none",
        markerfacecolor="white",
    )


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %" if math.isfinite(value) else "–"
