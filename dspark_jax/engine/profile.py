"""What a step costs on this machine: the curve that hardware-aware scheduling needs (SPEC §9)."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.draft.contract import Drafter
from dspark_jax.engine.engine import Engine
from dspark_jax.engine.prompts import empty_chunk
from dspark_jax.engine.state import Draft, Report, Slots
from dspark_jax.files import atomic_write, fingerprint
from dspark_jax.spec.schedule import CostCurve, Fixed, Scheduled
from dspark_jax.target.loading import Target


@dataclasses.dataclass(frozen=True)
class StepProfile:
    """Median seconds of the engine's programs for one target, drafter and number of slots.

    Attributes:
        device, jax: kind of device and version it was measured on.
        date: when.
        target, drafter: fingerprints of the weights.
        slots: slots of the engine.
        context: tokens that every slot held.
        rows: rows of a step.
        step: seconds of a step that verifies drafts, by `rows`: target, verification, drafter's context.
        plain: seconds of a step without drafts, by those of `rows` that hold one anchor a slot at most.
        propose: seconds of drafting.
        chunk: tokens of a prompt chunk.
        prompt: seconds of a step that runs such a chunk and nothing else.
        mixed: seconds of a step that runs such a chunk beside as many anchors as the last of `plain` has.
    """

    device: str
    jax: str
    date: str
    target: str
    drafter: str
    slots: int
    context: int
    rows: tuple[int, ...]
    step: tuple[float, ...]
    plain: tuple[float, ...]
    propose: float
    chunk: int
    prompt: float
    mixed: float

    @property
    def curve(self) -> CostCurve:
        """Seconds of a whole round, drafting included."""
        return CostCurve.monotone(self.rows, [self.propose + s for s in self.step])

    @property
    def plain_curve(self) -> CostCurve:
        """Seconds of a round that drafts nothing."""
        return CostCurve.monotone(self.rows[: len(self.plain)], self.plain)

    @property
    def prompt_token(self) -> float:
        """Seconds that a token of a prompt adds to a step; nearly the same whatever the step verifies."""
        return max(self.mixed - self.plain[-1], 0.0) / self.chunk

    @property
    def policy(self) -> Scheduled:
        """Policy `scheduled` under these costs."""
        return Scheduled(self.curve, self.plain_curve)

    def save(self, path: str | Path) -> None:
        """Write JSON, atomically."""
        with atomic_write(path, "w") as file:
            json.dump(dataclasses.asdict(self), file, indent=2)

    @classmethod
    def load(cls, path: str | Path, target: Target, drafter: Drafter, *, force: bool = False) -> StepProfile:
        """Read a profile and check that it was made here, for these models.

        Args:
            path: JSON file.
            target, drafter: what it will be used for.
            force: take it although it was made elsewhere or for other models.

        Raises:
            FileNotFoundError: no such file.
            ValueError: unreadable, or made elsewhere.
        """
        path = Path(path)
        if not path.exists():
            raise FileNotFoundError(f"there is no profile {path}: make one with `python -m dspark_jax.profile`")
        profile = cls.from_json(json.loads(path.read_text()), path)
        here = {**_machine(), "target": _target_fingerprint(target), "drafter": fingerprint(drafter.params)}
        wrong = [f"{k} {getattr(profile, k)!r} (here: {v!r})" for k, v in here.items() if getattr(profile, k) != v]
        if wrong and not force:
            raise ValueError(
                f"{path} was measured elsewhere: {'; '.join(wrong)}. Make a profile here with "
                "`python -m dspark_jax.profile`, or force it"
            )
        return profile

    @classmethod
    def from_json(cls, content: Mapping[str, Any], path: Path) -> StepProfile:
        """What `save` wrote, or `bench serve`; `path` is named in errors.

        Raises:
            ValueError: other content.
        """
        names = {f.name for f in dataclasses.fields(cls)}
        if set(content) != names:
            raise ValueError(f"{path} has keys {sorted(content)}, a step profile has {sorted(names)}")
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in content.items()}
        return cls(**values)


def measure_profile(
    target: Target,
    drafter: Drafter,
    *,
    slots: int,
    context: int,
    repeats: int = 7,
    ladder: tuple[int, ...] | None = None,
    max_length: int | None = None,
    chunk: int = 64,
    on_progress: Callable[[int, int], None] | None = None,
) -> StepProfile:
    """Time the engine's own programs on slots that hold `context` tokens each.

    Args:
        target, drafter: the models.
        slots: slots of the engine the profile is for.
        context: tokens in every slot.
        repeats: timed laps over all programs; the median counts.
        ladder: rows to measure; None takes the engine's default.
        max_length: tokens a slot of that engine holds, which dense attention pays for; None takes what `context` needs.
        chunk: tokens of a prompt chunk to measure.
        on_progress: called with (runs made, runs in all).

    Returns:
        The profile.

    Raises:
        ValueError: a context that the target does not have.
    """
    block = drafter.config.block_size
    if not 1 <= context < target.config.max_position - block:
        raise ValueError(f"context is {context}: the target has positions 1..{target.config.max_position - block - 1}")
    length = max(max_length or 0, context + block + 1)
    engine = Engine(
        target, drafter, slots=slots, max_length=length, policy=Fixed(block), row_ladder=ladder, chunk_ladder=(chunk,)
    )
    bench = _Bench(engine, context)
    plain_rows = [r for r in engine.row_ladder if r <= engine.plain_rows]
    programs: dict[Any, Callable[[], float]] = {
        "propose": bench.propose(),
        **{("step", rows): bench.step(rows, drafted=True) for rows in engine.row_ladder},
        **{("plain", rows): bench.step(rows, drafted=False) for rows in plain_rows},
        "prompt": bench.prompt(chunk, 0),
        "mixed": bench.prompt(chunk, plain_rows[-1]),
    }
    seconds = _medians(programs, repeats, on_progress)
    return StepProfile(
        **_machine(),
        date=str(date.today()),
        target=_target_fingerprint(target),
        drafter=fingerprint(drafter.params),
        slots=slots,
        context=context,
        rows=engine.row_ladder,
        step=tuple(seconds["step", rows] for rows in engine.row_ladder),
        plain=tuple(seconds["plain", rows] for rows in plain_rows),
        propose=seconds["propose"],
        chunk=chunk,
        prompt=seconds["prompt"],
        mixed=seconds["mixed"],
    )


def _medians(
    programs: Mapping[Any, Callable[[], float]], repeats: int, on_progress: Callable[[int, int], None] | None
) -> dict[Any, float]:
    """Median seconds of each program; they take turns, so that a machine's moods hit all alike."""
    times: dict[Any, list[float]] = {name: [] for name in programs}
    total = (repeats + 1) * len(programs)
    for lap in range(repeats + 1):
        for i, (name, run) in enumerate(programs.items()):
            times[name].append(run())
            if on_progress is not None:
                on_progress(lap * len(programs) + i + 1, total)
    # The first lap compiles.
    return {name: float(np.median(values[1:])) for name, values in times.items()}


class _Bench:
    """Single programs of an engine, to be run over and over at the same place; each run returns its seconds."""

    def __init__(self, engine: Engine, context: int):
        self.engine = engine
        count = engine.steps.slots
        self.slots = dataclasses.replace(
            engine.slots,
            lengths=jnp.full((count,), context, jnp.int32),
            budgets=jnp.full((count,), 1 << 20, jnp.int32),
            done=jnp.zeros((count,), bool),
        )

    def propose(self) -> Callable[[], float]:
        """Draft in every slot."""
        engine = self.engine

        def call() -> Draft:
            engine.memory, draft = engine.programs.propose(self.slots, engine.memory, "greedy", 0)
            return draft

        self.draft = call()
        return self._timed(lambda: None, lambda _: call())

    def step(self, rows: int, *, drafted: bool) -> Callable[[], float]:
        """Run a step of so many rows, with drafts or without."""
        engine, count, limit = self.engine, self.engine.steps.slots, self.engine.steps.limit
        running = np.arange(count) < rows  # every slot takes its anchor first
        spare = max(rows - count, 0)
        keep = np.clip(spare - limit * np.arange(count), 0, limit)
        draft = dataclasses.replace(self.draft, keep=jnp.asarray(keep, jnp.int32)) if drafted else None
        slots = dataclasses.replace(self.slots, done=jnp.asarray(~running))

        def call(fresh: Slots) -> Report:
            _, engine.memory, report = engine.programs.step(fresh, engine.memory, "greedy", draft, None, rows)
            return report

        # The program takes the slots' buffers: every call gets a copy.
        return self._timed(lambda: jax.tree.map(jnp.copy, slots), call)

    def prompt(self, width: int, rows: int) -> Callable[[], float]:
        """Run a prompt chunk of so many tokens in the last slot, beside so many rows for the anchors of the others."""
        engine = self.engine
        chunk = empty_chunk(engine.chunk_ladder, width, engine.steps.slots)
        count, segment = chunk.tokens.shape
        fields: dict[str, Any] = {
            "slots": np.full(count, engine.steps.slots - 1, np.int32),
            "starts": segment * np.arange(count, dtype=np.int32),
            "counts": np.full(count, segment, np.int32),
        }
        chunk = dataclasses.replace(chunk, **fields)
        slots = dataclasses.replace(self.slots, done=self.slots.done.at[-1].set(True))

        def call(fresh: Slots) -> Report:
            _, engine.memory, report = engine.programs.step(fresh, engine.memory, "greedy", None, chunk, rows)
            return report

        return self._timed(lambda: jax.tree.map(jnp.copy, slots), call)

    def _timed(self, prepare: Callable[[], Any], call: Callable[[Any], Any]) -> Callable[[], float]:
        def run() -> float:
            argument = jax.block_until_ready(prepare())
            started = time.perf_counter()
            jax.block_until_ready((call(argument), self.engine.memory))
            return time.perf_counter() - started

        return run


def _machine() -> dict[str, str]:
    return {"device": jax.devices()[0].device_kind, "jax": jax.__version__}


def _target_fingerprint(target: Target) -> str:
    return fingerprint({"params": target.params, "embed": target.tables.embed})
