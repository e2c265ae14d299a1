"""Tables fit a terminal, agree with their markdown, and go between the markers of a document."""

from __future__ import annotations

import io

import pytest
from decoded import answer, example, measurement
from rich.console import Console

from dspark_jax.evaluation.measure import PLAIN
from dspark_jax.evaluation.summary import summarize
from dspark_jax.evaluation.tables import (
    RESULTS_BEGIN,
    RESULTS_END,
    acceptance_grid,
    comparison_grid,
    grids,
    insert_results,
    length_grid,
    markdown,
    rich_table,
    speed_grid,
)


def draw(grid, width=80):
    console = Console(file=io.StringIO(), width=width)
    console.print(rich_table(grid))
    return console.file.getvalue()


def test_cells():
    summary = summarize(example())
    math = length_grid(summary).sections[0]
    assert math[0] == ("math", "good", "4.00 [4.00–4.00]", "2", "6", "6", "100%")
    assert [row[1] for row in math] == ["good", "poor"]
    speed = speed_grid(summary).sections[-1]
    assert speed[0] == ("overall", "plain", "16", "4.0", "4.0", "1", "6")
    assert speed[1][:6] == ("overall", "good", "16", "2.0", "8.0", "2.00 [2.00–2.00]")
    assert comparison_grid(summary).sections[0][0][:2] == ("good", "poor")


def test_the_overall_length_is_the_mean_over_domains():
    overall = length_grid(summarize(example())).sections[-1][0]
    assert overall[2].startswith("3.33 ")


def test_both_acceptance_rates_are_named_apart():
    sections = acceptance_grid(summarize(example())).sections
    assert [s[0][0] for s in sections] == ["math", "chat", "overall", "all rounds"]
    assert sections[2][0] == ("overall", "good", "1.00", "0.60", "1.00")
    assert sections[3][0] == ("all rounds", "good", "1.00", "0.60", "0.60")
    # Nobody reached position 3 after math's rejections.
    assert sections[0][1] == ("math", "poor", "0.00", "–", "–")


def test_every_number_survives_a_terminal_of_80_columns():
    for grid in grids(summarize(example())):
        text = draw(grid)
        assert max(map(len, text.splitlines())) <= 80
        for section in grid.sections:
            for row in section:
                assert any(all(cell in line for cell in row[2:]) for line in text.splitlines())


def test_long_names_fold():
    plain, ours = [answer([0], plain=True)], [answer([1])]
    name = "runs/" + "x" * 60
    text = draw(length_grid(summarize(measurement({PLAIN: plain, name: ours}, ["task"]))))
    assert max(map(len, text.splitlines())) <= 80 and "2.00 [2.00–2.00]" in text


def test_plain_decoding_alone():
    summary = summarize(measurement({PLAIN: [answer([0], plain=True)]}, ["x"]))
    assert [g.title for g in grids(summary)] == ["Speed"]


def test_markdown_is_a_table():
    lines = markdown(length_grid(summarize(example()))).splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1
    assert table[2] == "| math | good | 4.00 [4.00–4.00] | 2 | 6 | 6 | 100% |"


def test_results_replace_what_stood_between_the_markers():
    document = f"# Title\n\n{RESULTS_BEGIN}\nold\n{RESULTS_END}\n\nrest\n"
    once = insert_results(document, "new\n")
    assert once == f"# Title\n\n{RESULTS_BEGIN}\n\nnew\n\n{RESULTS_END}\n\nrest\n"
    assert insert_results(once, "new\n") == once
    for broken in ("nothing", f"{RESULTS_END} {RESULTS_BEGIN}"):
        with pytest.raises(ValueError, match="in this order"):
            insert_results(broken, "new")
