"""The host's half of policy `scheduled`: what the next blocks' drafts are worth, and how many rows a step gets."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from jaxtyping import Float

from dspark_jax.engine.probing import Probing
from dspark_jax.spec.schedule import CostCurve, choose_capacity

REQUEST_RATE, USUAL_RATE, FORGETTING, STEP_RATE = 0.3, 0.02, 0.03, 0.02
"""How far one report moves a request's forecast, and that of all; how far a step without one moves the former back; how
far a step moves the mean throughput.

A block says little of the next but one, so none weighs much. The values were chosen by hand on a few recorded answers.
"""


class Scheduling:
    """Forecasts survival from reports, which are at least two steps old, and chooses capacities by them.

    A request's forecast is a moving mean of what its blocks reported. It begins at the mean of all requests, those that
    have ended included, and goes back to it while nothing new is reported, so that neither one poor block nor a pause
    without drafts decides for long.

    Attributes:
        usual: mean survival over all requests, recent ones weighing more; 1 before the first report.
        probing: when to draft although it does not seem to pay.
        tokens, seconds: of a step, moving means of what was expected of those chosen. What prompts add to a step is
            left out: they have to be run in any case, so time saved elsewhere does not spare it.
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
        self._reports = 0
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
        capacity = choose_capacity(expected, count, self._curve, plain=self._plain, rate=rate)
        if self.probing.skips(pays=capacity > 0):
            capacity = 0
        elif not capacity:
            capacity = choose_capacity(expected, count, self._curve, rate=rate)
        self._expect(expected, count, capacity)
        return capacity

    def _expect(self, expected: Float[np.ndarray, "S G"], count: int, capacity: int) -> None:
        """Take a step into the mean throughput."""
        curve = self._curve if capacity else self._plain
        assert curve is not None  # without a plain curve every step drafts
        likeliest = np.sort(expected.ravel())[::-1][: max(capacity - count, 0)]
        self.tokens += STEP_RATE * (count + likeliest.sum() - self.tokens)
        self.seconds += STEP_RATE * (curve.seconds(max(capacity, count)) - self.seconds)
