"""Statistics of speculative decoding: accepted lengths, acceptance by position, confidence quality, intervals.

Host-side NumPy in float64 on a few integers per round. Sums are kept, never averages, so that regrouping rounds,
batches or processes cannot change a number (FAULTS BR-27). Two counts that are often mixed up stay apart: *accepted
length*, the raw number the paper calls tau, and *emitted* tokens, what the user received.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped

COARSE_BINS = 20
FINE_BINS = 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class AcceptanceStatistics:
    """Sums over decoding rounds; add two of them to pool their rounds.

    Attributes:
        rounds: verified blocks, those with no draft token included.
        accepted_length: sum of accepted draft tokens plus the target's own token (which a round that ends at an
            accepted stop token does not add).
        accepted_raw: sum of accepted draft tokens before the cut at a stop token; a diagnostic.
        proposed: sum of draft tokens sent to the target, counted up to an accepted stop token.
        emitted: sum of tokens the user received, cut at stop token and budget.
        proposed_at: rounds that sent draft position k, `[G]`.
        accepted_at: rounds that accepted draft position k, `[G]`.
        reached_at: rounds that sent position k and accepted everything before it, `[G]`.
    """

    rounds: int
    accepted_length: int
    accepted_raw: int
    proposed: int
    emitted: int
    proposed_at: Int[np.ndarray, "G"]
    accepted_at: Int[np.ndarray, "G"]
    reached_at: Int[np.ndarray, "G"]

    @classmethod
    def empty(cls, block_size: int) -> AcceptanceStatistics:
        """Statistics of no rounds at all, e.g. of a request whose first token is already a stop token."""
        nothing = np.zeros(0, np.int64)
        return cls.from_rounds(nothing, nothing, nothing.astype(bool), nothing, block_size=block_size)

    @classmethod
    def from_rounds(
        cls,
        num_accepted: Int[np.ndarray, "rounds"],
        num_proposed: Int[np.ndarray, "rounds"],
        stopped: Bool[np.ndarray, "rounds"],
        emitted: Int[np.ndarray, "rounds"],
        *,
        block_size: int,
        num_accepted_raw: Int[np.ndarray, "rounds"] | None = None,
    ) -> AcceptanceStatistics:
        """Sum the rounds of one request, or of many: order and grouping do not matter.

        Args:
            num_accepted: accepted draft tokens, cut at the first accepted stop token (`Verification.num_accepted`).
            num_proposed: draft tokens sent to the target, l_r.
            stopped: a stop token was accepted inside the draft prefix.
            emitted: tokens committed to the output.
            block_size: G, the number of positions to keep apart.
            num_accepted_raw: the count before the cut; equal to `num_accepted` where not given.

        Returns:
            The sums.

        Raises:
            ValueError: counts that cannot be: more accepted than proposed, more proposed than the block holds, or more
                emitted than committed.

        Example:
            Verified [d1, d2, EOS, d4, d5, bonus]: num_accepted 3, raw 5, proposed 5, stopped, emitted 3. The accepted
            length is 3: nothing follows a stop token, not even the bonus.
        """
        accepted, stop = np.asarray(num_accepted, np.int64), np.asarray(stopped, bool)
        raw = accepted if num_accepted_raw is None else np.asarray(num_accepted_raw, np.int64)
        sent = np.asarray(num_proposed, np.int64)
        if np.any(accepted < 0) or np.any(accepted > raw) or np.any(raw > sent) or np.any(sent > block_size):
            raise ValueError(
                f"impossible counts: expected 0 <= accepted <= accepted_raw <= proposed <= {block_size} in each "
                f"round, found accepted {accepted.tolist()}, raw {raw.tolist()}, proposed {sent.tolist()}."
            )
        length = accepted + ~stop
        if np.any(np.asarray(emitted) > length):
            raise ValueError(f"emitted {np.asarray(emitted).tolist()} exceeds the accepted lengths {length.tolist()}.")
        # Slots after an accepted stop token decide nothing: they are neither cases nor rejections.
        sent = np.where(stop, accepted, sent)
        position = np.arange(block_size)
        return cls(
            rounds=len(accepted),
            accepted_length=int(length.sum()),
            accepted_raw=int(raw.sum()),
            proposed=int(sent.sum()),
            emitted=int(np.sum(emitted)),
            proposed_at=(position < sent[:, None]).sum(0),
            accepted_at=(position < accepted[:, None]).sum(0),
            reached_at=(position < np.minimum(sent, accepted + 1)[:, None]).sum(0),
        )

    def __add__(self, other: AcceptanceStatistics) -> AcceptanceStatistics:
        if len(self.proposed_at) != len(other.proposed_at):
            raise ValueError(
                f"block sizes {len(self.proposed_at)} and {len(other.proposed_at)} cannot be pooled: "
                "report drafters with different block sizes apart."
            )
        fields = [f.name for f in dataclasses.fields(self)]
        return AcceptanceStatistics(**{name: getattr(self, name) + getattr(other, name) for name in fields})

    @property
    def tau(self) -> float:
        """Mean accepted length: accepted draft tokens plus the target's own, per round. NaN without rounds."""
        return _ratio(self.accepted_length, self.rounds)

    @property
    def verify_rate(self) -> float:
        """Accepted length per token position the target computed, sum(accepted length) / sum(proposed + 1)."""
        return _ratio(self.accepted_length, self.proposed + self.rounds)

    @property
    def mean_proposed(self) -> float:
        """Mean number of draft tokens sent to the target per round."""
        return _ratio(self.proposed, self.rounds)

    @property
    def mean_accepted(self) -> float:
        """Mean number of accepted draft tokens per round, without the target's own token."""
        return _ratio(int(self.accepted_at.sum()), self.rounds)

    @property
    def conditional_acceptance(self) -> Float[np.ndarray, "G"]:
        """Acceptance at k among rounds that sent k and accepted all before it (the paper's Figure 2)."""
        return self.accepted_at / np.where(self.reached_at > 0, self.reached_at, np.nan)

    @property
    def acceptance_by_position(self) -> Float[np.ndarray, "G"]:
        """Acceptance at k among all rounds that sent k (DeepSpec's number): falls with k by construction."""
        return self.accepted_at / np.where(self.proposed_at > 0, self.proposed_at, np.nan)


def pool(statistics: Iterable[AcceptanceStatistics], *, block_size: int) -> AcceptanceStatistics:
    """Add up the statistics of many requests."""
    return sum(statistics, start=AcceptanceStatistics.empty(block_size))


def _ratio(numerator: int, denominator: int) -> float:
    return numerator / denominator if denominator else float("nan")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfidenceMetrics:
    """How well the predicted prefix survival matches what was accepted, per draft position.

    Attributes:
        count: cases, `[G]`: proposals whose position k was verified and lies before any cut.
        mean_predicted, mean_observed: mean predicted survival and the share accepted through k, `[G]`.
        ece: expected calibration error over 20 equal bins of the prediction, `[G]`.
        auroc: chance that an accepted case was predicted above a rejected one, ties half, over 1000 bins, `[G]`.
        brier: mean squared error of the prediction, `[G]`.
        bin_count, bin_predicted, bin_observed: cases and mean values in each of the 20 bins (the reliability diagram;
            NaN in empty bins), `[G, 20]`.
    """

    count: Int[np.ndarray, "G"]
    mean_predicted: Float[np.ndarray, "G"]
    mean_observed: Float[np.ndarray, "G"]
    ece: Float[np.ndarray, "G"]
    auroc: Float[np.ndarray, "G"]
    brier: Float[np.ndarray, "G"]
    bin_count: Int[np.ndarray, "G bins"]
    bin_predicted: Float[np.ndarray, "G bins"]
    bin_observed: Float[np.ndarray, "G bins"]


def confidence_metrics(
    confidence_logits: Float[np.ndarray, "N G"],
    num_accepted: Int[np.ndarray, "N"],
    num_cases: Int[np.ndarray, "N"],
) -> ConfidenceMetrics:
    """Compare predicted prefix survival, the product of sigmoid(logit_i) over i <= k, with "accepted through k".

    Args:
        confidence_logits: logits of the conditional accept rates, divided by their temperatures if calibrated.
        num_accepted: accepted draft tokens of each proposal, cut at an accepted stop token.
        num_cases: leading positions of each proposal that count: those verified, up to an accepted stop token.

    Returns:
        Metrics per position; NaN where they are undefined (no cases, or one outcome only for the AUROC).

    Raises:
        ValueError: a confidence among the cases is NaN; dropping it would flatter the metric.
    """
    size = confidence_logits.shape[1]
    case = np.arange(size) < np.asarray(num_cases)[:, None]
    if np.any(np.isnan(confidence_logits) & case):
        raise ValueError(
            "a confidence logit among the cases is NaN: mend the drafter, or exclude the proposal by name."
        )
    predicted = survival(confidence_logits)
    observed = np.arange(size) < np.asarray(num_accepted)[:, None]
    columns = [_one_position(predicted[case[:, k], k], observed[case[:, k], k]) for k in range(size)]
    return ConfidenceMetrics(
        **{f.name: np.stack([c[f.name] for c in columns]) for f in dataclasses.fields(ConfidenceMetrics)}
    )


def survival(confidence_logits: Float[np.ndarray, "N G"]) -> Float[np.ndarray, "N G"]:
    """Prefix survival a_k = c_1 ... c_k in float64."""
    logits = np.asarray(confidence_logits, np.float64)
    return np.cumprod(0.5 * (1.0 + np.tanh(0.5 * logits)), axis=1)


def _one_position(predicted: Float[np.ndarray, "cases"], observed: Bool[np.ndarray, "cases"]) -> dict[str, np.ndarray]:
    count = len(predicted)
    bins = bin_index(predicted, COARSE_BINS)
    bin_count = np.bincount(bins, minlength=COARSE_BINS)
    filled = np.where(bin_count > 0, bin_count, np.nan)
    bin_predicted = np.bincount(bins, weights=predicted, minlength=COARSE_BINS) / filled
    bin_observed = np.bincount(bins, weights=observed, minlength=COARSE_BINS) / filled
    total = count if count else np.nan
    gaps = np.nan_to_num(np.abs(bin_predicted - bin_observed))
    return {
        "count": np.asarray(count),
        "mean_predicted": np.asarray(predicted.sum() / total),
        "mean_observed": np.asarray(observed.sum() / total),
        "ece": np.asarray((bin_count * gaps).sum() / total),
        "auroc": np.asarray(auroc(predicted, observed)),
        "brier": np.asarray(((predicted - observed) ** 2).sum() / total),
        "bin_count": bin_count,
        "bin_predicted": bin_predicted,
        "bin_observed": bin_observed,
    }


def bin_index(probability: Float[np.ndarray, "cases"], bins: int) -> Int[np.ndarray, "cases"]:
    """Equal bins of [0, 1], closed below: bin i holds [i/bins, (i+1)/bins), and the last one holds 1 too."""
    return np.minimum((probability * bins).astype(np.int64), bins - 1)


def auroc(predicted: Float[np.ndarray, "cases"], observed: Bool[np.ndarray, "cases"]) -> float:
    """Area under the ROC curve from a histogram of 1000 bins; cases in one bin count half. NaN for one class alone."""
    bins = bin_index(predicted, FINE_BINS)
    positive = np.bincount(bins[observed], minlength=FINE_BINS).astype(np.float64)
    negative = np.bincount(bins[~observed], minlength=FINE_BINS).astype(np.float64)
    if not positive.sum() or not negative.sum():
        return float("nan")
    below = np.cumsum(negative) - negative
    return float((positive * (below + 0.5 * negative)).sum() / (positive.sum() * negative.sum()))


class Interval(NamedTuple):
    """An estimate with its bootstrap confidence interval."""

    estimate: float
    low: float
    high: float


def bootstrap_ratio(
    numerators: Shaped[np.ndarray, "prompts"],
    denominators: Shaped[np.ndarray, "prompts"],
    *,
    seed: int,
    confidence: float = 0.95,
    resamples: int = 2000,
) -> Interval:
    """Estimate sum(numerators) / sum(denominators) with a percentile interval from resampling whole prompts.

    Rounds of one prompt resemble each other, so the prompt is the unit that is resampled. For tau pass accepted lengths
    and rounds per prompt; for a speed-up the seconds per prompt of both systems, which keeps the pairing.

    Args:
        numerators, denominators: one entry per prompt.
        seed: of the resampling.
        confidence: coverage of the interval.
        resamples: number of bootstrap samples.

    Returns:
        Estimate and interval; NaN without a positive denominator.

    Raises:
        ValueError: different lengths, or no prompts.
    """
    top, bottom = np.asarray(numerators, np.float64), np.asarray(denominators, np.float64)
    if top.shape != bottom.shape or top.ndim != 1 or not len(top):
        raise ValueError(
            f"expected two equally long, non-empty lists over prompts, found {top.shape} and {bottom.shape}."
        )
    if not bottom.sum() > 0:
        return Interval(float("nan"), float("nan"), float("nan"))
    generator = np.random.default_rng(seed)
    # Counts of how often each prompt is drawn, instead of the indices: one product gives all resamples.
    draws = generator.multinomial(len(top), np.full(len(top), 1.0 / len(top)), size=resamples).astype(np.float64)
    sums = draws @ bottom
    ratios = (draws @ top)[sums > 0] / sums[sums > 0]
    low, high = np.quantile(ratios, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(top.sum() / bottom.sum()), float(low), float(high))


def bootstrap_mean(
    values: Shaped[np.ndarray, "prompts"], *, seed: int, confidence: float = 0.95, resamples: int = 2000
) -> Interval:
    """Estimate the mean over prompts with a percentile interval; see `bootstrap_ratio`."""
    return bootstrap_ratio(values, np.ones(len(values)), seed=seed, confidence=confidence, resamples=resamples)
