"""The host's half of policy `scheduled`: what the next blocks' drafts are worth, and how many rows a step gets."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from jaxtyping import Float

from dspark_jax.engine.probing import Probing
from dspark_jax.spec.schedule import CostCurve, choose_capacity

REQUEST_RATE, USUAL_RATE, FORGETTING, STEP_RATE = 0.1, 0.005, 0.1, 0.02
"""How far one report moves a request's forecast, and that of all; how far a step without one moves the former back; how
far a step moves the mean throughput.

A block says little of the next but one: over recorded answers a forecast explains 3 % of the variance, and it is as
large as what follows (not more extreme) where a report moves it by a twentieth to a tenth.
"""


class Scheduling:
    """Forecasts survival from reports, which are at least two steps old, and chooses capacities by them.

    A request's forecast is a moving mean of what its blocks reported. It begins at the mean of all requests, those that
    have ended included, and goes back to it while nothing new is reported, so that neither one poor block nor a pause
    without drafts decides for long.

    Attributes:
        usual: mean survival over all requests, recent ones weighing more; 1 before the first report.
        probing: when to draft although it does not seem to pay.
        tokens, seconds: of a step, moving means of what was expected of those chosen since the first report. What
            prompts add to a step is left out: they have to be run in any case, so time saved elsewhere does not spare
            it.
    """

    def __init__(self, curve: CostCurve, plain: CostCurve | None, block: int, limit: int):
        """Begin without reports.

        Args:
            curve: seconds of a round that drafts, by rows.
            plain: seconds of a round that drafts nothing; None where a round always drafts.
            block: draft tokens of a block.
            limit: draft tokens of a block that may be verified.
        """
        self._curve, self._plain, self._limit = curve, plain, limit
        self._forecasts: dict[Hashable, Float[np.ndarray, "G"]] = {}
        self._reports = self._steps = 0
        self.usual = np.ones(block)
        self.probing = Probing()
        self.tokens = self.seconds = 0.0

    def report(self, request: Hashable, survival: Float[np.ndarray, "G"]) -> None:
        """Take in what one block of a request reported; drafts without a prediction (NaN) count as lost."""
        survival = np.nan_to_num(np.asarray(survival, np.float64), nan=0.0)
        self._reports += 1
        self.usual = self.usual + max(1 / self._reports, USUAL_RATE) * (survival - self.usual)
        before = self._forecasts.get(request, self.usual)
        self._forecasts[request] = before + REQUEST_RATE * (survival - before)

    def forecast(self, requests: Sequence[Hashable]) -> Float[np.ndarray, "S G"]:
        """Expected survival of the running requests' next blocks; the others are forgotten."""
        self._forecasts = {
            r: self._forecasts[r] + FORGETTING * (self.usual - self._forecasts[r])
            for r in requests
            if r in self._forecasts
        }
        return np.stack([self._forecasts.get(r, self.usual) for r in requests])

    def capacity(self, requests: Sequence[Hashable]) -> int:
        """Rows of the next step, anchors included; 0 for a step without drafts. Called once a step.

        Args:
            requests: those that run.
        """
        expected, count = self.forecast(requests)[:, : self._limit], len(requests)
        rate = self.tokens / self.seconds if self.seconds else 0.0
        capacity = choose_capacity(expected, count, self._curve, rate=rate)
        likeliest = np.sort(expected.ravel())[::-1].cumsum()
        tokens, seconds = count + _first(likeliest, capacity - count), self._curve.seconds(max(capacity, count))
        if self._plain is not None:
            plain = self._plain.seconds(count)
            # Time is worth what it brings elsewhere, at least what it brings without drafts.
            short = shortfall(likeliest, count, self._curve, plain, worth=max(rate, count / plain))
            if not self.probing.drafts(short):
                capacity, tokens, seconds = 0, count, plain
        if self._reports:  # before, forecasts are a guess
            self._steps += 1
            weight = max(1 / self._steps, STEP_RATE)
            self.tokens += weight * (tokens - self.tokens)
            self.seconds += weight * (seconds - self.seconds)
        return capacity


def shortfall(likeliest: Float[np.ndarray, "N"], count: int, curve: CostCurve, plain: float, worth: float) -> float:
    """How much more than expected the drafts of a step would have to bring to be worth the time they take.

    Args:
        likeliest: expected accepted tokens of the first 1, 2, ... drafts, the likeliest first.
        count: requests of the step.
        curve: seconds of a round that drafts, by rows.
        plain: seconds of a round that does not.
        worth: tokens that a second is worth.

    Returns:
        A share of what is expected: 0.5 where half as much again would do, below 0 where drafting pays; infinite where
        nothing is expected.

    Example:
        One request, .5 tokens expected of its draft, 2 rows in 1.8 seconds, a plain round in 1, a token worth a second:
        .8 / .5 - 1 = 60 %.
    """
    needed = [
        worth * (seconds - plain) / gain
        for rows, seconds in zip(curve.buckets, curve.bucket_seconds, strict=True)
        if rows > count and (gain := _first(likeliest, rows - count)) > 0
    ]
    return min(needed, default=np.inf) - 1


def _first(cumulative: Float[np.ndarray, "N"], drafts: int) -> float:
    """The sum of the first drafts, or of all where there are fewer."""
    return float(cumulative[min(drafts, len(cumulative)) - 1]) if drafts > 0 else 0.0
