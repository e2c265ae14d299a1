"""The figures hold what the summary says, for any number of domains and drafters."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from decoded import answer, example, measurement

from dspark_jax.evaluation.figures import require_matplotlib
from dspark_jax.evaluation.measure import PLAIN
from dspark_jax.evaluation.plots import acceptance_figure, length_figure, write_plots
from dspark_jax.evaluation.summary import summarize


def lines_by_label(panel):
    return {line.get_label(): line for line in panel.get_lines()}


def test_one_panel_a_domain_and_one_line_a_drafter():
    answers = {PLAIN: [answer([0] * 20, plain=True)], "a": [answer([3, 1] * 10)]}
    figure = acceptance_figure(summarize(measurement(answers, ["x"])))
    assert [panel.get_title() for panel in figure.axes] == ["x"]
    np.testing.assert_allclose(lines_by_label(figure.axes[0])["a"].get_ydata(), [1, 0.5, 1])
    panels = acceptance_figure(summarize(example())).axes
    assert [panel.get_title() for panel in panels] == ["math", "chat"]


def test_rarely_reached_positions_are_drawn_hollow():
    """Twelve rounds reach the first position, two the second: only the first is a solid point."""
    answers = {PLAIN: [answer([0] * 12, plain=True)], "a": [answer([1, 1] + [0] * 10)]}
    line = lines_by_label(acceptance_figure(summarize(measurement(answers, ["x"]))).axes[0])["a"]
    np.testing.assert_allclose(line.get_ydata(), [2 / 12, np.nan, np.nan])


def test_five_domains_take_two_rows():
    domains = list("abcde")
    answers = {PLAIN: [answer([0], plain=True)] * 5, "a": [answer([1])] * 5}
    figure = acceptance_figure(summarize(measurement(answers, domains)))
    assert [p.get_title() for p in figure.axes if p.get_visible()] == domains


def test_bars_are_the_accepted_lengths():
    axes = length_figure(summarize(example())).axes[0]
    heights = [bar.get_height() for bar in axes.patches]
    np.testing.assert_allclose(heights, [4, 8 / 3, 10 / 3, 1, 8 / 6, 7 / 6])


def test_files(tmp_path):
    files = write_plots(summarize(example()), tmp_path / "plots")
    assert [f.name for f in files] == ["conditional_acceptance.png", "accepted_length.png"]
    assert all(f.read_bytes().startswith(b"\x89PNG") for f in files)


def test_nothing_to_plot():
    with pytest.raises(ValueError, match="only plain decoding"):
        acceptance_figure(summarize(measurement({PLAIN: [answer([0], plain=True)]}, ["x"])))


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"dspark-jax\[plot\]"):
        require_matplotlib()
