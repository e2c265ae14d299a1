"""Attention over a slot cache against whole rows, and the plans of the docstrings."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.nn import attention
from dspark_jax.nn.attention import AttentionSpec, KVCache, cache_attend, cache_attention, make_plan
from dspark_jax.nn.intervals import DENSE_INTERVALS, rows_attend
from dspark_jax.types import RaggedTokens


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


@pytest.mark.parametrize("block", [2, 4, 128])
@pytest.mark.parametrize("window", [None, 3])
def test_ragged_chunks_over_a_cache_equal_whole_rows(window, block, monkeypatch):
    """Two slots fed in chunks of 4 and 2 with padding between calls, against causal attention over the whole row.

    The cache's 9 positions are whole blocks of keys, and not.
    """
    monkeypatch.setattr(attention, "KEY_BLOCK", block)
    rng = np.random.default_rng(1)
    length, spec = 6, AttentionSpec(scale=0.4, window=window)
    q, k, v = (jnp.asarray(rng.normal(size=(2, length, heads, 5)), jnp.float32) for heads in (4, 2, 2))
    attend = rows_attend(jnp.ones((2, length), jnp.int32), DENSE_INTERVALS)
    whole, _ = jax.jit(lambda q, k, v: attend(spec, q, k, v, None))(q, k, v)

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


def test_blocks_of_keys_that_only_others_see_change_nothing(monkeypatch):
    """Not one bit, on either side; a query without keys gets zeros."""
    monkeypatch.setattr(attention, "KEY_BLOCK", 4)
    rng = np.random.default_rng(2)
    cache = KVCache(*(jnp.asarray(rng.normal(size=(2, 2, 14, 8)), jnp.float32) for _ in range(2)))
    q = jnp.asarray(rng.normal(size=(2, 3, 4, 8)), jnp.float32)

    @jax.jit
    def attend(begin, end):
        return cache_attention(q, cache, None, jnp.asarray(begin), jnp.asarray(end), 0.3)

    mine, begin = [5, 6, 0], [4, 4, 0]
    alone = attend([begin, [4, 4, 4]], [mine, [5, 5, 5]])
    among_others = attend([begin, [0, 2, 0]], [mine, [14, 3, 14]])
    np.testing.assert_array_equal(alone[0], among_others[0])
    assert not np.any(alone[0, 2]) and np.all(np.abs(alone[0, :2]) > 0)
    assert not np.any(attend([begin, [3, 3, 3]], [[0, 0, 0], [3, 3, 3]])), "nobody sees anything"


def test_cache_drops_what_does_not_fit():
    cache = KVCache.create(2, 3, 1, 1)
    one = jnp.ones((3, 1, 1))
    cache = cache.write(jnp.asarray([0, 2, 1]), jnp.asarray([1, 0, 3]), one, 2 * one)
    np.testing.assert_array_equal(cache.k[:, 0, :, 0], [[0, 1, 0], [0, 0, 0]])
    np.testing.assert_array_equal(cache.v[:, 0, :, 0], [[0, 2, 0], [0, 0, 0]])
