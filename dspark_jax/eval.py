"""`python -m dspark_jax.eval`: measure drafters against plain decoding.

Without arguments: SmolLM2-135M-Instruct, every drafter inside the package, a few built-in prompts for math, code and
chat, temperature 0. Exit status: 0, or 1 when a speculative output differs from plain decoding by more than rounding.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import tyro
from rich.console import Console

from dspark_jax.draft.loading import shipped_drafters
from dspark_jax.engine.drafters import find_drafter
from dspark_jax.evaluation.figures import require_matplotlib
from dspark_jax.evaluation.lossless import LosslessCheck, check_lossless
from dspark_jax.evaluation.measure import Measurement, Settings, measure
from dspark_jax.evaluation.plots import write_plots
from dspark_jax.evaluation.report import machine, report, versions, write_report
from dspark_jax.evaluation.summary import OVERALL, Summary, summarize
from dspark_jax.evaluation.tables import RESULTS_BEGIN, grids, insert_results, markdown, rich_table
from dspark_jax.evaluation.tasks import load_tasks
from dspark_jax.files import atomic_write
from dspark_jax.target.loading import load_target
from dspark_jax.terminal import guarded, table_console
from dspark_jax.types import ChatOptions

_DEFAULT = ("dspark", "dflash", "eagle3")
"""The drafters of the paper's tables, in their order; others that are shipped are asked for by name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalCommand:
    """Measure drafters against plain decoding.

    Attributes:
        target: `smollm2-135m`, a GGUF file, a model folder or a hub name.
        chat: how conversations become prompts; as in the drafters' training.
        draft: shipped name, checkpoint folder or hub name; `ngram` for prompt lookup; `lm:` and a target's name or path
            for that language model. Repeat it for several. Without it: dspark, dflash and eagle3.
        tasks: JSONL files with `turns`, or folders of them, optionally as `domain=path`. Without it: built-in prompts.
        max_samples: prompts taken of every domain, the first ones.
        max_new_tokens: limit of generated tokens a prompt.
        temperature: 0 decodes greedily, and checks that drafters do not change the text.
        batch_size: prompts decoded together; 1 measures latency.
        block_size: draft tokens a round. Without it: each drafter's trained size.
        confidence_threshold: verify a block only up to the first token predicted below this; 0 verifies all.
        seed: of sampling and of the intervals.
        dtype: type of weights, products and caches.
        output: write every number, one row a prompt included, to this JSON file.
        plots: draw acceptance by position and accepted length by task into this folder.
        markdown: write the tables to this file; where it has the results markers, only between them.
    """

    target: str = "smollm2-135m"
    chat: ChatOptions = dataclasses.field(default_factory=ChatOptions)
    draft: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    tasks: tuple[str, ...] = ()
    max_samples: int | None = None
    max_new_tokens: int = 64
    temperature: float = 0.0
    batch_size: int = 1
    block_size: int | None = None
    confidence_threshold: float = 0.0
    seed: int = 0
    dtype: Literal["float32", "bfloat16"] = "float32"
    output: Path | None = None
    plots: Path | None = None
    markdown: Path | None = None

    @property
    def settings(self) -> Settings:
        """The part that decoding needs."""
        return Settings(**{f.name: getattr(self, f.name) for f in dataclasses.fields(Settings)})


def run(command: EvalCommand, console: Console) -> int:
    """Measure, print, write; returns the exit status."""
    settings = command.settings
    prompts = load_tasks(command.tasks, max_samples=command.max_samples)
    names = command.draft or default_drafters()
    if command.plots:
        require_matplotlib()
    if command.dtype == "float32" and jax.default_backend() != "cpu":
        # Accelerators round the operands of float32 products unless told not to; the comparison below needs float32.
        jax.config.update("jax_default_matmul_precision", "highest")
    target = load_target(command.target, dtype=jnp.dtype(command.dtype), chat=command.chat)
    drafters = [find_drafter(name, target) for name in names]
    console.print(_introduction(command, len(prompts), names), highlight=False, soft_wrap=True)
    measurement = measure(target, drafters, prompts, settings)
    summary, lossless = summarize(measurement), check_lossless(measurement, target.dtype)
    for grid in grids(summary):
        console.print(rich_table(grid))
    for line in notes(measurement, summary, lossless):
        console.print(line, highlight=False, soft_wrap=True)
    if command.output:
        write_report(report(target, prompts, measurement, summary, lossless), command.output)
    files = write_plots(summary, command.plots) if command.plots else []
    if command.markdown:
        write_markdown(command, measurement, summary, lossless, files)
    for path in filter(None, (command.output, *files, command.markdown)):
        console.print(f"Wrote {path}", highlight=False, soft_wrap=True)
    return 1 if lossless.faults else 0


def default_drafters() -> tuple[str, ...]:
    """The drafters of the paper's tables that are shipped.

    Raises:
        FileNotFoundError: this copy of the package has none.
    """
    found = tuple(name for name in _DEFAULT if name in shipped_drafters())
    if not found:
        raise FileNotFoundError(
            "this copy of the package ships no drafters: name one with --draft (a checkpoint folder or a hub name), or "
            "train one with python -m dspark_jax.train --config configs/smollm2_dspark.py"
        )
    return found


def notes(measurement: Measurement, summary: Summary, lossless: LosslessCheck) -> list[str]:
    """What the tables do not say."""
    speeds = [row.speed for row in summary.rows if row.domain == OVERALL]
    lines = [lossless.statement()]
    threshold = measurement.settings.confidence_threshold
    without = [s.name for s in measurement.drafters if threshold > 0 and s.confidence_threshold == 0]
    if without:
        lines.append(f"The confidence threshold does not apply to {', '.join(without)}: no confidence head.")
    lines.append(f"Compilation, counted nowhere: {sum(speed.compile_seconds for speed in speeds):.0f} s.")
    return lines


def write_markdown(
    command: EvalCommand,
    measurement: Measurement,
    summary: Summary,
    lossless: LosslessCheck,
    plots: Sequence[Path],
) -> None:
    """Write tables, notes and plots to the command's markdown file."""
    assert command.markdown is not None
    hardware, software = machine(), versions()
    settings = measurement.settings
    parts = [
        f"Target `{command.target}`, temperature {settings.temperature:g}, batch {settings.batch_size}, "
        f"{command.dtype}, at most {settings.max_new_tokens} new tokens; {hardware['processor']}, "
        f"{hardware['cores']} cores, {hardware['devices']}, jax {software['jax']}.",
        *(markdown(grid) for grid in grids(summary)),
        "\n".join(f"* {line}" for line in notes(measurement, summary, lossless)),
        *(f"![{path.stem.replace('_', ' ')}]({_relative(path, command.markdown.parent)})" for path in plots),
    ]
    text = "\n\n".join(part.strip() for part in parts) + "\n"
    old = command.markdown.read_text(encoding="utf-8") if command.markdown.exists() else ""
    with atomic_write(command.markdown, "w") as file:
        file.write(insert_results(old, text) if RESULTS_BEGIN in old else text)


def _relative(path: Path, folder: Path) -> str:
    return Path(os.path.relpath(path, folder)).as_posix()


def _introduction(command: EvalCommand, prompts: int, names: Sequence[str]) -> str:
    return (
        f"Target {command.target}; drafters {', '.join(names)}; {prompts} prompts of at most "
        f"{command.max_new_tokens} new tokens at temperature {command.temperature:g}, batch {command.batch_size}, "
        f"{command.dtype}."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    command = tyro.cli(EvalCommand, prog="python -m dspark_jax.eval", args=arguments, description=__doc__)
    return guarded(lambda: run(command, table_console()))


if __name__ == "__main__":
    sys.exit(main())
