"""Tables of a measurement, for terminals (rich) and for documents (markdown), from one description of their cells."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from rich import box
from rich.table import Table

from dspark_jax.evaluation.measure import PLAIN
from dspark_jax.evaluation.summary import OVERALL, Row, Summary
from dspark_jax.spec.metrics import Interval

RESULTS_BEGIN, RESULTS_END = "<!-- results -->", "<!-- /results -->"
_UNDEFINED = "–"


@dataclasses.dataclass(frozen=True)
class Grid:
    """A table before it is drawn.

    Attributes:
        title: what it shows.
        note: how to read it.
        header: column names; the first two columns are text, the others numbers.
        sections: groups of rows, separated by a line.
    """

    title: str
    note: str
    header: tuple[str, ...]
    sections: tuple[tuple[tuple[str, ...], ...], ...]


def length_grid(summary: Summary) -> Grid:
    """Accepted length, its counts and the verify rate of every drafter, by domain and overall."""
    note = (
        "τ: tokens accepted a round, the target's own included. The overall τ is the mean over domains; the other "
        "overall numbers pool all prompts. Verify rate: share of the token positions computed by the target that were "
        "kept."
    )
    header = ("domain", "drafter", "τ [95%]", "rounds", "drafted", "accepted", "verify rate")
    return Grid("Accepted length", note, header, _sections(summary, _length_cells, plain=False))


def speed_grid(summary: Summary) -> Grid:
    """Rate of every system and its speed-up over plain decoding, by domain and overall."""
    note = (
        "Tokens a second of the decoding rounds alone: prefill has its own column, compilation is in neither. "
        "Speed-up: over plain decoding of the same prompts in this run."
    )
    header = ("domain", "system", "tokens", "seconds", "tokens/s", "speed-up [95%]", "prefill tokens/s")
    return Grid("Speed", note, header, _sections(summary, _speed_cells, plain=True))


def acceptance_grid(summary: Summary) -> Grid:
    """Conditional acceptance at each position, by domain and overall; overall also DeepSpec's unconditional number."""
    drafted = [row for row in summary.rows if row.system != PLAIN]
    width = max((len(row.statistics.proposed_at) for row in drafted), default=0)

    def conditional(row: Row) -> tuple[str, ...]:
        return _position_cells(row.domain, row, row.statistics.conditional_acceptance, width)

    overall = tuple(
        _position_cells("all rounds", row, row.statistics.acceptance_by_position, width)
        for row in drafted
        if row.domain == OVERALL
    )
    note = (
        "Of the rounds that accepted everything before position k, the share that accepted k too. Last rows: the "
        "share of all rounds that drafted position k, which falls with k by construction."
    )
    header = ("domain", "drafter", *(f"k = {k}" for k in range(1, width + 1)))
    sections = (*_sections(summary, conditional, plain=False), overall)
    return Grid("Conditional acceptance by position", note, header, sections)


def comparison_grid(summary: Summary) -> Grid:
    """Ratios of accepted lengths between the first drafter and the others."""
    rows = tuple((c.system, c.baseline, _with_interval(c.ratio)) for c in summary.comparisons)
    note = "Ratio of the mean over domains of τ, resampled over the prompts that both decoded."
    return Grid("Accepted length compared", note, ("drafter", "against", "ratio [95%]"), (rows,))


def grids(summary: Summary) -> list[Grid]:
    """All tables that have something to show."""
    drafted = any(row.system != PLAIN for row in summary.rows)
    found = [length_grid(summary), acceptance_grid(summary)] if drafted else []
    found += [comparison_grid(summary)] if summary.comparisons else []
    return [*found, speed_grid(summary)]


def rich_table(grid: Grid) -> Table:
    """Draw a grid for the terminal."""
    table = Table(title=grid.title, caption=grid.note, box=box.SIMPLE_HEAD, title_style="bold", caption_justify="left")
    table.pad_edge = False
    for number, name in enumerate(grid.header):
        # A narrow terminal folds names, never numbers; headings of two words take two lines anyway.
        heading = name.replace(" ", "\n") if number >= 2 and "k =" not in name else name
        justify: Literal["left", "right"] = "left" if number < 2 else "right"
        table.add_column(heading, justify=justify, no_wrap=number >= 2, overflow="fold", vertical="bottom")
    for section in grid.sections:
        for number, cells in enumerate(section):
            # The domain stands in front of its first row only.
            repeated = number and cells[0] == section[number - 1][0]
            table.add_row("" if repeated else cells[0], *cells[1:], end_section=number == len(section) - 1)
    return table


def markdown(grid: Grid) -> str:
    """Write a grid as a markdown table with its note."""
    lines = [
        f"**{grid.title}**",
        "",
        "| " + " | ".join(grid.header) + " |",
        "| " + " | ".join("---" if i < 2 else "---:" for i in range(len(grid.header))) + " |",
    ]
    lines += ["| " + " | ".join(cells) + " |" for section in grid.sections for cells in section]
    return "\n".join([*lines, "", grid.note]) + "\n"


def insert_results(document: str, text: str) -> str:
    """Put `text` between the results markers of a document.

    Raises:
        ValueError: the markers are missing or in the wrong order.
    """
    head, begin, rest = document.partition(RESULTS_BEGIN)
    _, end, tail = rest.partition(RESULTS_END)
    if not begin or not end:
        raise ValueError(
            f"the document has no lines {RESULTS_BEGIN} and {RESULTS_END}, in this order: add them for the tables"
        )
    return f"{head}{begin}\n\n{text.strip()}\n\n{end}{tail}"


def _sections(
    summary: Summary, cells: Callable[[Row], tuple[str, ...]], *, plain: bool
) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """One section a domain, with or without the rows of plain decoding."""
    domains = dict.fromkeys(row.domain for row in summary.rows)
    rows = [row for row in summary.rows if plain or row.system != PLAIN]
    return tuple(tuple(cells(row) for row in rows if row.domain == domain) for domain in domains)


def _length_cells(row: Row) -> tuple[str, ...]:
    s = row.statistics
    counts = (f"{n:,}" for n in (s.rounds, s.proposed, int(s.accepted_at.sum())))
    return (row.domain, row.system, _with_interval(row.macro_tau or row.tau), *counts, _percent(s.verify_rate))


def _speed_cells(row: Row) -> tuple[str, ...]:
    speed = row.speed
    prefill = speed.prompt_tokens / speed.prefill_seconds if speed.prefill_seconds > 0 else float("nan")
    return (
        row.domain,
        row.system,
        f"{speed.tokens:,}",
        f"{speed.decode_seconds:.1f}",
        _number(speed.tokens_per_second, 1),
        "1" if speed.speedup is None else _with_interval(speed.speedup),
        _number(prefill, 0),
    )


def _position_cells(domain: str, row: Row, values: np.ndarray, width: int) -> tuple[str, ...]:
    padded: Sequence[float] = [*values, *[float("nan")] * (width - len(values))]
    return (domain, row.system, *(_number(value, 2) for value in padded))


def _number(value: float, digits: int) -> str:
    return f"{value:,.{digits}f}" if math.isfinite(value) else _UNDEFINED


def _percent(value: float) -> str:
    return f"{100 * value:.0f}%" if math.isfinite(value) else _UNDEFINED


def _with_interval(interval: Interval) -> str:
    if not math.isfinite(interval.estimate):
        return _UNDEFINED
    return f"{interval.estimate:.2f} [{_number(interval.low, 2)}–{_number(interval.high, 2)}]"
