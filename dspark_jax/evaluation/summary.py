"""From decoded prompts to numbers: accepted lengths, acceptance by position, rates and speed-ups, with intervals.

Intervals resample whole prompts (batches, for seconds): rounds of one prompt resemble each other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from dspark_jax.engine.results import Generation
from dspark_jax.evaluation.measure import PLAIN, Measurement, Sample
from dspark_jax.spec.metrics import AcceptanceStatistics, Interval, bootstrap_ratio, pool

OVERALL = "overall"
_RESAMPLES = 2000
_QUANTILES = (0.025, 0.975)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speed:
    """Wall-clock numbers of one system.

    Attributes:
        tokens: tokens that came from decoding rounds; the first token of an answer belongs to prefill.
        decode_seconds: spent in rounds, every batch counted once.
        prompt_tokens, prefill_seconds: of running the prompts and drawing first tokens.
        compile_seconds: spent compiling; in none of the others.
        tokens_per_second: `tokens / decode_seconds`.
        speedup: `tokens_per_second` over that of plain decoding; None for plain decoding itself.
    """

    tokens: int
    decode_seconds: float
    prompt_tokens: int
    prefill_seconds: float
    compile_seconds: float
    tokens_per_second: float
    speedup: Interval | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One system in one domain, or overall.

    Attributes:
        system: its name.
        domain: the domain, or "overall".
        prompts: number of prompts.
        statistics: pooled over all rounds.
        tau: accepted length of the pooled rounds.
        macro_tau: mean over domains of their accepted lengths, in the overall row; None elsewhere.
        emitted_per_round: tokens the user received a round, cut at stop token and budget.
        speed: wall-clock numbers.
    """

    system: str
    domain: str
    prompts: int
    statistics: AcceptanceStatistics
    tau: Interval
    macro_tau: Interval | None
    emitted_per_round: float
    speed: Speed


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Ratio of two drafters' accepted lengths (means over domains), resampled over the prompts both decoded."""

    system: str
    baseline: str
    ratio: Interval


@dataclasses.dataclass(frozen=True)
class Summary:
    """All numbers of a measurement.

    Attributes:
        rows: domain by domain, then overall; within each, plain decoding first.
        comparisons: the first drafter against each of the others.
    """

    rows: tuple[Row, ...]
    comparisons: tuple[Comparison, ...]


def summarize(measurement: Measurement) -> Summary:
    """Compute every number of a measurement; the seed of the intervals is the run's."""
    domains = [*measurement.domains, OVERALL]
    rows = [_row(measurement, system.name, domain) for domain in domains for system in measurement.systems]
    names = [system.name for system in measurement.drafters]
    comparisons = [_comparison(measurement, names[0], other) for other in names[1:]]
    return Summary(tuple(rows), tuple(comparisons))


def round_statistics(generation: Generation, block_size: int) -> AcceptanceStatistics:
    """Statistics of one answer's rounds."""
    rounds = generation.rounds
    return AcceptanceStatistics.from_rounds(
        np.array([r.accepted for r in rounds], np.int64),
        np.array([r.proposed for r in rounds], np.int64),
        np.array([r.stopped for r in rounds], bool),
        np.array([r.emitted for r in rounds], np.int64),
        block_size=block_size,
        num_accepted_raw=np.array([r.accepted_raw for r in rounds], np.int64),
    )


def _row(measurement: Measurement, system: str, domain: str) -> Row:
    samples, plain = (_of_domain(measurement.samples[name], domain) for name in (system, PLAIN))
    size = next(s.block_size for s in measurement.systems if s.name == system)
    each = [round_statistics(sample.generation, size) for sample in samples]
    total = pool(each, block_size=size)
    seed = measurement.settings.seed
    tau = bootstrap_ratio(*_lengths_and_rounds(samples).T, seed=seed)
    return Row(
        system=system,
        domain=domain,
        prompts=len(samples),
        statistics=total,
        tau=tau,
        macro_tau=_macro(measurement, system) if domain == OVERALL else None,
        emitted_per_round=total.emitted / total.rounds if total.rounds else float("nan"),
        speed=_speed(samples, None if system == PLAIN else plain, seed),
    )


def _of_domain(samples: Sequence[Sample], domain: str) -> list[Sample]:
    return [sample for sample in samples if domain in (OVERALL, sample.prompt.domain)]


def _lengths_and_rounds(samples: Sequence[Sample]) -> Float[np.ndarray, "prompts 2"]:
    rounds = [sample.generation.rounds for sample in samples]
    return np.array([(sum(r.accepted_length for r in rs), len(rs)) for rs in rounds], np.float64)


def _tokens_and_seconds(samples: Sequence[Sample]) -> Float[np.ndarray, "batches 2"]:
    """Tokens from rounds and decode seconds of every batch, in order."""
    sums: dict[int, list[float]] = {}
    for sample in samples:
        entry = sums.setdefault(sample.batch, [0.0, sample.generation.timings.decode])
        entry[0] += sum(r.emitted for r in sample.generation.rounds)
    return np.array(list(sums.values()), np.float64)


def _speed(samples: Sequence[Sample], plain: Sequence[Sample] | None, seed: int) -> Speed:
    batches = {sample.batch: sample.generation.timings for sample in samples}
    cost = _tokens_and_seconds(samples)
    tokens, seconds = cost.sum(0)
    return Speed(
        tokens=int(tokens),
        decode_seconds=float(seconds),
        prompt_tokens=sum(len(sample.generation.prompt) for sample in samples),
        prefill_seconds=sum(t.prefill for t in batches.values()),
        compile_seconds=sum(t.compile for t in batches.values()),
        tokens_per_second=float(_ratio(tokens, seconds)),
        speedup=None if plain is None else _speedup(cost, _tokens_and_seconds(plain), seed),
    )


def _speedup(ours: Float[np.ndarray, "batches 2"], plain: Float[np.ndarray, "batches 2"], seed: int) -> Interval:
    """Ratio of two rates; both systems' seconds of a batch are drawn together, so that common drift cancels."""

    def ratio(sums: np.ndarray) -> Any:
        tokens, seconds, plain_tokens, plain_seconds = np.moveaxis(sums, -1, 0)
        return _ratio(_ratio(tokens, seconds), _ratio(plain_tokens, plain_seconds))

    both = np.concatenate([ours, plain], axis=1)
    return _interval(ratio(both.sum(0)), ratio(_resampled_sums(both, seed)))


def _domain_taus(measurement: Measurement, system: str) -> tuple[Any, np.ndarray]:
    """Mean over domains of tau, and the same of every resample (prompts are drawn within their domain)."""
    estimates, resamples = [], []
    for index, domain in enumerate(measurement.domains):
        values = _lengths_and_rounds(_of_domain(measurement.samples[system], domain))
        estimates.append(_ratio(*values.sum(0)))
        # The same seed for every system: ratios between systems are over the same drawn prompts.
        resamples.append(_ratio(*_resampled_sums(values, measurement.settings.seed + index).T))
    return np.mean(estimates), np.mean(resamples, axis=0)


def _macro(measurement: Measurement, system: str) -> Interval:
    return _interval(*_domain_taus(measurement, system))


def _comparison(measurement: Measurement, system: str, baseline: str) -> Comparison:
    ours, theirs = _domain_taus(measurement, system), _domain_taus(measurement, baseline)
    return Comparison(system, baseline, _interval(ours[0] / theirs[0], ours[1] / theirs[1]))


def _resampled_sums(values: Float[np.ndarray, "units C"], seed: int) -> Float[np.ndarray, "resamples C"]:
    count = len(values)
    draws = np.random.default_rng(seed).multinomial(count, np.full(count, 1.0 / count), size=_RESAMPLES)
    return draws.astype(np.float64) @ values


def _ratio(top: Any, bottom: Any) -> Any:
    """Quotient of numbers or arrays; NaN where nothing was counted."""
    return np.asarray(top, np.float64) / np.where(np.asarray(bottom) > 0, bottom, np.nan)


def _interval(estimate: Any, resamples: np.ndarray) -> Interval:
    known = resamples[np.isfinite(resamples)]
    if not len(known):
        return Interval(float(estimate), float("nan"), float("nan"))
    low, high = np.quantile(known, _QUANTILES)
    return Interval(float(estimate), float(low), float(high))
