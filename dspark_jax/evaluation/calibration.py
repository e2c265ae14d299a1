"""Calibration of a drafter's confidence head on real text: collect proposals, fit, and check on other prompts.

Proposals are collected at temperature 1, where accepting is what the head was trained to predict, with whole blocks
verified and without the temperatures that the checkpoint may hold already, so that fitting again changes nothing.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from rich.console import Console

from dspark_jax.draft.contract import Drafter
from dspark_jax.draft.dspark import DSparkFunctions
from dspark_jax.engine.generate import generate
from dspark_jax.evaluation.report import machine, versions
from dspark_jax.evaluation.tables import Grid
from dspark_jax.evaluation.tasks import Prompt
from dspark_jax.files import fingerprint
from dspark_jax.progress import Progress
from dspark_jax.spec.calibration import (
    GRID,
    Proposals,
    ThresholdPoint,
    chance_error,
    fit_temperatures,
    threshold_sweep,
)
from dspark_jax.spec.metrics import ConfidenceMetrics
from dspark_jax.target.loading import Target

FORMAT = 1
ENOUGH = 20_000
"""Proposals from which on the chance part of a position's calibration error is one per cent or less."""
THRESHOLDS = tuple(k / 10 for k in range(10))
OVERALL = "overall"
_UNDEFINED = "–"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How proposals are collected; always at temperature 1.

    Attributes:
        max_new_tokens: limit of generated tokens a prompt.
        batch_size: prompts decoded together.
        seed: prompt i uses `seed + i`; the prompts of the check count on from those of the fit.
    """

    max_new_tokens: int = 256
    batch_size: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: expected at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collected:
    """Proposals of one set of prompts.

    Attributes:
        proposals: the blocks, with analytic accept rates.
        domains: domain of each block.
    """

    proposals: Proposals
    domains: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assessment:
    """Temperatures fitted on one set, and what they do on another.

    Attributes:
        temperatures: one a position.
        fitted_on, checked_on: proposals of either set.
        raw, calibrated: quality on the checking set without and with the temperatures.
        oracle: the same for a predictor that knows the analytic accept rates of that set.
        chance: calibration error that `calibrated` would show if its predictions were right.
        sweeps: calibrated thresholds replayed on the checking set, by domain and overall.
    """

    temperatures: tuple[float, ...]
    fitted_on: int
    checked_on: int
    raw: ConfidenceMetrics
    calibrated: ConfidenceMetrics
    oracle: ConfidenceMetrics | None
    chance: Float[np.ndarray, "G"]
    sweeps: dict[str, tuple[ThresholdPoint, ...]]


def split_prompts(prompts: Sequence[Prompt]) -> tuple[list[Prompt], list[Prompt]]:
    """Deal prompts alternately to fit and check; prompts with the same text stay together.

    Raises:
        ValueError: fewer than two different prompts.
    """
    half = {text: number % 2 for number, text in enumerate(dict.fromkeys(prompt.text for prompt in prompts))}
    if len(half) < 2:
        raise ValueError(
            f"calibration needs two different prompts at least, one to fit and one to check; found {len(half)}"
        )
    return [p for p in prompts if not half[p.text]], [p for p in prompts if half[p.text]]


def check_disjoint(fit: Sequence[Prompt], check: Sequence[Prompt]) -> None:
    """Refuse a check on prompts that were fitted on.

    Raises:
        ValueError: names the first such prompt.
    """
    known = {prompt.text: prompt.id for prompt in fit}
    shared = [(prompt.id, known[prompt.text]) for prompt in check if prompt.text in known]
    if shared:
        raise ValueError(
            f"{len(shared)} prompts of the check are prompts of the fit too, first {shared[0][0]} ({shared[0][1]}): "
            "the check must be on prompts that the fit has not seen"
        )


def without_temperatures(drafter: Drafter) -> Drafter:
    """The drafter with its confidences as trained.

    Raises:
        ValueError: it has no confidence head.
    """
    if not drafter.config.confidence_head or not isinstance(drafter.functions, DSparkFunctions):
        raise ValueError(f"drafter {drafter.name!r} ({drafter.config.name}) has no confidence head to calibrate")
    config = dataclasses.replace(drafter.config, confidence_temperatures=None)
    return dataclasses.replace(drafter, config=config, functions=dataclasses.replace(drafter.functions, config=config))


def collect(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    settings: Settings,
    *,
    first_seed: int | None = None,
    description: str = "collecting",
    console: Console | None = None,
) -> Collected:
    """Decode prompts at temperature 1 and keep every block with what became of it.

    Args:
        target: what verifies.
        drafter: with a confidence head; temperatures it holds are left aside.
        prompts: any number.
        settings: how to decode.
        first_seed: seed of the first prompt; None takes that of the settings.
        description: shown in front of the progress bar.
        console: where it goes; standard error by default.

    Raises:
        ValueError: the drafter has no confidence head, or every answer ended before a block was drafted.
    """
    raw = without_temperatures(drafter)
    with Progress(description, len(prompts), "answers", console=console) as progress:
        generations = generate(
            target,
            raw,
            [prompt.messages for prompt in prompts],
            max_new_tokens=settings.max_new_tokens,
            temperature=1.0,
            seed=settings.seed if first_seed is None else first_seed,
            batch_size=settings.batch_size,
            diagnostics=True,
            on_progress=lambda tokens, ended: progress.update(ended - progress.completed, tokens=tokens),
        )
    rounds = [r for generation in generations for r in generation.rounds]
    if not rounds:
        raise ValueError("no block was drafted, every answer ended at its first token: use other or more prompts")
    size = raw.config.block_size
    # Rates exist for verified positions only.
    padded = [[*(r.accept_rates or ()), *[math.nan] * size][:size] for r in rounds]
    return Collected(
        proposals=Proposals.from_rounds(
            np.array([r.confidence_logits for r in rounds]),
            np.array([r.proposed for r in rounds]),
            np.array([r.accepted for r in rounds]),
            np.array([r.stopped for r in rounds]),
            np.array(padded),
        ),
        domains=tuple(p.domain for p, g in zip(prompts, generations, strict=True) for _ in g.rounds),
    )


def assess(fit: Collected, check: Collected) -> Assessment:
    """Fit temperatures on one set and measure them on the other."""
    temperatures = fit_temperatures(fit.proposals)
    proposals, domains = check.proposals, np.array(check.domains)
    names = list(dict.fromkeys(check.domains))
    sweeps = {n: threshold_sweep(proposals.select(domains == n), THRESHOLDS, temperatures) for n in names}
    if len(names) > 1:
        sweeps[OVERALL] = threshold_sweep(proposals, THRESHOLDS, temperatures)
    return Assessment(
        temperatures=temperatures,
        fitted_on=len(fit.proposals),
        checked_on=len(proposals),
        raw=proposals.metrics(),
        calibrated=proposals.metrics(temperatures),
        oracle=proposals.oracle_metrics(),
        chance=chance_error(proposals, temperatures),
        sweeps=sweeps,
    )


def notes(assessment: Assessment) -> list[str]:
    """What the tables do not say."""
    a = assessment
    lines = [f"Fitted on {a.fitted_on:,} proposals, checked on {a.checked_on:,} others."]
    if min(a.fitted_on, a.checked_on) < ENOUGH:
        chance = f"{100 * np.nanmean(a.chance):.1f} %" if np.isfinite(a.chance).any() else "much"
        lines.append(
            f"Warning: fewer than {ENOUGH:,} proposals. The temperatures carry sampling noise, and of the calibration "
            f"error on this check about {chance} would be chance even if every prediction were right: use more prompts."
        )
    ends = [str(k) for k, t in enumerate(a.temperatures, 1) if t in (GRID[0], GRID[-1])]
    if ends:
        lines.append(
            f"Warning: the temperature of position {', '.join(ends)} is at the end of what is tried "
            f"({GRID[0]:g} to {GRID[-1]:g}): too few blocks survive there to fit it, or none mends the head."
        )
    return lines


def grids(assessment: Assessment) -> list[Grid]:
    """All tables of an assessment."""
    return [calibration_grid(assessment), ranking_grid(assessment), sweep_grid(assessment)]


def calibration_grid(assessment: Assessment) -> Grid:
    """Temperatures, predicted and observed survival, and calibration errors by position."""
    a = assessment
    columns = (
        a.raw.mean_observed,
        a.raw.mean_predicted,
        a.calibrated.mean_predicted,
        a.raw.ece,
        a.calibrated.ece,
        a.chance,
        *_oracle(a, "ece"),
    )
    note = (
        "Survival: share of the blocks accepted through position k. ECE: expected calibration error of the predicted "
        "survival over 20 bins. Chance: what the calibrated predictions would show if they were right. Oracle: the "
        "analytic accept rates in place of the head."
    )
    header = ("position", "temperature", "cases", "survival", "predicted raw", "predicted calibrated")
    header += ("ECE raw", "ECE calibrated", "ECE chance", *(("ECE oracle",) if a.oracle else ()))
    rows = tuple(
        (str(k + 1), f"{t:.3f}", f"{a.raw.count[k]:,}", *(_percent(c[k]) for c in columns))
        for k, t in enumerate(a.temperatures)
    )
    mean = ("mean", "", "", *(_percent(_mean(c)) for c in columns))
    return Grid("Calibration of the predicted survival", note, header, (rows, (mean,)))


def ranking_grid(assessment: Assessment) -> Grid:
    """AUROC and Brier score by position."""
    a = assessment
    columns = tuple(
        values
        for name in ("auroc", "brier")
        for values in (getattr(a.raw, name), getattr(a.calibrated, name), *_oracle(a, name))
    )
    kinds = ("raw", "calibrated", *(("oracle",) if a.oracle else ()))
    header = ("position", "temperature", *(f"{name} {kind}" for name in ("AUROC", "Brier") for kind in kinds))
    rows = tuple((str(k + 1), f"{t:.3f}", *(_number(c[k]) for c in columns)) for k, t in enumerate(a.temperatures))
    mean = ("mean", "", *(_number(_mean(c)) for c in columns))
    note = "AUROC: chance that a surviving block was predicted above one that did not survive. Brier: squared error."
    return Grid("Ranking and squared error", note, header, (rows, (mean,)))


def sweep_grid(assessment: Assessment) -> Grid:
    """Thresholds replayed."""
    sections = tuple(
        tuple(
            (name, f"{p.threshold:.1f}", f"{p.accepted:.2f}", f"{p.rejected:.2f}", _percent(p.acceptance))
            for p in points
        )
        for name, points in assessment.sweeps.items()
    )
    note = "Blocks cut at the first position whose calibrated confidence is below the threshold; draft tokens a step."
    return Grid("Thresholds", note, ("domain", "threshold", "accepted", "rejected", "acceptance"), sections)


def report(
    target: Target,
    drafter: Drafter,
    prompts: Mapping[str, Sequence[Prompt]],
    settings: Settings,
    assessment: Assessment,
) -> dict[str, Any]:
    """Everything that is known about a calibration, as plain values for `evaluation.report.write_report`.

    Args:
        target, drafter: what was run; `drafter` as loaded.
        prompts: by "fit" and "check".
        settings: how.
        assessment: the numbers.
    """
    a = assessment
    weights = {"params": target.params, "embed": target.tables.embed, "head": target.tables.head}
    qualities = {"raw": a.raw, "calibrated": a.calibrated, **({"oracle": a.oracle} if a.oracle else {})}
    return {
        "format": FORMAT,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "settings": {**dataclasses.asdict(settings), "temperature": 1.0, "dtype": jnp.dtype(target.dtype).name},
        "target": {"name": target.name, "fingerprint": fingerprint(weights)},
        "drafter": {
            "name": drafter.name,
            "kind": drafter.config.name,
            "block_size": drafter.config.block_size,
            "fingerprint": fingerprint(drafter.params),
            "temperatures_before": _list(drafter.config.confidence_temperatures),
        },
        "prompts": {
            name: {"count": len(some), "fingerprint": fingerprint([[p.domain, p.text] for p in some])}
            for name, some in prompts.items()
        },
        "proposals": {"fit": a.fitted_on, "check": a.checked_on},
        "temperatures": list(a.temperatures),
        "mean_ece": {**{n: _plain(_mean(m.ece)) for n, m in qualities.items()}, "chance": _plain(_mean(a.chance))},
        "chance_ece": _list(a.chance),
        "quality": {name: _quality(metrics) for name, metrics in qualities.items()},
        "thresholds": {
            name: [{**dataclasses.asdict(p), "acceptance": _plain(p.acceptance)} for p in points]
            for name, points in a.sweeps.items()
        },
    }


def _quality(metrics: ConfidenceMetrics) -> dict[str, Any]:
    return {field.name: _list(getattr(metrics, field.name)) for field in dataclasses.fields(metrics)}


def _oracle(assessment: Assessment, name: str) -> tuple[np.ndarray, ...]:
    return () if assessment.oracle is None else (getattr(assessment.oracle, name),)


def _mean(values: Float[np.ndarray, "G"]) -> float:
    """Mean over the positions where a number is defined."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else math.nan


def _list(values: Any) -> Any:
    """Nested lists with undefined numbers as None."""
    if values is None or np.ndim(values) == 0:
        return None if values is None else _plain(np.asarray(values).item())
    return [_list(value) for value in values]


def _plain(value: int | float) -> int | float | None:
    return value if math.isfinite(value) else None


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%" if math.isfinite(value) else _UNDEFINED


def _number(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else _UNDEFINED
