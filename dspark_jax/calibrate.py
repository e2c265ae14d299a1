"""`python -m dspark_jax.calibrate`: fit the temperatures of a drafter's confidence head and check them.

Decodes prompts at temperature 1, fits one temperature a position on half of them (sequentially, to the survival of the
block), and reports calibration error, AUROC and Brier score before and after on the other half. The temperatures go
into the checkpoint's `config.json`; weights stay as they are, and other readers of the layout see no difference.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import tyro
from rich.console import Console

from dspark_jax.draft.loading import drafter_folder, load_drafter, write_temperatures
from dspark_jax.evaluation.calibration import (
    Settings,
    assess,
    check_disjoint,
    collect,
    grids,
    notes,
    report,
    split_prompts,
    without_temperatures,
)
from dspark_jax.evaluation.calibration_plots import write_calibration_plots
from dspark_jax.evaluation.figures import require_matplotlib
from dspark_jax.evaluation.report import write_report
from dspark_jax.evaluation.tables import rich_table
from dspark_jax.evaluation.tasks import Prompt, load_tasks
from dspark_jax.target.loading import load_target
from dspark_jax.terminal import guarded, table_console
from dspark_jax.types import ChatOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrateCommand:
    """Fit and check the temperatures of a confidence head.

    Attributes:
        target: `smollm2-135m`, a GGUF file, a model folder or a hub name.
        chat: how conversations become prompts; as in the drafter's training.
        draft: shipped name, checkpoint folder or hub name of a drafter with a confidence head.
        tasks: JSONL files with `turns`, or folders of them, optionally as `domain=path`; every other prompt is fitted
            on, the rest checks. Without it, and without the next two: built-in prompts, which are far too few.
        fit_tasks: prompts to fit on, with `check_tasks` in place of `tasks`.
        check_tasks: prompts to check on.
        max_samples: prompts taken of every domain, the first ones (before they are split).
        max_new_tokens: limit of generated tokens a prompt.
        batch_size: prompts decoded together.
        seed: of sampling.
        dtype: type of weights, products and caches.
        output: folder for a copy of the drafter with the temperatures.
        in_place: write the temperatures into the drafter's own folder; `draft` must be a path.
        report: write every number to this JSON file.
        plots: draw reliability diagrams and the threshold sweep into this folder.
    """

    target: str = "smollm2-135m"
    chat: ChatOptions = dataclasses.field(default_factory=ChatOptions)
    draft: str = "dspark"
    tasks: tuple[str, ...] = ()
    fit_tasks: tuple[str, ...] = ()
    check_tasks: tuple[str, ...] = ()
    max_samples: int | None = None
    max_new_tokens: int = 256
    batch_size: int = 16
    seed: int = 0
    dtype: Literal["float32", "bfloat16"] = "float32"
    output: Path | None = None
    in_place: bool = False
    report: Path | None = None
    plots: Path | None = None

    @property
    def settings(self) -> Settings:
        """The part that collecting needs."""
        return Settings(**{f.name: getattr(self, f.name) for f in dataclasses.fields(Settings)})


def run(command: CalibrateCommand, console: Console) -> int:
    """Collect, fit, check, print, write; returns the exit status."""
    settings = command.settings
    source, destination = places(command)
    fit, check = prompt_sets(command)
    if command.plots:
        require_matplotlib()
    if command.dtype == "float32" and jax.default_backend() != "cpu":
        # As in evaluation: accelerators round the operands of float32 products unless told not to.
        jax.config.update("jax_default_matmul_precision", "highest")
    target = load_target(command.target, dtype=jnp.dtype(command.dtype), chat=command.chat)
    drafter = load_drafter(command.draft, target)
    without_temperatures(drafter)  # refuses a drafter without the head before anything is decoded
    console.print(
        f"Target {command.target}; drafter {command.draft}; {len(fit)} prompts to fit and {len(check)} to check, at "
        f"most {settings.max_new_tokens} new tokens at temperature 1, batch {settings.batch_size}, {command.dtype}.",
        highlight=False,
        soft_wrap=True,
    )
    fitted = collect(target, drafter, fit, settings, description="collecting to fit")
    checked = collect(
        target, drafter, check, settings, first_seed=settings.seed + len(fit), description="collecting to check"
    )
    assessment = assess(fitted, checked)
    for grid in grids(assessment):
        console.print(rich_table(grid))
    for line in notes(assessment):
        console.print(line, highlight=False, soft_wrap=True)
    written: list[Path] = []
    if command.report:
        sets = {"fit": fit, "check": check}
        write_report(report(target, drafter, sets, settings, assessment), command.report)
        written.append(command.report)
    if command.plots:
        written += write_calibration_plots(assessment, command.plots)
    if destination is not None:
        write_temperatures(source, assessment.temperatures, destination)
        written.append(destination / "config.json")
    else:
        console.print("The drafter is as it was: name --output FOLDER for a calibrated copy, or --in-place.")
    for path in written:
        console.print(f"Wrote {path}", highlight=False, soft_wrap=True)
    return 0


def places(command: CalibrateCommand) -> tuple[Path, Path | None]:
    """Folder of the drafter, and the folder that gets the temperatures (None: nowhere).

    Raises:
        ValueError: `output` and `in_place` together, `output` that is the drafter's own folder, or `in_place` for a
            drafter that was not named by its path.
    """
    source = drafter_folder(command.draft)
    if command.output is not None and command.in_place:
        raise ValueError("--output and --in-place exclude each other: a copy, or the drafter itself")
    if command.in_place:
        if Path(command.draft).expanduser().resolve() != source.resolve():
            raise ValueError(
                f"--in-place changes a folder of yours, and {command.draft!r} is a name: give the drafter's path, or "
                "--output FOLDER for a calibrated copy"
            )
        return source, source
    if command.output is not None and command.output.resolve() == source.resolve():
        raise ValueError(f"--output {command.output} is the drafter's own folder: say --in-place to change it")
    return source, command.output


def prompt_sets(command: CalibrateCommand) -> tuple[list[Prompt], list[Prompt]]:
    """Prompts to fit and to check, no text in both.

    Raises:
        ValueError: options that contradict each other, or sets that overlap.
    """
    if bool(command.fit_tasks) != bool(command.check_tasks) or (command.tasks and command.fit_tasks):
        raise ValueError("give --tasks, which is split into two halves, or --fit-tasks and --check-tasks together")
    if not command.fit_tasks:
        return split_prompts(load_tasks(command.tasks, max_samples=command.max_samples))
    fit = load_tasks(command.fit_tasks, max_samples=command.max_samples)
    check = load_tasks(command.check_tasks, max_samples=command.max_samples)
    check_disjoint(fit, check)
    return fit, check


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    command = tyro.cli(CalibrateCommand, prog="python -m dspark_jax.calibrate", args=arguments, description=__doc__)
    return guarded(lambda: run(command, table_console()))


if __name__ == "__main__":
    sys.exit(main())
