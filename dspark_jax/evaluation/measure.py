"""Decode the same prompts plainly and with every drafter, side by side.

Speed-ups are ratios of rates from one run: every batch is decoded plainly first and then by each drafter before the
next batch begins, so that a machine that slows down or speeds up meets all systems alike. Compilation is excluded and
prefill is kept apart by the engine's own clock.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from rich.console import Console

from dspark_jax.draft.contract import Drafter
from dspark_jax.engine.generate import generate
from dspark_jax.engine.results import Generation
from dspark_jax.evaluation.tasks import Prompt
from dspark_jax.progress import Progress
from dspark_jax.target.loading import Target

PLAIN = "plain"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How prompts are decoded.

    Attributes:
        max_new_tokens: limit of generated tokens a prompt.
        temperature: 0 decodes greedily.
        batch_size: prompts decoded together; 1 measures latency.
        block_size: draft tokens a round; None takes each drafter's trained size.
        confidence_threshold: verify only up to the first token predicted below this; drafters without a confidence
            head verify whole blocks.
        seed: prompt i of the run uses `seed + i`, whatever the batch size.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    batch_size: int = 1
    block_size: int | None = None
    confidence_threshold: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: expected at least 1")
        if self.temperature < 0:
            raise ValueError(f"temperature is {self.temperature}: expected 0 (greedy) or more")
        if not 0 <= self.confidence_threshold <= 1:
            raise ValueError(f"confidence_threshold is {self.confidence_threshold}: expected a probability in [0, 1]")

    @property
    def greedy(self) -> bool:
        """Whether outputs are deterministic; the engine takes temperatures below 1e-5 as 0."""
        return self.temperature < 1e-5


@dataclasses.dataclass(frozen=True)
class System:
    """One way of decoding: plainly, or with a drafter.

    Attributes:
        name: shown in tables.
        drafter: None for plain decoding.
        block_size: draft tokens a round; 0 for plain decoding.
        confidence_threshold: 0 where it does not apply.
    """

    name: str
    drafter: Drafter | None
    block_size: int
    confidence_threshold: float


@dataclasses.dataclass(frozen=True)
class Sample:
    """One prompt decoded by one system.

    Attributes:
        prompt: what was asked.
        batch: number of the batch it ran in; its neighbours there share `generation.timings`.
        generation: what came out.
    """

    prompt: Prompt
    batch: int
    generation: Generation


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Everything that was decoded.

    Attributes:
        settings: how.
        systems: plain decoding first, then the drafters in the order given.
        samples: by system name, prompts in one order for all systems.
    """

    settings: Settings
    systems: tuple[System, ...]
    samples: dict[str, list[Sample]]

    @property
    def drafters(self) -> tuple[System, ...]:
        """The systems that draft."""
        return self.systems[1:]

    @property
    def domains(self) -> tuple[str, ...]:
        """Domains in the order of the prompts."""
        return tuple(dict.fromkeys(sample.prompt.domain for sample in self.samples[PLAIN]))


def measure(
    target: Target,
    drafters: Sequence[Drafter],
    prompts: Sequence[Prompt],
    settings: Settings,
    *,
    console: Console | None = None,
) -> Measurement:
    """Decode every prompt plainly and with every drafter.

    Args:
        target: the model whose text is measured.
        drafters: any number, with distinct names.
        prompts: those of one domain together.
        settings: how to decode.
        console: where the progress bar goes; standard error by default.

    Raises:
        ValueError: no prompts, or drafters that share a name.
    """
    if not prompts:
        raise ValueError("there are no prompts to measure on")
    systems = (System(PLAIN, None, 0, 0.0), *(_system(drafter, settings) for drafter in drafters))
    names = [system.name for system in systems]
    if len(set(names)) < len(names):
        raise ValueError(f"drafters must have distinct names, none of them {PLAIN!r}; found {names[1:]}")
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    with Progress("decoding", len(prompts) * len(systems), "answers", console=console) as progress:
        for number, (first, batch) in enumerate(batches(prompts, settings.batch_size)):
            for system in systems:
                watch = _Watch(progress, system.name, len(batch), settings.max_new_tokens)
                generations = generate(
                    target,
                    system.drafter,
                    [prompt.messages for prompt in batch],
                    max_new_tokens=settings.max_new_tokens,
                    temperature=settings.temperature,
                    seed=settings.seed + first,
                    confidence_threshold=system.confidence_threshold,
                    block_size=system.block_size or None,
                    batch_size=settings.batch_size,
                    on_progress=watch,
                )
                watch.finish()
                samples[system.name] += [Sample(p, number, g) for p, g in zip(batch, generations, strict=True)]
    return Measurement(settings, systems, samples)


def batches(prompts: Sequence[Prompt], size: int) -> Iterator[tuple[int, Sequence[Prompt]]]:
    """Cut prompts into batches of one domain each, as a batch's seconds cannot be shared out between domains.

    Yields:
        The position of a batch's first prompt among all prompts, and the batch.

    Example: with size 2, three math prompts and one code prompt give [m, m], [m], [c].
    """
    start = 0
    while start < len(prompts):
        stop = start + 1
        while stop < len(prompts) and stop - start < size and prompts[stop].domain == prompts[start].domain:
            stop += 1
        yield start, prompts[start:stop]
        start = stop


def _system(drafter: Drafter, settings: Settings) -> System:
    return System(
        name=drafter.name,
        drafter=drafter,
        block_size=settings.block_size or drafter.config.block_size,
        confidence_threshold=settings.confidence_threshold if drafter.config.confidence_head else 0.0,
    )


class _Watch:
    """Turns emitted tokens into fractions of answers; an answer that stops early jumps to a whole one."""

    def __init__(self, progress: Progress, system: str, prompts: int, max_new_tokens: int):
        self._progress, self._system = progress, system
        self._prompts, self._limit = prompts, max_new_tokens
        self._shown = 0.0

    def __call__(self, emitted: int, finished: int) -> None:
        # Tenths: a bar that counts 3.14159 answers reads badly.
        self._advance(max(float(finished), int(10 * emitted / self._limit) / 10))

    def finish(self) -> None:
        self._advance(float(self._prompts))

    def _advance(self, done: float) -> None:
        self._progress.update(max(done - self._shown, 0.0), by=self._system)
        self._shown = max(done, self._shown)
