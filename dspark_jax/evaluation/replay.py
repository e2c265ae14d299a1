"""Replay recorded acceptance under a cost curve: what scheduling would gain on hardware that is not at hand.

A trace holds, for one answer, what the drafter predicted of every block and how much of the whole block was accepted.
The replay walks many traces at once through the scheduler's own functions and adds up the seconds that a cost curve
(measured here, or written down for another machine) says. Blocks keep their order; that a shorter verification would
have moved the borders of later blocks is neglected. Prompts count where their cost is given, as steps of their own.
"""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Float, Int

from dspark_jax.draft.contract import Drafter
from dspark_jax.engine.generate import generate
from dspark_jax.engine.requests import Prompt
from dspark_jax.engine.scheduling import Scheduling
from dspark_jax.files import atomic_write
from dspark_jax.spec.schedule import (
    CostCurve,
    Fixed,
    Greedy,
    NoDraft,
    Policy,
    Scheduled,
    Threshold,
    fill_capacity,
    greedy_lengths,
)
from dspark_jax.target.loading import Target

LAG = 2
"""Steps between a confidence and the plan that may use it, as in the engine."""


@dataclasses.dataclass(frozen=True)
class Trace:
    """Blocks of one answer.

    Attributes:
        confidence: predicted conditional accept rate of every draft token, `[N, G]`.
        accepted: leading draft tokens of the whole block that were accepted, `[N]`.
    """

    confidence: Float[np.ndarray, "N G"]
    accepted: Int[np.ndarray, "N"]

    @property
    def survival(self) -> Float[np.ndarray, "N G"]:
        """Predicted probability that a draft token is reached and accepted."""
        return np.cumprod(self.confidence, axis=1)


@dataclasses.dataclass(frozen=True)
class PromptCost:
    """What the prompts of a load cost.

    Attributes:
        seconds: to run one request's prompt.
        tokens: of one request's answer.
    """

    seconds: float
    tokens: float


@dataclasses.dataclass(frozen=True)
class ReplayPoint:
    """Outcome of a replay.

    Attributes:
        policy: what decided.
        concurrency: requests in flight.
        throughput: tokens a second of all requests.
        user: tokens a second of one request, on average.
        budget: mean rows of a step.
        accepted_per_verified: NaN where nothing was verified.
    """

    policy: str
    concurrency: int
    throughput: float
    user: float
    budget: float
    accepted_per_verified: float


def record_traces(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    seed: int = 0,
    batch_size: int = 16,
) -> list[Trace]:
    """Decode prompts with whole blocks verified and keep what was predicted and what happened.

    Raises:
        ValueError: the drafter has no confidence head, or no answer has a round.
    """
    if not drafter.config.confidence_head:
        raise ValueError(f"drafter {drafter.name!r} has no confidence head: there is nothing to schedule by")
    answers = generate(
        target,
        drafter,
        prompts,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        batch_size=batch_size,
    )
    traces = [
        Trace(
            confidence=np.array([r.confidences for r in answer.rounds], np.float64),
            accepted=np.array([r.accepted_raw for r in answer.rounds], np.int32),
        )
        for answer in answers
        if answer.rounds
    ]
    if not traces:
        raise ValueError(f"none of {len(prompts)} answers has a round: raise max_new_tokens")
    return traces


def save_traces(traces: Sequence[Trace], path: str | Path) -> None:
    """Write traces as JSON, atomically."""
    content = [{"confidence": t.confidence.tolist(), "accepted": t.accepted.tolist()} for t in traces]
    with atomic_write(path, "w") as file:
        json.dump(content, file)


def load_traces(path: str | Path) -> list[Trace]:
    """Read what `save_traces` wrote.

    Raises:
        FileNotFoundError: no such file.
        ValueError: other content.
    """
    if not Path(path).exists():
        raise FileNotFoundError(f"there are no traces at {path}: record them with `bench serve --traces`")
    content = json.loads(Path(path).read_text())
    try:
        return [Trace(np.array(t["confidence"], np.float64), np.array(t["accepted"], np.int32)) for t in content]
    except (TypeError, KeyError, IndexError) as error:
        raise ValueError(f"{path} holds no traces: expected a list of {{confidence, accepted}}") from error


def replay(
    traces: Sequence[Trace],
    policy: Policy,
    curve: CostCurve,
    plain: CostCurve,
    *,
    concurrency: int,
    prompt: PromptCost | None = None,
    steps: int = 400,
    seed: int = 0,
) -> ReplayPoint:
    """Walk traces through a policy.

    Args:
        traces: recorded blocks; each request in flight walks all of them from a random block on.
        policy: what decides; its own curves are not looked at.
        curve: seconds of a round that drafts, by rows; it must reach `concurrency` whole blocks.
        plain: seconds of a round that drafts nothing.
        concurrency: requests in flight, all of them always.
        prompt: cost of running prompts; None leaves them out.
        steps: rounds to replay.
        seed: of the starting points.

    Returns:
        Rates under the curve.
    """
    rng = np.random.default_rng(seed)
    # Answer after answer, from a random block on.
    blocks = Trace(np.concatenate([t.confidence for t in traces]), np.concatenate([t.accepted for t in traces]))
    walks = [_Walk(blocks, int(start)) for start in rng.integers(len(blocks.accepted), size=concurrency)]
    decide = _Decision(policy, curve, plain, concurrency, traces[0].confidence.shape[1])
    seconds = tokens = rows = drafts = accepted = 0.0
    for _ in range(steps):
        survival = np.stack([walk.survival for walk in walks])
        confidence = np.stack([walk.confidence for walk in walks])
        lengths, cost = decide(survival, confidence)
        kept = np.minimum([walk.accepted for walk in walks], lengths)
        seconds, rows = seconds + cost, rows + concurrency + lengths.sum()
        tokens, drafts, accepted = tokens + concurrency + kept.sum(), drafts + lengths.sum(), accepted + kept.sum()
        for walk in walks:
            walk.step()
    if prompt is not None:
        seconds += tokens / prompt.tokens * prompt.seconds
    return ReplayPoint(
        policy=str(policy),
        concurrency=concurrency,
        throughput=tokens / seconds,
        user=tokens / seconds / concurrency,
        budget=rows / steps,
        accepted_per_verified=accepted / drafts if drafts else float("nan"),
    )


class _Walk:
    """A slot of the engine: a place in what was recorded."""

    def __init__(self, trace: Trace, at: int):
        self._trace, self._survival, self._at = trace, trace.survival, at

    @property
    def survival(self) -> Float[np.ndarray, "G"]:
        return self._survival[self._at]

    @property
    def confidence(self) -> Float[np.ndarray, "G"]:
        return self._trace.confidence[self._at]

    @property
    def accepted(self) -> int:
        return int(self._trace.accepted[self._at])

    def step(self) -> None:
        self._at = (self._at + 1) % len(self._trace.accepted)


class _Decision:
    """How many drafts of each request a round verifies, and what the round costs."""

    def __init__(self, policy: Policy, curve: CostCurve, plain: CostCurve, concurrency: int, block: int):
        self.policy, self.curve, self.plain, self.concurrency, self.block = policy, curve, plain, concurrency, block
        self.unseen: deque[np.ndarray] = deque()
        self.scheduling = Scheduling(curve, plain, block, block)
        self.active = np.ones(concurrency, bool)
        self.valid = np.full(concurrency, block, np.int32)
        limit = concurrency * (block + 1)
        self.seconds = curve.seconds_by_rows(limit) if isinstance(policy, Greedy) else None
        self.fill, self.greedy = jax.jit(fill_capacity), jax.jit(greedy_lengths)

    def __call__(self, survival: np.ndarray, confidence: np.ndarray) -> tuple[Int[np.ndarray, "S"], float]:
        nothing = np.zeros(self.concurrency, np.int32)
        if isinstance(self.policy, NoDraft):
            return nothing, self.plain.seconds(self.concurrency)
        if isinstance(self.policy, Fixed):
            lengths = np.full(self.concurrency, min(self.policy.k, self.block), np.int32)
        elif isinstance(self.policy, Threshold):
            lengths = np.cumprod(confidence >= self.policy.c, axis=1).sum(axis=1).astype(np.int32)
        elif isinstance(self.policy, Greedy):
            lengths = np.asarray(self.greedy(survival, self.active, self.seconds))
        else:
            assert isinstance(self.policy, Scheduled)
            if len(self.unseen) == LAG:
                for slot, seen in enumerate(self.unseen.popleft()):
                    self.scheduling.report(slot, seen)
            capacity = self.scheduling.capacity(range(self.concurrency))
            if not capacity:
                return nothing, self.plain.seconds(self.concurrency)
            lengths = np.asarray(self.fill(survival, self.valid, self.active, capacity))
            self.unseen.append(survival)
        return lengths, self.curve.seconds(self.concurrency + int(lengths.sum()))
