"""Closed-loop load: a fixed number of requests in flight, systems side by side (the paper's Figures 7 and 8).

Every finished request is replaced at once, so the engine always serves the same number. Systems take turns of a second
or two inside every repeat: a machine that slows down or speeds up meets all of them alike.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax import buckets
from dspark_jax.draft.contract import Drafter
from dspark_jax.engine.engine import Engine
from dspark_jax.engine.profile import StepProfile, measure_profile
from dspark_jax.engine.requests import Prompt
from dspark_jax.engine.results import Generation
from dspark_jax.evaluation.closed_loop import ClosedLoop, LoadPoint, LoadSettings
from dspark_jax.evaluation.lossless import NEAR_TIE_LOAD, Difference, LosslessCheck, find_difference
from dspark_jax.evaluation.tables import Grid
from dspark_jax.sampling import GREEDY_TEMPERATURE
from dspark_jax.spec.schedule import Fixed, NoDraft, Policy, Scheduled
from dspark_jax.target.loading import Target

TURNS = 12
"""Of every system inside a repeat; each finishes its share of the requests."""


@dataclasses.dataclass(frozen=True)
class ServingSystem:
    """A drafter and how much of its blocks is verified.

    Attributes:
        name: shown in tables.
        drafter: None for plain decoding.
        policy: None stands for `scheduled`, whose curve is measured for every concurrency.
    """

    name: str
    drafter: Drafter | None
    policy: Policy | None


@dataclasses.dataclass(frozen=True)
class Load:
    """A measured load.

    Attributes:
        points: all measurements.
        profiles: step costs by concurrency, of the system that schedules by them.
    """

    points: tuple[LoadPoint, ...] = ()
    profiles: dict[int, StepProfile] = dataclasses.field(default_factory=dict)

    def __add__(self, other: Load) -> Load:
        """Both, of different concurrencies."""
        return Load(self.points + other.points, self.profiles | other.profiles)

    def finished(self, measurements: int) -> Load:
        """Without the concurrencies that have fewer measurements."""
        count = Counter(p.concurrency for p in self.points)
        keep = {c for c in self.profiles if count[c] >= measurements}
        points = tuple(p for p in self.points if p.concurrency in keep)
        return Load(points, {c: profile for c, profile in self.profiles.items() if c in keep})

    @property
    def lossless(self) -> LosslessCheck:
        """The comparison of greedy texts with the first system's."""
        compared = sum(p.compared for p in self.points)
        differences = tuple(d for p in self.points for d in p.differences)
        return LosslessCheck(compared > 0, NEAR_TIE_LOAD, compared, differences)


def measure_load(
    target: Target,
    systems: Sequence[ServingSystem],
    prompts: Sequence[Prompt],
    settings: LoadSettings,
    concurrency: int,
    *,
    on_progress: Callable[[str], None] | None = None,
) -> Iterator[Load]:
    """Measure all systems at one concurrency.

    Args:
        target: the model that is served.
        systems: with distinct names.
        prompts: taken in turn.
        settings: how.
        concurrency: requests in flight.
        on_progress: called with a description whenever something new begins.

    Yields:
        What has been measured so far, after every repeat. Greedy texts are compared with those of the first system.

    Raises:
        ValueError: no prompts, systems that share a name, or a spread that is not a share.
    """
    names = [system.name for system in systems]
    if not prompts or len(set(names)) < len(names):
        raise ValueError(f"expected prompts and systems with distinct names, found {len(prompts)} and {names}")
    if not 0 <= settings.spread <= 1:
        raise ValueError(f"requests' lengths spread by {settings.spread}: expected a share from 0 to 1")
    say = on_progress or (lambda what: None)
    engines: dict[str, Engine] = {}
    load = Load()
    for system in systems:
        say(f"{concurrency} in flight: {system.name}, compiling and profiling")
        engines[system.name], profile = _engine(target, system, settings, concurrency)
        if profile is not None:
            load.profiles[concurrency] = profile
    for system in systems:
        # Off the record: the first lap of a system is slower than the others.
        lap = ClosedLoop(engines[system.name], prompts, dataclasses.replace(settings, requests=1, least=1))
        lap.run(1.0)
        lap.finish(system.name, -1)
    first: dict[int, Generation] = {}
    for repeat in range(settings.repeats):
        loops = {system.name: ClosedLoop(engines[system.name], prompts, settings) for system in systems}
        for turn in range(TURNS):
            say(f"{concurrency} in flight, repeat {repeat + 1} of {settings.repeats}, turn {turn + 1} of {TURNS}")
            for loop in loops.values():
                loop.run((turn + 1) / TURNS)
        for name, loop in loops.items():
            point = loop.finish(name, repeat)
            if name == systems[0].name:
                first |= loop.answers
            elif settings.temperature < GREEDY_TEMPERATURE:
                both = sorted(loop.answers.keys() & first.keys())
                found = (find_difference(name, str(i), first[i], loop.answers[i]) for i in both)
                differences = tuple(d for d in found if d is not None)
                point = dataclasses.replace(point, compared=len(both), differences=differences)
            load = dataclasses.replace(load, points=(*load.points, point))
        yield load


def _engine(
    target: Target, system: ServingSystem, settings: LoadSettings, concurrency: int
) -> tuple[Engine, StepProfile | None]:
    """A system's engine, warmed up, and the profile it was given where it schedules."""
    block = 0 if system.drafter is None else system.drafter.config.block_size
    policy, profile = system.policy, None
    if policy is None:
        assert system.drafter is not None  # only drafts are scheduled
        profile = measure_profile(
            target,
            system.drafter,
            slots=concurrency,
            context=settings.profile_context,
            ladder=_ladder(Scheduled(), concurrency, block),
            max_length=settings.max_length,
            chunk=settings.chunk,
        )
        policy = profile.policy
    engine = Engine(
        target,
        system.drafter,
        slots=concurrency,
        max_length=settings.max_length,
        policy=policy,
        row_ladder=_ladder(policy, concurrency, block),
        chunk_ladder=(settings.chunk,),
    )
    engine.warm_up(("greedy",) if settings.temperature < GREEDY_TEMPERATURE else ("plain",))
    return engine, profile


def _ladder(policy: Policy, concurrency: int, block: int = 0) -> tuple[int, ...]:
    """Rows that steps of a closed loop are padded to: all slots are busy but for the first and last moments.

    What verifies a fixed number of rows needs few programs; the scheduler wants a fine ladder.
    """
    if isinstance(policy, NoDraft):
        return tuple(sorted({max(1, concurrency // 2), concurrency}))
    if isinstance(policy, Fixed):
        return tuple(sorted({max(1, concurrency * (policy.k + 1) // 2), concurrency * (policy.k + 1)}))
    fine = buckets.rungs(concurrency * (block + 1), first=concurrency, ratio=1.25)
    return tuple(sorted({max(1, concurrency // 2), *fine}))


@dataclasses.dataclass(frozen=True)
class LoadRow:
    """A system at one concurrency, over all repeats.

    Attributes:
        system, concurrency: what was measured.
        throughput: median of the repeats, tokens a second, with the smallest and the largest.
        user, user_p10: median and 10th percentile of the requests' own tokens a second.
        budget, padding, planning: means of the repeats.
        accepted_per_verified: accepted drafts per verified draft; NaN without drafts.
        compilations: of all repeats.
    """

    system: str
    concurrency: int
    throughput: float
    lowest: float
    highest: float
    user: float
    user_p10: float
    budget: float
    padding: float
    planning: float
    accepted_per_verified: float
    compilations: int


def summarize_load(points: Sequence[LoadPoint]) -> list[LoadRow]:
    """One row a system and concurrency, by concurrency, systems in the order of measurement."""
    rows = []
    found = dict.fromkeys((p.concurrency, p.system) for p in points)
    for concurrency, system in sorted(found, key=lambda key: key[0]):
        some = [p for p in points if (p.concurrency, p.system) == (concurrency, system)]
        rates = np.concatenate([p.request_rates for p in some])
        throughput = np.array([p.throughput for p in some])
        drafts = sum(p.drafts for p in some)
        rows.append(
            LoadRow(
                system=system,
                concurrency=concurrency,
                throughput=float(np.median(throughput)),
                lowest=float(throughput.min()),
                highest=float(throughput.max()),
                user=float(np.median(rates)),
                user_p10=float(np.quantile(rates, 0.1)),
                budget=float(np.mean([p.budget for p in some])),
                padding=float(np.mean([p.padding for p in some])),
                planning=float(np.mean([p.planning for p in some])),
                accepted_per_verified=sum(p.accepted for p in some) / drafts if drafts else float("nan"),
                compilations=sum(p.compilations for p in some),
            )
        )
    return rows


def best_other_ratio(points: Sequence[LoadPoint], system: str, others: Sequence[str]) -> dict[int, np.ndarray]:
    """Throughput of a system over that of the best of the others, by concurrency, one value a repeat.

    Both come from the same repeat, minutes apart at most. The best of the others is the best by median, not the one
    that was lucky in that repeat.
    """
    ratios: dict[int, np.ndarray] = {}
    for concurrency in dict.fromkeys(p.concurrency for p in points):
        of = {
            name: np.array([p.throughput for p in points if (p.concurrency, p.system) == (concurrency, name)])
            for name in (system, *others)
        }
        best = max(others, key=lambda name: float(np.median(of[name])))
        ratios[concurrency] = of[system] / of[best]
    return ratios


def matched_ratio(rows: Sequence[LoadRow], system: str, baseline: str) -> list[tuple[float, float]]:
    """Aggregate throughput of a system over a baseline's at equal speed for the user.

    Both frontiers (user's tokens a second, aggregate tokens a second) are interpolated linearly; speeds that only one
    of them reaches are left out.

    Returns:
        (user's tokens a second, ratio) at the measured speeds of either where both frontiers reach.
    """

    def frontier(name: str) -> tuple[np.ndarray, np.ndarray]:
        found = sorted((r.user, r.throughput) for r in rows if r.system == name)
        return np.array([x for x, _ in found]), np.array([y for _, y in found])

    (x, y), (base_x, base_y) = frontier(system), frontier(baseline)
    if not len(x) or not len(base_x):
        return []
    low, high = max(x.min(), base_x.min()), min(x.max(), base_x.max())
    speeds = sorted({float(v) for v in (*x, *base_x) if low <= v <= high})
    return [(v, float(np.interp(v, x, y) / np.interp(v, base_x, base_y))) for v in speeds]


def load_grid(rows: Sequence[LoadRow]) -> Grid:
    """The table of a load benchmark."""
    sections: dict[int, list[tuple[str, ...]]] = {}
    for r in rows:
        cells = (
            str(r.concurrency),
            r.system,
            f"{r.throughput:.1f}",
            f"{r.lowest:.1f} to {r.highest:.1f}",
            f"{r.user:.1f}",
            f"{r.user_p10:.1f}",
            f"{r.budget:.1f}",
            "–" if np.isnan(r.accepted_per_verified) else f"{r.accepted_per_verified:.2f}",
            f"{100 * r.padding:.0f} %",
            f"{100 * r.planning:.1f} %",
            str(r.compilations),
        )
        sections.setdefault(r.concurrency, []).append(cells)
    return Grid(
        title="Load",
        note="Tokens a second of all requests (median of interleaved repeats, and range) and of single requests.",
        header=(
            "in flight", "system", "tokens/s", "range", "request median", "request p10", "rows a step",
            "accepted per verified", "padding", "planning", "compiled",
        ),
        sections=tuple(tuple(section) for section in sections.values()),
    )  # fmt: skip


def load_from_report(content: dict[str, Any], path: Path) -> Load:
    """What `load_report` made into plain values; `path` is named in errors.

    Raises:
        ValueError: other content.
    """
    if not {"points", "profiles"} <= set(content):
        raise ValueError(f"{path} is no measured load: expected what `bench serve --output` writes")
    points = []
    for values in content["points"]:
        differences = tuple(Difference(**d) for d in values["differences"])
        points.append(
            LoadPoint(**{**values, "request_rates": tuple(values["request_rates"]), "differences": differences})
        )
    return Load(tuple(points), {int(c): StepProfile.from_json(p, path) for c, p in content["profiles"].items()})


def load_report(load: Load, settings: LoadSettings) -> dict[str, Any]:
    """Everything measured, as plain values."""
    return {
        "settings": dataclasses.asdict(settings),
        "rows": [dataclasses.asdict(r) for r in summarize_load(load.points)],
        "lossless": load.lossless.statement(),
        "points": [dataclasses.asdict(p) for p in load.points],
        "profiles": {str(c): dataclasses.asdict(p) for c, p in load.profiles.items()},
    }
