"""Whether speculative decoding changed the text: at temperature 0 every output must equal plain decoding.

In float32 the two must agree token for token. In bfloat16, and under load, where a row meets batches of many sizes, the
products of one row and of eight rows round differently, so that two nearly equal logits may change places; a
difference is excused if, and only if, the two largest logits were closer than the rounding of such logits explains. It
is reported all the same, and never counted as equal.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from dspark_jax.engine.results import Generation
from dspark_jax.evaluation.measure import PLAIN, Measurement

NEAR_TIE = 0.25
"""Largest gap of two bfloat16 logits that counts as a near-tie: two steps of bfloat16 between 16 and 32 (7 stored
fraction bits, 16 / 128 = 0.125 a step), the size that the largest logits of these models have."""
NEAR_TIE_LOAD = 1e-4
"""The same of float32 logits from batches of different sizes."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """One prompt whose speculative output is not the plain one.

    Attributes:
        system: the drafter.
        prompt: its id.
        position: first differing token, counted from 0.
        plain_token, token: the two tokens there; None where an output has ended.
        top2_gap: gap of the target's two largest logits at that token, from plain decoding.
    """

    system: str
    prompt: str
    position: int
    plain_token: int | None
    token: int | None
    top2_gap: float


@dataclasses.dataclass(frozen=True)
class LosslessCheck:
    """Outcome of comparing all speculative outputs with plain decoding.

    Attributes:
        greedy: whether the comparison means anything: sampled outputs differ by chance.
        near_tie: largest gap of two logits at which a difference is excused; None excuses none.
        compared: number of outputs compared.
        differences: what differed.
    """

    greedy: bool
    near_tie: float | None
    compared: int
    differences: tuple[Difference, ...]

    @property
    def faults(self) -> tuple[Difference, ...]:
        """The differences that rounding does not explain."""
        return tuple(d for d in self.differences if self.near_tie is None or not d.top2_gap <= self.near_tie)

    def statement(self) -> str:
        """The outcome in words."""
        if not self.greedy:
            return (
                "Lossless: not compared. At this temperature two runs draw different tokens from the same "
                "distribution; equality of texts can be checked at temperature 0 only."
            )
        if not self.compared:
            return "Lossless: not compared, as there is no drafter."
        if not self.differences:
            return f"Lossless: all {self.compared} speculative outputs equal plain decoding, token for token."
        count = len(self.differences)
        equal = f"{self.compared - count} of {self.compared} speculative outputs equal plain decoding"
        if not self.faults:
            return (
                f"Lossless up to near-ties: {equal}; the other {count} first differ where the two largest logits are "
                f"within {self.near_tie} of each other, which is rounding."
            )
        first = self.faults[0]
        return (
            f"NOT LOSSLESS: {equal}; {len(self.faults)} differ beyond rounding. First: {first.system}, prompt "
            f"{first.prompt}, token {first.position}: {first.token} instead of {first.plain_token}, gap of the two "
            f"largest logits {first.top2_gap:.3g}."
        )


def check_lossless(measurement: Measurement, dtype: Any) -> LosslessCheck:
    """Compare every drafter's outputs with plain decoding.

    Args:
        measurement: what was decoded.
        dtype: the target's type; in float32 every difference is a fault.
    """
    near_tie = None if jnp.dtype(dtype) == jnp.float32 else NEAR_TIE
    if not measurement.settings.greedy:
        return LosslessCheck(False, near_tie, 0, ())
    compared, differences = 0, []
    for system in measurement.drafters:
        for plain, ours in zip(measurement.samples[PLAIN], measurement.samples[system.name], strict=True):
            compared += 1
            difference = find_difference(system.name, plain.prompt.id, plain.generation, ours.generation)
            if difference is not None:
                differences.append(difference)
    return LosslessCheck(True, near_tie, compared, tuple(differences))


def _first_difference(a: tuple[int, ...], b: tuple[int, ...]) -> int | None:
    if a == b:
        return None
    shared = min(len(a), len(b))
    return next((i for i in range(shared) if a[i] != b[i]), shared)


def find_difference(system: str, prompt: str, plain: Generation, ours: Generation) -> Difference | None:
    """Where an output first differs from plain decoding of the same prompt; None where it does not."""
    position = _first_difference(plain.tokens, ours.tokens)
    if position is None:
        return None
    # Plain decoding emits one token a round, the first one from the prompt's prefill.
    gaps = (plain.first_top2_gap, *(r.top2_gap for r in plain.rounds))
    return Difference(
        system=system,
        prompt=prompt,
        position=position,
        plain_token=plain.tokens[position] if position < len(plain.tokens) else None,
        token=ours.tokens[position] if position < len(ours.tokens) else None,
        # Past the end of the plain output no rounding explains anything.
        top2_gap=gaps[position] if position < len(plain.tokens) else float("inf"),
    )
