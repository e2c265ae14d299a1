"""Attention over runs of keys: the docstrings' matrices, dense and kernel against naive loops, gradients, merging."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.nn.interval_kernel import KernelIntervals
from dspark_jax.nn.intervals import (
    DENSE_INTERVALS,
    Intervals,
    anchor_intervals,
    causal_intervals,
    merge,
    segment_starts,
)
from dspark_jax.sharding import create_mesh

KERNEL = KernelIntervals(queries=128, keys=128, interpret=True)
# Rows of several blocks, with bounds that leave whole blocks out, partly seen ones, and queries that see nothing.
ROWS, QUERIES, KEYS, HEADS, KV_HEADS, WIDTH = 2, 300, 270, 4, 2, 20


def matrix(text):
    return np.array([[mark == "1" for mark in line.split()] for line in text.strip().splitlines()])


def naive(q, k, v, intervals, scale):
    """One query and head at a time, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out, log_mass = np.zeros(q.shape), np.full(q.shape[:3], -np.inf)
    group = q.shape[2] // k.shape[2]
    for b, i, n in np.ndindex(q.shape[:3]):
        begin, end = int(intervals.begin[b, i]), int(intervals.end[b, i])
        if begin < end:
            scores = k[b, begin:end, n // group] @ q[b, i, n] * scale
            log_mass[b, i, n] = np.log(np.sum(np.exp(scores)))
            out[b, i, n] = np.exp(scores - log_mass[b, i, n]) @ v[b, begin:end, n // group]
    return out, log_mass


@functools.cache
def case():
    rng = np.random.default_rng(0)
    draw = lambda count, heads: jnp.asarray(rng.normal(size=(ROWS, count, heads, WIDTH)), jnp.float32)
    q, k, v = draw(QUERIES, HEADS), draw(KEYS, KV_HEADS), draw(KEYS, KV_HEADS)
    bounds = np.sort(rng.integers(0, KEYS + 1, (2, ROWS, QUERIES)), axis=0)
    bounds[1, 0, :150] = np.minimum(bounds[1, 0, :150], 100)  # these blocks of queries leave blocks of keys out
    bounds[0] = np.minimum(bounds[0], bounds[1])
    bounds[0, 1, 40:50] = bounds[1, 1, 40:50]
    bounds[0, 1, 128:256] = bounds[1, 1, 128:256]  # a whole block that sees nothing
    return q, k, v, Intervals(*(jnp.asarray(x, jnp.int32) for x in bounds))


@pytest.mark.parametrize("attention", [DENSE_INTERVALS, KERNEL], ids=["dense", "kernel"])
def test_against_loops(attention):
    q, k, v, intervals = case()
    out, log_mass = jax.jit(functools.partial(attention, scale=0.3))(q, k, v, intervals)
    expected, expected_mass = naive(q, k, v, intervals, 0.3)
    np.testing.assert_allclose(out, expected, atol=2e-5)
    sees = np.isfinite(expected_mass)
    assert not sees.all()
    np.testing.assert_allclose(np.asarray(log_mass)[sees], expected_mass[sees], atol=2e-5)
    assert np.all(np.asarray(log_mass)[~sees] < -1e20)


def gradients(attention, cotangents):
    """By the sum of both outputs, weighted at random; what sees nothing has no log mass to speak of."""
    q, k, v, intervals = case()

    def loss(q, k, v):
        out, log_mass = attention(q, k, v, intervals, 0.3)
        sees = (intervals.begin < intervals.end)[..., None]
        return jnp.sum(out * cotangents[0]) + jnp.sum(jnp.where(sees, log_mass, 0) * cotangents[1])

    return jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v)


def test_gradients_of_the_kernel_are_those_of_dense_attention():
    rng = np.random.default_rng(1)
    cotangents = [jnp.asarray(rng.normal(size=s), jnp.float32) for s in
                  ((ROWS, QUERIES, HEADS, WIDTH), (ROWS, QUERIES, HEADS))]  # fmt: skip
    for name, ours, theirs in zip(
        "qkv", gradients(KERNEL, cotangents), gradients(DENSE_INTERVALS, cotangents), strict=True
    ):
        theirs = np.asarray(theirs)
        assert np.isfinite(theirs).all() and np.any(theirs)
        np.testing.assert_allclose(ours, theirs, atol=1e-4 * np.abs(theirs).max(), err_msg=name)


@pytest.mark.parametrize("sizes", [(2, 1, 2), (1, 2, 4)], ids=["split-heads", "repeated-heads"])
def test_rows_and_heads_on_a_mesh(sizes):
    """Each device its rows and heads; more devices than K/V heads share them."""
    mesh = create_mesh(**dict(zip(("data", "fsdp", "tensor"), sizes, strict=True)))
    q, k, v, intervals = case()
    with jax.set_mesh(mesh):
        out, log_mass = jax.jit(functools.partial(KERNEL, scale=0.3))(q, k, v, intervals)
    expected, expected_mass = DENSE_INTERVALS(q, k, v, intervals, 0.3)
    np.testing.assert_allclose(out, expected, atol=2e-5)
    np.testing.assert_allclose(log_mass, expected_mass, atol=2e-5)


def test_heads_that_do_not_split_are_refused():
    q, k, v, intervals = case()
    with (
        jax.set_mesh(create_mesh(data=1, tensor=8)),
        pytest.raises(ValueError, match="4 query and 2 K/V heads do not split over a tensor axis of 8"),
    ):
        jax.eval_shape(functools.partial(KERNEL, scale=0.3), q, k, v, intervals)


def test_a_blind_query_has_finite_gradients():
    intervals = Intervals(jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1), jnp.int32))
    q, k = jnp.ones((1, 1, 2, 4)), jnp.ones((1, 3, 1, 4))
    for attention in (DENSE_INTERVALS, KERNEL):

        def merged(q, k, v, attention=attention):
            out, log_mass = attention(q, k, v, intervals, 1.0)
            out, weights = merge(out, log_mass, jnp.zeros((1, 1, 2, 3)), jnp.zeros((1, 1, 2, 3), bool))
            return jnp.sum(out) + jnp.sum(weights)

        found = jax.jit(jax.grad(merged, (0, 1, 2)))(q, k, k)
        assert all(not np.any(np.asarray(g)) for g in found)


def test_huge_scores_do_not_overflow():
    q, k = jnp.full((1, 1, 1, 1), 1e4), jnp.asarray([1e4, -1e4, 1e4]).reshape(1, 3, 1, 1)
    v = jnp.asarray([1.0, 5.0, 3.0]).reshape(1, 3, 1, 1)
    intervals = Intervals(jnp.zeros((1, 1), jnp.int32), jnp.full((1, 1), 3, jnp.int32))
    for attention in (DENSE_INTERVALS, KERNEL):
        assert attention(q, k, v, intervals, 1.0)[0].item() == 2.0


def test_merging_keys_equals_one_softmax_over_all():
    rng = np.random.default_rng(2)
    scores, values = rng.normal(size=(3, 7)), rng.normal(size=(7, 5))
    visible = np.ones((3, 3), bool)
    visible[1, 2] = visible[2] = False
    weights = np.exp(scores[:, :4])
    mass = weights.sum(axis=1, keepdims=True)
    parts = (weights @ values[:4] / mass, np.log(mass[:, 0]), scores[:, 4:])
    out, own = merge(*(jnp.asarray(x, jnp.float32) for x in parts), jnp.asarray(visible))
    everything = np.exp(scores) * np.concatenate([np.ones((3, 4), bool), visible], axis=1)
    expected = everything @ values / everything.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(out + own @ values[4:].astype(np.float32), expected, atol=1e-6)


def test_segment_starts_of_the_docstring():
    np.testing.assert_array_equal(segment_starts(jnp.asarray([[1, 1, 2, 2, 0]])), [[0, 0, 2, 2, 4]])


def test_causal_intervals_of_the_docstring():
    intervals = causal_intervals(jnp.asarray([[1, 1, 2, 0]]))
    np.testing.assert_array_equal(intervals.begin, [[0, 0, 2, 3]])
    np.testing.assert_array_equal(intervals.end, [[1, 2, 3, 3]])
    expected = """
        1 . . . .
        1 1 . . .
        . . 1 . .
        . . 1 1 .
        . . . . .
    """
    np.testing.assert_array_equal(causal_intervals(jnp.asarray([[1, 1, 2, 2, 0]])).mask(5)[0], matrix(expected))


def test_causal_intervals_with_a_window():
    expected = """
        1 . . . .
        1 1 . . .
        . 1 1 . .
        . . 1 1 .
        . . . 1 1
    """
    np.testing.assert_array_equal(causal_intervals(jnp.ones((1, 5), jnp.int32), 2).mask(5)[0], matrix(expected))


def test_anchor_intervals_of_the_docstring():
    segments, keep = jnp.asarray([[1, 1, 1, 2, 2]]), jnp.ones((1, 2), bool)
    mask = anchor_intervals(jnp.asarray([[2, 4]]), keep, segments, 3).mask(5)[0]
    np.testing.assert_array_equal(mask, [*[[1, 1, 0, 0, 0]] * 3, *[[0, 0, 0, 1, 0]] * 3])
    dummy = anchor_intervals(jnp.asarray([[2, 4]]), jnp.asarray([[True, False]]), segments, 3).mask(5)[0]
    assert not dummy[3:].any() and dummy[:3].any()


def test_anchor_intervals_with_a_window():
    """Query k of anchor a sees (a + k - window, a): one context token fewer for every slot further on."""
    ones, keep = jnp.ones((1, 6), jnp.int32), jnp.ones((1, 2), bool)
    mask = anchor_intervals(jnp.asarray([[4, 1]]), keep, ones, 3, 3).mask(6)[0]
    np.testing.assert_array_equal(mask[:3], [[0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0]])
    np.testing.assert_array_equal(mask[3:], [[1, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
