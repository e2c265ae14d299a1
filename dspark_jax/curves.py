"""`python -m dspark_jax.curves`: draw training curves from the logs of one or more runs.

    python -m dspark_jax.curves --run DSpark=runs/smollm2_dspark/metrics.jsonl --output docs/training.png

Left: drafted tokens a round on the held-out rows (the probabilistic tau), against minutes of training. Right: accept
rate by position at the last validation.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import tyro

from dspark_jax.evaluation.figures import COLORS, new_figure, save_figure, style
from dspark_jax.terminal import guarded


@dataclasses.dataclass(frozen=True, kw_only=True)
class CurvesCommand:
    """Draw training curves.

    Attributes:
        run: `NAME=metrics.jsonl` of each run, in the order of the legend.
        output: picture to write.
    """

    run: tyro.conf.UseAppendAction[tuple[str, ...]]
    output: Path


def read_run(argument: str) -> tuple[str, list[dict[str, Any]]]:
    """Name and validation lines of a `NAME=metrics.jsonl` argument.

    Raises:
        ValueError: no name, no file, or a log without validations.
    """
    name, _, path = argument.partition("=")
    if not path:
        raise ValueError(f"--run {argument!r} is not NAME=metrics.jsonl")
    if not Path(path).is_file():
        raise ValueError(f"--run {argument!r}: {path} does not exist; a training writes metrics.jsonl to its --output")
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    validations = [line for line in lines if line["kind"] == "validation"]
    if not validations:
        raise ValueError(f"{path} holds no validation: train with validate_every")
    return name, validations


def main(command: CurvesCommand) -> None:
    """Run the command."""
    runs = [read_run(argument) for argument in command.run]
    figure = new_figure(width=10.0, height=4.0)
    left, right = figure.subplots(1, 2)
    for (name, lines), color in zip(runs, itertools.cycle(COLORS), strict=False):
        look: dict[str, Any] = {"label": name, "color": color, "marker": "o", "markersize": 3}
        minutes = [line["seconds"] / 60 for line in lines]
        left.plot(minutes, [line["tau_probabilistic"] for line in lines], **look)
        rates = lines[-1]["accept_rate"]
        right.plot(range(1, len(rates) + 1), rates, **look)
    left.set(xlabel="minutes of training", ylabel="probabilistic τ, held-out rows")
    right.set(xlabel="position in the block", ylabel="accept rate at the last validation", ylim=(0, None))
    for axis in (left, right):
        style(axis)
        axis.legend(frameon=False)
    save_figure(figure, command.output)


if __name__ == "__main__":
    arguments = tyro.cli(CurvesCommand, prog="python -m dspark_jax.curves", description=__doc__)
    sys.exit(guarded(lambda: main(arguments)))
