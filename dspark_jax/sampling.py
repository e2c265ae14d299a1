"""From logits to tokens: the one set of sampling rules that target and drafters share.

Rejection sampling is exact only if the draft distribution in the accept ratio is the one the draft token was drawn
from, and if the target distribution is the one a plain decoder would draw from. So there is one function for both,
`probabilities`. Randomness is named and not threaded: a draw is a pure function of (request seed, anchor position,
purpose, k), whatever else is in the batch.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Integer, Key

from dspark_jax.types import Sampling

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this mean argmax; the same bound for drafting and verification."""

RESIDUAL_MASS_FLOOR = 1e-8
"""A residual with no more mass than this is rounding noise: the target's own distribution stands in."""


class Purpose(enum.IntEnum):
    """What a draw is for. Two draws of one round never share a random number (FAULTS BR-24)."""

    PROPOSE = 0
    ACCEPT = 1
    RESIDUAL = 2
    BONUS = 3


def make_sampling(
    num_slots: int,
    *,
    vocab_size: int,
    temperature: float | Sequence[float],
    top_k: int | Sequence[int | None] | None = None,
    top_p: float | Sequence[float | None] | None = None,
    min_p: float | Sequence[float | None] | None = None,
) -> Sampling:
    """Check sampling settings on the host and build the device form with its static mode.

    Args:
        num_slots: number of cache slots S; a single value of a setting applies to all of them.
        vocab_size: target vocabulary V, the neutral `top_k`.
        temperature: 0 or more, per slot or for all; below 1e-5 is greedy.
        top_k: keep the k most likely tokens, 1 or more; None is off.
        top_p: keep the smallest set of most likely tokens with at least this mass, in (0, 1]; None is off.
        min_p: keep tokens at least this fraction as likely as the most likely one, in [0, 1); None is off.

    Returns:
        Settings of S rows. Each mode also computes what the modes before it do ("greedy", "plain", "filtered"), only
        with more work, so a program compiled for a wider mode serves the same rows: `sampling.replace(mode=...)`.

    Raises:
        ValueError: a setting outside its range, or a list that does not have one entry per slot.

    Example:
        make_sampling(2, vocab_size=49152, temperature=[0.0, 0.7], top_p=[None, 0.9]).mode == "filtered"
    """
    temperatures = _per_slot("temperature", temperature, num_slots)
    ks = _per_slot("top_k", top_k, num_slots)
    ps = _per_slot("top_p", top_p, num_slots)
    mins = _per_slot("min_p", min_p, num_slots)
    for t, k, p, m in zip(temperatures, ks, ps, mins, strict=True):
        if t is None or not math.isfinite(t) or t < 0:
            raise ValueError(f"temperature is {t}: expected a finite number of at least 0 (0 decodes greedily).")
        if k is not None and (isinstance(k, bool) or k != int(k) or k < 1):
            raise ValueError(f"top_k is {k}: expected a whole number of at least 1; pass None to switch it off.")
        if p is not None and not 0 < p <= 1:
            raise ValueError(f"top_p is {p}: expected a mass in (0, 1]; pass None to switch it off.")
        if m is not None and not 0 <= m < 1:
            raise ValueError(f"min_p is {m}: expected a fraction in [0, 1); pass None to switch it off.")
    full_k = [vocab_size if k is None else min(int(k), vocab_size) for k in ks]
    full_p = [1.0 if p is None else float(p) for p in ps]
    full_min = [0.0 if m is None else float(m) for m in mins]
    sampled = [np.float32(t) >= np.float32(GREEDY_TEMPERATURE) for t in temperatures]
    # A filter on a greedy row changes nothing and must not cost the whole batch the filtered mode.
    filtered = [
        s and (k < vocab_size or p < 1 or m > 0) for s, k, p, m in zip(sampled, full_k, full_p, full_min, strict=True)
    ]
    return Sampling(
        temperature=jnp.asarray(np.array(temperatures, np.float32)),
        top_k=jnp.asarray(np.array(full_k, np.int32)),
        top_p=jnp.asarray(np.array(full_p, np.float32)),
        min_p=jnp.asarray(np.array(full_min, np.float32)),
        mode="filtered" if any(filtered) else "plain" if any(sampled) else "greedy",
    )


def _per_slot(name: str, value: Any, num_slots: int) -> list[Any]:
    """One entry per slot from a single value or a sequence."""
    if value is None or np.ndim(value) == 0:
        return [value] * num_slots
    if len(value) != num_slots:
        raise ValueError(f"{name} has {len(value)} entries for {num_slots} slots: give one each, or a single value.")
    return list(value)


def is_greedy(sampling: Sampling) -> Bool[Array, "S"]:
    """Tell which rows decode by argmax."""
    return sampling.temperature < GREEDY_TEMPERATURE


def probabilities(logits: Float[Array, "S *rows V"], sampling: Sampling) -> Float[Array, "S *rows V"]:
    """Turn logits into the distribution that is sampled: temperature, then top-k, then top-p, then min-p.

    The order is part of the law: with p = (.5, .3, .2), temperature .5 and top-p .6, this order gives (1, 0, 0) and the
    other one (.735, .265, 0). Target and drafter must both come through here (FAULTS BR-22).

    Args:
        logits: soft-cap included; any float type, cast to float32 once.
        sampling: settings of the leading axis S; axes in between share their slot's settings.

    Returns:
        float32 probabilities. Greedy rows are exactly one-hot at the first largest logit. A NaN stays in its own row.

    Raises:
        ValueError: the mode is unknown, or "greedy": there callers compare argmax and build no distribution over V.
    """
    if sampling.mode not in ("plain", "filtered"):
        raise ValueError(
            f"sampling mode is {sampling.mode!r}, but probabilities exist in 'plain' and 'filtered' only: "
            "compare argmax in 'greedy'."
        )
    logits = logits.astype(jnp.float32)
    settings = jax.tree.map(lambda x: x.reshape(x.shape + (1,) * (logits.ndim - 1)), sampling)
    temperature = settings.temperature
    greedy = temperature < GREEDY_TEMPERATURE
    # Distance to the largest logit, then the division: the other way round overflows for logits such as 1e33.
    gap = (jnp.max(logits, axis=-1, keepdims=True) - logits) / jnp.where(greedy, 1.0, temperature)
    weights = jnp.exp(-gap)
    if sampling.mode == "filtered":
        weights = _filter(gap, weights, settings)
    probs = weights / jnp.sum(weights, axis=-1, keepdims=True)
    winner = jnp.argmax(logits, axis=-1, keepdims=True) == jnp.arange(logits.shape[-1])
    return jnp.where(greedy, winner.astype(jnp.float32), probs)


def _filter(gap: Float[Array, "*r V"], weights: Float[Array, "*r V"], settings: Sampling) -> Float[Array, "*r V"]:
    """Zero the weights outside top-k, then outside top-p of what is left, then below min-p."""
    top_k, top_p = settings.top_k.astype(jnp.float32), settings.top_p
    kept = _smallest_set(gap, jnp.ones_like(weights), top_k)
    weights = jnp.where(kept, weights, 0.0)
    kept = _smallest_set(gap, weights, top_p * jnp.sum(weights, axis=-1, keepdims=True))
    # A mass of 1 must keep even the tail that is lost in the rounding of the sum.
    weights = jnp.where(kept | (top_p >= 1.0), weights, 0.0)
    # The most likely token has weight exactly 1.
    return jnp.where(weights >= settings.min_p, weights, 0.0)


def _smallest_set(
    gap: Float[Array, "*r V"], measure: Float[Array, "*r V"], goal: Float[Array, "*#r 1"]
) -> Bool[Array, "*r V"]:
    """Mark the shortest run of tokens, nearest first and equals by id, whose measure reaches the goal.

    Bisection over the bit patterns of the distances (non-negative floats order like their bits) finds the exact border
    in 31 passes; sorting a vocabulary costs several times as much on every kind of device.
    """
    bits = jax.lax.bitcast_convert_type(gap, jnp.int32)

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + ((high - low) >> 1)
        reached = jnp.sum(jnp.where(bits <= middle, measure, 0.0), axis=-1, keepdims=True) >= goal
        return jnp.where(reached, low, middle + 1), jnp.where(reached, middle, high)

    start = jnp.zeros_like(bits[..., :1])
    border, _ = jax.lax.fori_loop(0, 31, halve, (start, jnp.full_like(start, jnp.iinfo(jnp.int32).max)))
    inside, at_border = bits < border, bits == border
    before = jnp.sum(jnp.where(inside, measure, 0.0), axis=-1, keepdims=True)
    tied = jnp.where(at_border, measure, 0.0)
    return inside | (at_border & (before + jnp.cumsum(tied, axis=-1) - tied < goal))


def sample(probs: Float[Array, "*rows V"], uniforms: Float[Array, "*rows"]) -> Int[Array, "*rows"]:
    """Draw by inverse CDF: the first token whose cumulative mass exceeds `uniform * total`.

    Several times cheaper than Gumbel noise over V: one random number a row.

    Args:
        probs: non-negative weights; they need not be normalised.
        uniforms: in [0, 1).

    Returns:
        int32 ids in [0, V), never one of probability zero unless a whole row is zero or NaN.
    """
    ids = jnp.arange(probs.shape[-1], dtype=jnp.int32)
    mass = jnp.cumsum(probs, axis=-1)
    # A parallel cumulative sum need not be exactly flat over zeros, nor end exactly at its maximum: look only at tokens
    # that can be drawn, and fall back on the last of them.
    possible = probs > 0
    above = possible & (mass > uniforms[..., None] * mass[..., -1:])
    first = jnp.min(jnp.where(above, ids, probs.shape[-1]), axis=-1)
    return jnp.minimum(first, jnp.max(jnp.where(possible, ids, 0), axis=-1))


def residual(p: Float[Array, "*rows V"], q: Float[Array, "*rows V"]) -> Float[Array, "*rows V"]:
    """Distribution of the token that replaces a rejected one: norm(max(p - q, 0)), or p where that has no mass.

    Args:
        p: target distribution.
        q: distribution the rejected token was drawn from; zeros give p itself.

    Returns:
        Normalised probabilities.
    """
    excess = jnp.maximum(p - q, 0.0)
    mass = jnp.sum(excess, axis=-1, keepdims=True)
    return jnp.where(mass <= RESIDUAL_MASS_FLOOR, p, excess / jnp.maximum(mass, RESIDUAL_MASS_FLOOR))


def request_keys(seeds: Integer[Array, "S"]) -> Key[Array, "S"]:
    """One key per request from its seed: the root of everything random about it."""
    return jax.vmap(jax.random.key)(seeds)


def purpose_key(
    request_key: Key[Array, ""],
    position: Int[Array, ""] | int,
    purpose: Int[Array, ""] | Purpose,
    k: Int[Array, ""] | int,
) -> Key[Array, ""]:
    """Name one draw of one request.

    Args:
        request_key: from `request_keys`.
        position: position of the round's anchor token. The token drawn right after a prompt of n tokens uses n - 1.
        purpose: what the draw is for.
        k: draft slot it concerns, from 0; the verify length for the bonus token.

    Returns:
        A key that no other (position, purpose, k) of this request shares.
    """
    return jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(request_key, position), purpose), k)


def uniforms(
    keys: Key[Array, "S"],
    positions: Int[Array, "S"],
    purpose: Int[Array, "S"] | Purpose,
    slots: Int[Array, "S G"],
) -> Float[Array, "S G"]:
    """Draw the uniform number of each named (request, anchor position, purpose, draft slot).

    Args:
        keys: request keys.
        positions: anchor positions.
        purpose: what the draws are for, per request or for all.
        slots: draft slots k of each request.

    Returns:
        float32 in [0, 1).
    """

    def one(key: Array, position: Array, purpose: Array, k: Array) -> Array:
        return jax.random.uniform(purpose_key(key, position, purpose, k))

    purposes = jnp.broadcast_to(jnp.asarray(purpose, jnp.int32), positions.shape)
    return jax.vmap(jax.vmap(one, in_axes=(None, None, None, 0)))(keys, positions, purposes, slots)
