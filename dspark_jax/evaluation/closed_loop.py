"""One engine under a closed loop of requests, with a clock of its own that can be stopped."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import jax

from dspark_jax.engine.engine import Engine
from dspark_jax.engine.programs import PROGRAMS
from dspark_jax.engine.requests import Prompt
from dspark_jax.engine.results import Generation, Statistics
from dspark_jax.evaluation.lossless import Difference

_GOLDEN = (5**0.5 - 1) / 2
"""Multiples of it, modulo 1, fill the unit interval evenly."""


@dataclasses.dataclass(frozen=True)
class LoadSettings:
    """How load is made.

    Attributes:
        concurrency: requests in flight, one measurement each.
        requests: requests that finish in a measurement, as a multiple of the concurrency.
        least: requests that finish in a measurement at least: few of them are a matter of luck.
        max_new_tokens: of the requests, on average.
        spread: how far a request's own number of tokens may lie from that, as a share of it. Requests of one length end
            together and bring their prompts together, which no real load does.
        max_length: tokens a slot holds.
        temperature: of every request; request i uses seed i.
        repeats: interleaved repeats.
        profile_context: tokens in every slot while step costs are measured.
        chunk: prompt tokens of a step.
    """

    concurrency: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    requests: int = 3
    least: int = 18
    max_new_tokens: int = 64
    spread: float = 0.5
    max_length: int = 384
    temperature: float = 0.0
    repeats: int = 3
    profile_context: int = 128
    chunk: int = 64

    def budget(self, request: int) -> int:
        """Tokens of a request, the same for every system; any few in a row are spread evenly."""
        place = request * _GOLDEN % 1.0
        return max(1, round(self.max_new_tokens * (1 + self.spread * (2 * place - 1))))


@dataclasses.dataclass(frozen=True)
class LoadPoint:
    """One measurement.

    Attributes:
        system, concurrency, repeat: what was measured.
        tokens: committed while the clock ran.
        seconds: on the clock.
        request_rates: tokens a second of each finished request, from its first token to its last.
        budget: mean rows of a step for anchors and drafts.
        drafts, accepted: draft tokens verified and accepted.
        padding: share of rows that carried nothing.
        planning: share of the time the host spent planning and dispatching.
        compilations: programs compiled while the clock ran; anything but 0 spoils the measurement.
        prompt_steps: steps that carried a prompt chunk.
        compared: answers compared with the first system's; 0 where texts are sampled.
        differences: those that are not the same text.
    """

    system: str
    concurrency: int
    repeat: int
    tokens: int
    seconds: float
    request_rates: tuple[float, ...]
    budget: float
    drafts: int
    accepted: int
    padding: float
    planning: float
    compilations: int
    prompt_steps: int
    compared: int = 0
    differences: tuple[Difference, ...] = ()

    @property
    def throughput(self) -> float:
        """Tokens a second of all requests together."""
        return self.tokens / self.seconds


class ClosedLoop:
    """A measurement under way: every finished request is replaced at once, so always as many are in flight.

    Attributes:
        answers: of the finished requests, by number of submission.
    """

    def __init__(self, engine: Engine, prompts: Sequence[Prompt], settings: LoadSettings):
        """Submit the first requests; the clock stands.

        Args:
            engine: idle and warmed up; as many requests as it has slots are in flight.
            prompts: taken in turn.
            settings: how.
        """
        self._engine, self._prompts, self._settings = engine, prompts, settings
        self._goal = max(settings.requests * engine.steps.slots, settings.least)
        self._before, self._submitted, self._tokens, self._compilations = engine.submitted, 0, 0, 0
        self._seconds, self._started = 0.0, 0.0
        self._first: dict[int, float] = {}
        self._rates: list[float] = []
        self.answers: dict[int, Generation] = {}
        engine.statistics = Statistics()
        for _ in range(engine.steps.slots):
            self._submit()

    def run(self, share: float) -> None:
        """Go on until this share of all requests has finished, and wait for what is on its way."""
        engine, compiled = self._engine, PROGRAMS.count
        self._started = time.perf_counter()
        while len(self._rates) < share * self._goal:
            for event in engine.step():
                self._tokens += len(event.tokens)
                now = self._seconds + time.perf_counter() - self._started
                first = self._first.setdefault(event.request, now)
                if event.finish_reason is not None:
                    self.answers[event.request - self._before] = answer = engine.take(event.request)
                    self._rates.append((len(answer.tokens) - 1) / max(now - first, 1e-9))
                    self._submit()
        jax.block_until_ready((engine.slots, engine.memory))
        self._seconds += time.perf_counter() - self._started
        self._compilations += PROGRAMS.count - compiled

    def finish(self, system: str, repeat: int) -> LoadPoint:
        """The measurement; requests that still run are cancelled."""
        engine, s = self._engine, self._engine.statistics
        # Taken before the rest is cancelled: what runs until then is not on the clock.
        point = LoadPoint(
            system=system,
            concurrency=engine.steps.slots,
            repeat=repeat,
            tokens=self._tokens,
            seconds=self._seconds,
            request_rates=tuple(self._rates),
            budget=s.verify_budget / max(s.verify_steps, 1),
            drafts=s.drafts,
            accepted=s.accepted,
            padding=s.padding,
            planning=s.plan_seconds / self._seconds,
            compilations=self._compilations,
            prompt_steps=s.prompt_steps,
        )
        for request in [r for r in engine.requests if r is not None] + list(engine.queue):
            engine.cancel(request.id)
        for _ in engine.stream():
            pass
        for number in list(engine.results):
            engine.take(number)
        return point

    def _submit(self) -> None:
        number = self._submitted
        self._engine.submit(
            self._prompts[number % len(self._prompts)],
            max_new_tokens=self._settings.budget(number),
            temperature=self._settings.temperature,
            seed=number,
        )
        self._submitted += 1
