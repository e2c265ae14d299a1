"""Calibration of the confidence head: sequential temperature scaling of predicted prefix survival (SPEC §8).

A drafter predicts the conditional accept rate c_k = sigmoid(logit_k) of every position, and what a scheduler uses is
the product c_1 … c_k, the chance that position k survives. So the temperatures T_k are fitted from left to right, each
to the calibration error of the *product* with the earlier ones in it: fitted to c_k alone it would calibrate a number
that nobody reads, on the wrong outcomes. What is no case must not count as a rejection: positions that were cut before
verification, and positions after an accepted stop token (FAULTS BR-31).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dspark_jax import sampling as sampling_rules
from dspark_jax.spec.metrics import COARSE_BINS, ConfidenceMetrics, bin_index, confidence_metrics, survival
from dspark_jax.types import Proposal, Sampling

GRID_STEPS = 801
GRID: Float[np.ndarray, "steps"] = 10.0 ** np.linspace(-1.0, 1.0, GRID_STEPS)
"""Temperatures tried: 801 from 0.1 to 10, evenly spaced in the logarithm (0.58 % apart), 1 exactly in the middle."""

# Two calibration errors closer than this differ by rounding.
_TIE = 1e-12


def accept_rates(target_logits: Float[Array, "S G1 V"], proposal: Proposal, sampling: Sampling) -> Float[Array, "S G"]:
    """Chance that a token drawn at each position is accepted, given the draft tokens before it: sum_x min(p(x), q(x)).

    This is what the confidence head is trained to predict. Its product over a block is not quite the survival of the
    block, as the tokens that tend to be accepted need not be those after which the next ones are.

    Args:
        target_logits: rows of the anchor and of each draft token.
        proposal: the block; where `probs` is None the tokens are certain, and the rate is p at the token.
        sampling: the requests' settings.

    Returns:
        Accept rate of every position; meaningless at positions that were not verified.
    """
    p = sampling_rules.probabilities(target_logits, sampling)[:, :-1]
    if proposal.probs is None:
        return jnp.take_along_axis(p, proposal.tokens[..., None], axis=-1)[..., 0]
    return jnp.sum(jnp.minimum(p, proposal.probs), axis=-1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Proposals:
    """Drafted blocks with what became of them; the raw material of calibration.

    Attributes:
        logits: confidence logits of whole blocks, without any temperature.
        cases: leading positions of each block whose outcome is known: those verified, up to an accepted stop token.
        accepted: leading positions accepted, at most `cases`.
        accept_rates: analytic accept rates where they were recorded, NaN at positions that were not verified.
    """

    logits: Float[np.ndarray, "N G"]
    cases: Int[np.ndarray, "N"]
    accepted: Int[np.ndarray, "N"]
    accept_rates: Float[np.ndarray, "N G"] | None = None

    def __len__(self) -> int:
        return len(self.cases)

    @property
    def block_size(self) -> int:
        """Positions of a block."""
        return self.logits.shape[1]

    @classmethod
    def from_rounds(
        cls,
        logits: Float[np.ndarray, "N G"],
        num_proposed: Int[np.ndarray, "N"],
        num_accepted: Int[np.ndarray, "N"],
        stopped: Bool[np.ndarray, "N"],
        accept_rates: Float[np.ndarray, "N G"] | None = None,
    ) -> Proposals:
        """Take the cases out of verified rounds.

        Args:
            logits: confidence logits of each round's whole block.
            num_proposed: draft tokens verified, l_r.
            num_accepted: draft tokens accepted, cut at the first accepted stop token.
            stopped: a stop token was accepted inside the draft prefix.
            accept_rates: analytic accept rates of each round.

        Raises:
            ValueError: counts that cannot be.

        Example:
            Blocks of four: a rejection at position 3 of a whole block (proposed 4, accepted 2) has four cases, 1 1 0 0;
            a block cut to two and accepted (2, 2) has two, 1 1; a stop token accepted at position 1 (4, 1, stopped)
            has one, 1.
        """
        logits = np.asarray(logits, np.float64)
        sent, accepted = np.asarray(num_proposed, np.int64), np.asarray(num_accepted, np.int64)
        size = logits.shape[1]
        if np.any(accepted < 0) or np.any(accepted > sent) or np.any(sent > size):
            raise ValueError(
                f"impossible counts: expected 0 <= accepted <= proposed <= {size} in each round, found accepted up to "
                f"{accepted.max()} and proposed up to {sent.max()}."
            )
        cases = np.where(np.asarray(stopped, bool), accepted, sent)
        return cls(logits=logits, cases=cases, accepted=accepted, accept_rates=accept_rates)

    def select(self, chosen: Bool[np.ndarray, "N"]) -> Proposals:
        """The proposals marked true."""
        rates = None if self.accept_rates is None else self.accept_rates[chosen]
        return Proposals(
            logits=self.logits[chosen], cases=self.cases[chosen], accepted=self.accepted[chosen], accept_rates=rates
        )

    def metrics(self, temperatures: Sequence[float] | None = None) -> ConfidenceMetrics:
        """Quality of the predicted survival per position, raw or with temperatures."""
        return confidence_metrics(self.scaled(temperatures), self.accepted, self.cases)

    def oracle_metrics(self) -> ConfidenceMetrics | None:
        """The same for a predictor that knows the analytic accept rates; None where they were not recorded."""
        if self.accept_rates is None:
            return None
        rates = np.clip(self.accept_rates, 0.0, 1.0)
        with np.errstate(divide="ignore"):
            logits = np.log(rates) - np.log1p(-rates)
        return confidence_metrics(logits, self.accepted, self.cases)

    def scaled(self, temperatures: Sequence[float] | None) -> Float[np.ndarray, "N G"]:
        """Logits divided by the temperature of their position."""
        return self.logits if temperatures is None else self.logits / np.asarray(temperatures, np.float64)


def fit_temperatures(proposals: Proposals) -> tuple[float, ...]:
    """Fit sequential temperatures (SPEC §8).

    For k = 1 … G in order, T_k of `GRID` minimises the expected calibration error, over 20 equal bins, of
    prod_{i <= k} sigmoid(logit_i / T_i) against "accepted through k", with the earlier temperatures fixed. Among equal
    errors the temperature nearest to 1 wins, so that a position without cases keeps 1.

    Args:
        proposals: held-out blocks with raw logits. About 20 000 are needed before the error of the fit is small.

    Returns:
        One temperature a position.

    Raises:
        ValueError: there are no cases at all, or a logit among the cases is NaN.

    Example:
        Ten blocks with c_1 = .9 and c_2 = .8, six of them accepted through position 1 and four through 2. T_1 = 5.42
        makes c_1 = .6, and T_2 = 2 the product .6 · .667 = .4. With c_1 left at .9, no T_2 could reach .4.
    """
    size = proposals.block_size
    case = np.arange(size) < proposals.cases[:, None]
    if not case.any():
        raise ValueError("there is nothing to calibrate on: no proposal has a verified position")
    if np.any(np.isnan(proposals.logits) & case):
        raise ValueError("a confidence logit among the cases is NaN: mend the drafter, or leave the proposal out")
    # Nearest to 1 first: the first of equal errors is then the one to take.
    grid = GRID[np.argsort(np.abs(np.log(GRID)), kind="stable")]
    before = np.ones(len(proposals))
    found = []
    for k in range(size):
        rows = case[:, k]
        logit, reach, observed = proposals.logits[rows, k], before[rows], proposals.accepted[rows] > k
        errors = np.array([_calibration_error(reach * _sigmoid(logit / t), observed) for t in grid])
        best = grid[np.argmax(errors <= errors.min() + _TIE)]
        before = before * _sigmoid(proposals.logits[:, k] / best)
        found.append(float(best))
    return tuple(found)


def chance_error(proposals: Proposals, temperatures: Sequence[float] | None = None) -> Float[np.ndarray, "G"]:
    """Calibration error that these predictions would show by chance if they were right, per position.

    Each bin's mean outcome scatters about its prediction with variance sum p(1 - p) / n^2; the mean of its absolute
    value is sqrt(2 / pi) of the standard deviation (normal approximation). An error near this number is no error.

    Args:
        proposals: blocks and their cases.
        temperatures: as in `Proposals.metrics`.

    Returns:
        Expected error; NaN at positions without cases.
    """
    predicted = survival(proposals.scaled(temperatures))
    found = []
    for k in range(proposals.block_size):
        p = predicted[proposals.cases > k, k]
        variance = np.bincount(bin_index(p, COARSE_BINS), weights=p * (1 - p), minlength=COARSE_BINS)
        found.append(np.sqrt(2 / np.pi) * np.sqrt(variance).sum() / (len(p) or np.nan))
    return np.array(found)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ThresholdPoint:
    """What a confidence threshold would have done to the proposals.

    Attributes:
        threshold: blocks are cut at the first position whose confidence is not at least this.
        accepted: accepted draft tokens per step.
        rejected: draft tokens per step that were verified in vain.
    """

    threshold: float
    accepted: float
    rejected: float

    @property
    def acceptance(self) -> float:
        """Share of the verified draft tokens that was accepted; NaN where none was verified."""
        verified = self.accepted + self.rejected
        return self.accepted / verified if verified else float("nan")


def threshold_sweep(
    proposals: Proposals, thresholds: Iterable[float], temperatures: Sequence[float] | None = None
) -> tuple[ThresholdPoint, ...]:
    """Replay whole blocks under confidence thresholds (the paper's Figure 5).

    Exact for a block on its own: whether position k is accepted does not depend on how much of the block after it is
    verified. Positions after an accepted stop token count nowhere.

    Args:
        proposals: blocks that were verified whole.
        thresholds: each in [0, 1].
        temperatures: what the logits are divided by first.

    Raises:
        ValueError: a threshold out of range, or no proposals.
    """
    if not len(proposals):
        raise ValueError("there are no proposals to replay")
    confidence = _sigmoid(proposals.scaled(temperatures))
    points = []
    for threshold in thresholds:
        if not 0 <= threshold <= 1:
            raise ValueError(f"threshold is {threshold}: expected a probability in [0, 1]")
        # Comparisons with NaN are false: it cuts.
        kept = np.cumprod(confidence >= threshold, axis=1).sum(axis=1)
        verified, accepted = np.minimum(kept, proposals.cases), np.minimum(kept, proposals.accepted)
        points.append(
            ThresholdPoint(
                threshold=float(threshold),
                accepted=float(accepted.mean()),
                rejected=float((verified - accepted).mean()),
            )
        )
    return tuple(points)


def _calibration_error(predicted: Float[np.ndarray, "cases"], observed: Bool[np.ndarray, "cases"]) -> float:
    """Expected calibration error; |mean difference| of a bin times its share is |sum of differences| / cases."""
    if not len(predicted):
        return 0.0
    bins = bin_index(predicted, COARSE_BINS)
    return float(np.abs(np.bincount(bins, weights=predicted - observed, minlength=COARSE_BINS)).sum() / len(predicted))


def _sigmoid(logits: Float[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
    return 0.5 * (1.0 + np.tanh(0.5 * logits))
