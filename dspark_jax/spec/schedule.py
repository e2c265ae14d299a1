"""Scheduling: how many draft tokens of each request a round verifies (SPEC §9).

A round that verifies l_r drafts of each of R requests runs B = sum_r (1 + l_r) rows and is expected to commit
tau = sum_r (1 + sum_{j <= l_r} a_{r,j}) tokens, a_{r,j} being the predicted survival of draft j. Wanted are lengths
that maximise the throughput Theta = tau / seconds(B).

Lengths may never depend on the value of a token that is still to be admitted, or the output's law bends towards what
the drafter proposed. Both schedulers keep to it. `greedy_lengths` admits tokens in order of survival and stops at the
first that does not pay: the survival of draft j sees drafts before j only, and nothing behind the stop is looked at.
`choose_capacity` searches the whole curve, so it must be given confidences of an *earlier* round; all it decides is how
many rows the round has, and `fill_capacity` spends them in order of current survival, looking at no token before it is
admitted. One capacity holds for all hosts: it is chosen once and handed round, never worked out by each host from its
own copy of the confidences.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
import operator
from collections.abc import Iterable, Mapping
from typing import Any, SupportsFloat, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from scipy.optimize import isotonic_regression

from dspark_jax.buckets import pick
from dspark_jax.spec.verify import leading


@dataclasses.dataclass(frozen=True)
class CostCurve:
    """Seconds that a whole round takes, drafting included, by the bucket its rows are padded to.

    Attributes:
        buckets: numbers of rows a round can be padded to, ascending.
        bucket_seconds: what a round of each bucket takes, never decreasing.

    Raises:
        ValueError: empty, unequal in length, not ascending, or seconds that are not positive, finite and monotone.
    """

    buckets: tuple[int, ...]
    bucket_seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.buckets or len(self.buckets) != len(self.bucket_seconds):
            raise ValueError(
                f"a cost curve has {len(self.buckets)} buckets and {len(self.bucket_seconds)} measurements: "
                "expected at least one bucket and one measurement for each; profile again."
            )
        if self.buckets[0] < 1 or any(b <= a for a, b in zip(self.buckets, self.buckets[1:], strict=False)):
            raise ValueError(f"buckets are {self.buckets}: expected ascending numbers of rows from at least 1.")
        if not all(math.isfinite(s) and s > 0 for s in self.bucket_seconds):
            raise ValueError(
                f"seconds per bucket are {self.bucket_seconds}: expected positive finite numbers; profile again."
            )
        if any(b < a for a, b in zip(self.bucket_seconds, self.bucket_seconds[1:], strict=False)):
            raise ValueError(
                f"seconds per bucket are {self.bucket_seconds}, which fall somewhere: build measured curves with "
                "CostCurve.monotone."
            )

    @classmethod
    def monotone(cls, buckets: Iterable[SupportsIndex], seconds: Iterable[SupportsFloat]) -> CostCurve:
        """Build a curve from measurements: no bucket costs more than a larger one.

        Where buckets were measured slower than larger ones, all of them take their mean (isotonic regression): taking
        the fastest would make a curve of many noisy buckets cheaper than it is, and a search over it finds just those.

        Args:
            buckets: numbers of rows, ascending.
            seconds: measured time of each.

        Returns:
            The curve.

        Raises:
            ValueError: as for the class.

        Example:
            Buckets (1, 2, 4, 8) measured at (3, 9, 4, 6) seconds give (3, 6.33, 6.33, 6.33).
        """
        values = np.asarray([float(s) for s in seconds])
        if len(values) and np.all(np.isfinite(values)):  # else the class says what is wrong
            values = isotonic_regression(values).x
        return cls(tuple(operator.index(b) for b in buckets), tuple(values.tolist()))

    def seconds(self, rows: int) -> float:
        """Time of a round with `rows` rows: that of the smallest bucket which holds them.

        Raises:
            ValueError: negative rows, or more than the largest bucket has; costs are never extrapolated.
        """
        if rows < 0:
            raise ValueError(f"a round cannot have {rows} rows: expected 0 or more.")
        bucket = pick(self.buckets, rows, "number of rows of a round")
        return self.bucket_seconds[bisect.bisect_left(self.buckets, bucket)]

    def seconds_by_rows(self, limit: int) -> Float[np.ndarray, "rows"]:
        """Time of every number of rows 0..limit as float32, the form `greedy_lengths` takes."""
        return np.asarray([self.seconds(rows) for rows in range(limit + 1)], np.float32)

    def to_json(self) -> dict[str, list[Any]]:
        """Plain values; `from_json` is the inverse."""
        return {"buckets": list(self.buckets), "seconds": list(self.bucket_seconds)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> CostCurve:
        """Read what `to_json` wrote.

        Raises:
            ValueError: missing or unknown keys, or as for the class.
        """
        if set(value) != {"buckets", "seconds"}:
            raise ValueError(f"a stored cost curve has keys {sorted(value)}: expected 'buckets' and 'seconds'.")
        return cls(tuple(operator.index(b) for b in value["buckets"]), tuple(float(s) for s in value["seconds"]))


def survival(
    confidence_logits: Float[Array, "S G"], num_valid: Int[Array, "S"], active: Bool[Array, "S"]
) -> Float[Array, "S G"]:
    """Predicted chance that drafts 1..k are all accepted, a_k = c_1 ... c_k.

    Args:
        confidence_logits: logits of the conditional accept rates c_k, divided by their temperatures if calibrated.
        num_valid: drafts of each slot that may be verified.
        active: slots that take part.

    Returns:
        Never increasing along a row. 0 from a NaN on, beyond `num_valid`, and for inactive slots.

    Example:
        c = (.9, .8, .5) gives (.9, .72, .36); c = (.9, NaN, .8) gives (.9, 0, 0).
    """
    rates = jax.nn.sigmoid(confidence_logits)
    rates = jnp.where(jnp.isnan(rates) | ~_usable(rates.shape, num_valid, active), 0.0, rates)
    # A parallel product may round up where a rate is nearly 1; prefixes need a row that never rises.
    return jax.lax.cummin(jnp.cumprod(rates, axis=1), axis=1)


def greedy_lengths(
    survival: Float[Array, "S G"], active: Bool[Array, "S"], seconds_by_rows: Float[Array, "rows"]
) -> Int[Array, "S"]:
    """Admit drafts while throughput grows: Algorithm 1 of the paper, exact on current confidences.

    All drafts are sorted by survival (ties: smaller position, then smaller slot; never the token's value) and admitted
    one at a time from Theta = R / seconds(R) on. The first admission that does not increase Theta ends it, even if a
    later one would: looking further would leak the tokens behind the stop.

    Args:
        survival: from `survival`.
        active: slots that take part, R in number.
        seconds_by_rows: time of a round with 0..S*(G+1) rows, never decreasing (`CostCurve.seconds_by_rows`).

    Returns:
        Draft tokens to verify, 0..G. A draft of survival 0 is never admitted.

    Raises:
        ValueError: `seconds_by_rows` does not cover every possible number of rows.

    Example:
        One slot, survival (.8, .72), 1, 1/.5 and 1/.45 seconds for 1, 2 and 3 rows: 1.8 * .5 < 1, so the length is 0
        although both drafts together would give 2.52 * .45 = 1.134.
    """
    slots, block = survival.shape
    if len(seconds_by_rows) != slots * (block + 1) + 1:
        raise ValueError(
            f"seconds for {len(seconds_by_rows)} numbers of rows: expected {slots * (block + 1) + 1}, "
            f"for 0 to {slots} * (1 + {block}) rows."
        )
    ranked, slot_of = _by_survival(survival, active[:, None] & (survival > 0))
    requests = jnp.sum(active)
    admitted = jnp.arange(slots * block + 1)
    expected = requests + jnp.pad(jnp.cumsum(jnp.maximum(ranked, 0.0)), (1, 0))
    # Rows past the last possible one belong to candidates that are none; clipping keeps the lookup in range.
    throughput = expected / seconds_by_rows[jnp.minimum(requests + admitted, len(seconds_by_rows) - 1)]
    count = leading((ranked > 0) & (throughput[1:] > throughput[:-1]))
    return _lengths(slot_of, jnp.arange(slots * block) < count, slots)


def choose_capacity(
    survival: Float[np.ndarray, "S G"],
    num_active: int,
    curve: CostCurve,
    *,
    rate: float = 0.0,
) -> int:
    """Choose the bucket of a round that drafts: the best throughput over the whole cost curve. Runs on the host.

    Step costs are staircases, where the early stop of `greedy_lengths` waits before the first step; this search does
    not. It is exact only on survivals of an earlier round (Appendix A of the paper): they may be two rounds old, which
    also spares the host from waiting for the device. As survival never increases along a row, the K best drafts always
    form prefixes.

    Args:
        survival: of an earlier round; 0 for slots that are known to have ended since.
        num_active: requests of the round, each with one row of its own.
        curve: seconds of a round by bucket.
        rate: tokens that a second brings in the long run. Where no bucket comes up to it, as when few requests run for
            a moment, the bucket of the largest tokens - rate * seconds is chosen: time is worth what it brings
            elsewhere.

    Returns:
        Rows of the round, a bucket of the curve; of equally good ones, the smallest.

    Raises:
        ValueError: the rows that must run do not fit the largest bucket.

    Example:
        Survival ((.9, .81), (.6, .36)) and 1, 1, 1.2 and 2.4 seconds for buckets 2, 3, 4 and 6: throughputs
        2, 2.9, 3.71/1.2 = 3.09 and 4.67/2.4 = 1.95, so the bucket is 4.
    """
    first = bisect.bisect_left(curve.buckets, pick(curve.buckets, num_active, "number of rows of a round"))
    buckets = np.asarray(curve.buckets[first:])
    best = np.sort(np.nan_to_num(survival, nan=0.0).ravel())[::-1]
    gain = np.concatenate([[0.0], np.cumsum(best, dtype=np.float64)])
    drafts = np.minimum(buckets - num_active, num_active * survival.shape[1])
    tokens, seconds = num_active + gain[np.minimum(drafts, best.size)], np.asarray(curve.bucket_seconds[first:])
    throughput = tokens / seconds
    return int(buckets[np.argmax(throughput if np.max(throughput) >= rate else tokens - rate * seconds)])


def fill_capacity(
    survival: Float[Array, "S G"],
    num_valid: Int[Array, "S"],
    active: Bool[Array, "S"],
    capacity: Int[Array, ""] | int,
) -> Int[Array, "S"]:
    """Spend the rows of a round on the drafts most likely to survive. Runs on the device.

    A padded row costs as much as a real one, so capacity is used up while there are valid drafts, even where none is
    expected to survive. Rows of slots that ended since the capacity was chosen go to the others.

    Args:
        survival: of this round, from `survival`.
        num_valid: drafts of each slot that may be verified.
        active: slots that take part; each takes one row of the capacity for its anchor.
        capacity: rows for anchors and drafts (a bucket less the rows that hold prompt tokens). May be traced.

    Returns:
        Draft tokens to verify, 0..num_valid: the first capacity - R of all drafts ordered by survival, then position,
        then slot.

    Example:
        Survival ((.9, .81, .405), (.6, .36, .18)), all valid, capacity 5: three drafts, lengths (2, 1).
    """
    slots, block = survival.shape
    ranked, slot_of = _by_survival(survival, _usable(survival.shape, num_valid, active))
    room = capacity - jnp.sum(active)
    return _lengths(slot_of, (jnp.arange(slots * block) < room) & (ranked >= 0), slots)


def _usable(shape: tuple[int, ...], num_valid: Int[Array, "S"], active: Bool[Array, "S"]) -> Bool[Array, "S G"]:
    """Drafts that may be verified at all."""
    return (jnp.arange(shape[1]) < num_valid[:, None]) & active[:, None]


def _by_survival(
    survival: Float[Array, "S G"], usable: Bool[Array, "S G"]
) -> tuple[Float[Array, "S*G"], Int[Array, "S*G"]]:
    """Order all drafts by survival, position, slot. Returns survivals (-1 for unusable ones, last) and their slots."""
    # Whatever comes in, no draft may be ranked before its predecessor: admitted drafts must be prefixes.
    falling = jax.lax.cummin(jnp.where(jnp.isnan(survival), 0.0, survival), axis=1)
    # Position-major, so that the stable sort leaves ties in the order position, slot.
    flat = jnp.where(usable, falling, -1.0).T.ravel()
    order = jnp.argsort(flat, stable=True, descending=True)
    return flat[order], order % survival.shape[0]


def _lengths(slot_of: Int[Array, "N"], chosen: Bool[Array, "N"], slots: int) -> Int[Array, "S"]:
    """Count the chosen drafts of each slot."""
    return jnp.zeros(slots, jnp.int32).at[slot_of].add(chosen.astype(jnp.int32))


@dataclasses.dataclass(frozen=True)
class NoDraft:
    """Plain decoding: nothing is proposed."""

    def __str__(self) -> str:
        return "none"


@dataclasses.dataclass(frozen=True)
class Fixed:
    """Verify the first `k` drafts of every request.

    Attributes:
        k: drafts, at least 1.
    """

    k: int

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"policy fixed has length {self.k}: expected at least 1 (plain decoding is policy none).")

    def __str__(self) -> str:
        return f"fixed:{self.k}"


@dataclasses.dataclass(frozen=True)
class Threshold:
    """Verify the prefix before the first draft whose predicted accept rate is below `c`, whatever the load.

    Attributes:
        c: in [0, 1]; 0 verifies everything.
    """

    c: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.c <= 1.0:
            raise ValueError(f"policy threshold has confidence {self.c}: expected a probability in [0, 1].")

    def __str__(self) -> str:
        return f"threshold:{self.c}"


@dataclasses.dataclass(frozen=True)
class _Profiled:
    """What the two policies that know the cost of a round share.

    Attributes:
        curve: cost of a round; None where nothing was profiled.
    """

    curve: CostCurve | None = None

    @property
    def verifies_everything(self) -> bool:
        """Without a curve there is no reason to leave a draft out. Whoever runs the policy must say so."""
        return self.curve is None


@dataclasses.dataclass(frozen=True)
class Greedy(_Profiled):
    """Algorithm 1 on the confidences of this round (`greedy_lengths`); the host has to wait for them."""

    def __str__(self) -> str:
        return "greedy"


@dataclasses.dataclass(frozen=True)
class Scheduled(_Profiled):
    """Capacity from the confidences of two rounds ago (`choose_capacity`), filled by this round's (`fill_capacity`).

    Attributes:
        plain: cost of a round that drafts nothing; None where every round drafts.
    """

    plain: CostCurve | None = None

    def __str__(self) -> str:
        return "scheduled"


Policy = NoDraft | Fixed | Threshold | Greedy | Scheduled
"""How many drafts a round verifies."""


def parse_policy(text: str, curve: CostCurve | None = None, plain: CostCurve | None = None) -> Policy:
    """Read a policy from its name: none, fixed:K, threshold:C, greedy or scheduled.

    Args:
        text: the name; `str(policy)` gives it back.
        curve: cost of a round, for greedy and scheduled; the others do not need one.
        plain: cost of a round that drafts nothing, for scheduled.

    Returns:
        The policy.

    Raises:
        ValueError: unknown name, or a number that is missing, superfluous, unreadable or out of range.
    """
    name, colon, number = text.partition(":")
    if name in ("none", "greedy", "scheduled"):
        if colon:
            raise ValueError(f"policy {text!r} has a number: expected just {name!r}.")
        return NoDraft() if name == "none" else Greedy(curve) if name == "greedy" else Scheduled(curve, plain)
    if name not in ("fixed", "threshold"):
        raise ValueError(
            f"unknown policy {text!r}: expected none, fixed:K (drafts), threshold:C (probability), greedy or scheduled."
        )
    try:
        value = int(number) if name == "fixed" else float(number)
    except ValueError:
        wanted = "a whole number of drafts, as in fixed:3" if name == "fixed" else "a probability, as in threshold:0.5"
        raise ValueError(f"policy {text!r} has {number!r} as its number: expected {wanted}.") from None
    return Fixed(int(value)) if name == "fixed" else Threshold(float(value))
