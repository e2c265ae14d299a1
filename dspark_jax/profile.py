"""`python -m dspark_jax.profile`: measure what a step costs on this machine, for hardware-aware scheduling.

Writes the JSON that `bench serve` and the engine's policies `scheduled` and `greedy` read, and draws the curve.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import tyro
from rich.console import Console
from rich.table import Table

from dspark_jax.draft.loading import load_drafter
from dspark_jax.engine.profile import StepProfile, measure_profile
from dspark_jax.evaluation.figures import require_matplotlib
from dspark_jax.evaluation.serving_plots import write_profile_plot
from dspark_jax.progress import Progress
from dspark_jax.target.loading import load_target
from dspark_jax.terminal import guarded, table_console


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileCommand:
    """Measure step costs.

    Attributes:
        target: `smollm2-135m`, a path or a hub name.
        draft: a shipped name, a path or a hub name.
        slots: slots of the engine the profile is for.
        context: tokens that every slot holds while it is measured.
        repeats: timed laps over all programs, which take turns; the median counts.
        rows: rows of a step to measure; the engine's own ladder by default.
        output: where the profile goes.
        plot: where a picture of the curve goes; none by default.
    """

    target: str = "smollm2-135m"
    draft: str = "dspark"
    slots: int = 8
    context: int = 256
    repeats: int = 7
    rows: tuple[int, ...] | None = None
    output: Path = Path("profile.json")
    plot: Path | None = None


def table(profile: StepProfile) -> Table:
    """The measured numbers."""
    result = Table(title=f"step costs, {profile.slots} slots at context {profile.context}, {profile.device}")
    for name in ("rows", "verify (ms)", "without drafts (ms)", "round, monotone (ms)"):
        result.add_column(name, justify="right")
    for i, rows in enumerate(profile.rows):
        plain = f"{1e3 * profile.plain[i]:.1f}" if i < len(profile.plain) else ""
        result.add_row(f"{rows}", f"{1e3 * profile.step[i]:.1f}", plain, f"{1e3 * profile.curve.seconds(rows):.1f}")
    result.caption = (
        f"drafting: {1e3 * profile.propose:.1f} ms; {profile.chunk} prompt tokens: {1e3 * profile.prompt:.1f} ms "
        f"alone, {1e3 * profile.chunk * profile.prompt_token:.1f} ms beside others"
    )
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    command = tyro.cli(ProfileCommand, prog="python -m dspark_jax.profile", args=arguments, description=__doc__)
    return guarded(lambda: run(command))


def run(command: ProfileCommand) -> None:
    """Measure, print, write."""
    console = Console(stderr=True)
    if command.plot is not None:
        require_matplotlib()
    target = load_target(command.target, dtype=jnp.float32)
    drafter = load_drafter(command.draft, target)
    with Progress("profiling", None, "runs", console=console) as progress:
        profile = measure_profile(
            target,
            drafter,
            slots=command.slots,
            context=command.context,
            repeats=command.repeats,
            ladder=command.rows,
            on_progress=lambda done, total: progress.update(done - progress.completed, of=total),
        )
    profile.save(command.output)
    table_console().print(table(profile))
    if command.plot is not None:
        write_profile_plot(profile, command.plot)
    console.print(f"wrote {command.output}")


if __name__ == "__main__":
    sys.exit(main())
