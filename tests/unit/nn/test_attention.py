"""Attention against naive loops, and the masks and plans of the docstrings as literal matrices."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.nn.attention import (
    AttentionSpec,
    KVCache,
    cache_attend,
    causal_mask,
    make_plan,
    masked_attention,
    rows_attend,
)
from dspark_jax.types import RaggedTokens


def naive_attention(q, k, v, mask, scale):
    """One query and head at a time, over the keys it sees only; `[Q, N, H]` against `[M, K, H]`."""
    out = np.zeros_like(q, np.float64)
    group = q.shape[1] // k.shape[1]
    for i, head in np.ndindex(q.shape[:2]):
        seen = np.flatnonzero(mask[i])
        if seen.size:
            scores = k[seen, head // group] @ q[i, head] * scale
            weights = np.exp(scores - scores.max())
            out[i, head] = weights @ v[seen, head // group] / weights.sum()
    return out


def matrix(text):
    return np.array([[mark == "1" for mark in line.split()] for line in text.strip().splitlines()])


def test_masked_attention_against_loops():
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, n, h, 5)).astype(np.float32) for n, h in ((3, 6), (7, 2), (7, 2)))
    mask = rng.random((2, 3, 7)) < 0.5
    mask[1, 2] = False
    out = np.asarray(jax.jit(functools.partial(masked_attention, scale=0.3))(q, k, v, mask))
    for row in range(2):
        np.testing.assert_allclose(out[row], naive_attention(q[row], k[row], v[row], mask[row], 0.3), atol=1e-5)
    assert not out[1, 2].any(), "a query that sees nothing yields 0"


def test_a_blind_query_has_finite_gradients():
    mask = jnp.zeros((1, 1, 3), bool)
    q, k = jnp.ones((1, 1, 2, 4)), jnp.ones((1, 3, 1, 4))
    gradients = jax.jit(jax.grad(lambda q, k, v: masked_attention(q, k, v, mask, 1.0).sum(), (0, 1, 2)))(q, k, k)
    assert all(not np.any(np.asarray(g)) for g in gradients)


def test_huge_scores_do_not_overflow():
    q, k = jnp.full((1, 1, 1, 1), 1e4), jnp.asarray([1e4, -1e4, 1e4]).reshape(1, 3, 1, 1)
    v = jnp.asarray([1.0, 5.0, 3.0]).reshape(1, 3, 1, 1)
    assert masked_attention(q, k, v, jnp.ones((1, 1, 3), bool), 1.0).item() == 2.0


def test_causal_mask_of_the_docstring():
    segments, positions = jnp.asarray([[1, 1, 2, 2, 0]]), jnp.asarray([[0, 1, 0, 1, 0]])
    expected = """
        1 . . . .
        1 1 . . .
        . . 1 . .
        . . 1 1 .
        . . . . .
    """
    np.testing.assert_array_equal(causal_mask(positions, segments)[0], matrix(expected))


def test_causal_mask_with_a_window():
    expected = """
        1 . . . .
        1 1 . . .
        . 1 1 . .
        . . 1 1 .
        . . . 1 1
    """
    positions = jnp.arange(5)[None]
    np.testing.assert_array_equal(causal_mask(positions, jnp.ones((1, 5), jnp.int32), 2)[0], matrix(expected))


def test_plan_of_the_docstring():
    batch = RaggedTokens(tokens=jnp.zeros(4, jnp.int32), slots=jnp.asarray([0, 1, 1, 2]), positions=jnp.arange(4))
    plan = make_plan(batch, 2, 2)
    np.testing.assert_array_equal(plan.regions[0].row_of, [[0, 4], [1, 2]])
    np.testing.assert_array_equal(plan.regions[0].offset, [0, 0, 1, 0])
    np.testing.assert_array_equal(plan.visible, [1, 2, 3, 4])


def test_plan_with_slots_out_of_order_and_absent():
    zeros = jnp.zeros(5, jnp.int32)
    batch = RaggedTokens(tokens=zeros, slots=jnp.asarray([2, 2, 0, 3, 3]), positions=zeros)
    plan = make_plan(batch, 3, 3)
    np.testing.assert_array_equal(plan.regions[0].row_of, [[2, 5, 5], [5, 5, 5], [0, 1, 5]])
    np.testing.assert_array_equal(plan.regions[0].offset, [0, 1, 0, 0, 0])


@pytest.mark.parametrize("window", [None, 3])
def test_ragged_chunks_over_a_cache_equal_whole_rows(window):
    """Two slots fed in chunks of 4 and 2 with padding between calls, against causal attention over the whole row."""
    rng = np.random.default_rng(1)
    length, spec = 6, AttentionSpec(scale=0.4, window=window)
    q, k, v = (jnp.asarray(rng.normal(size=(2, length, heads, 5)), jnp.float32) for heads in (4, 2, 2))
    positions = jnp.tile(jnp.arange(length), (2, 1))
    whole, _ = jax.jit(lambda q, k, v: rows_attend(positions, jnp.ones((2, length), jnp.int32))(spec, q, k, v, None))(
        q, k, v
    )

    @jax.jit
    def step(cache, slots, at):
        plan = make_plan(RaggedTokens(jnp.zeros_like(slots), slots, at), 3, 4)
        pick = lambda x: x.at[slots, at].get(mode="fill", fill_value=jnp.nan)
        return cache_attend(plan)(spec, pick(q), pick(k), pick(v), cache)

    cache = KVCache.create(3, 9, 2, 5)
    for start, count in ((0, 4), (4, 2)):
        slots = np.full(10, 3, np.int32)
        at = np.zeros(10, np.int32)
        for n, slot in enumerate((1, 0)):
            slots[n * count : (n + 1) * count], at[n * count : (n + 1) * count] = slot, np.arange(start, start + count)
        out, cache = step(cache, slots, at)
        for n, slot in enumerate((1, 0)):
            np.testing.assert_allclose(
                out[n * count : (n + 1) * count], whole[slot, start : start + count], atol=1e-5, err_msg=f"slot {slot}"
            )
    assert not np.any(np.asarray(cache.k)[2]) and not np.any(np.asarray(cache.k)[:, :, length:]), "padding wrote a row"


def test_cache_drops_what_does_not_fit():
    cache = KVCache.create(2, 3, 1, 1)
    one = jnp.ones((3, 1, 1))
    cache = cache.write(jnp.asarray([0, 2, 1]), jnp.asarray([1, 0, 3]), one, 2 * one)
    np.testing.assert_array_equal(cache.k[:, 0, :, 0], [[0, 1, 0], [0, 0, 0]])
    np.testing.assert_array_equal(cache.v[:, 0, :, 0], [[0, 2, 0], [0, 0, 0]])
