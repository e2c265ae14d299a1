"""What the blocks of a row see in training: context and own block against one dense softmax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.draft.backbone import gather_rows, training_attend
from dspark_jax.draft.eagle3 import shift_left
from dspark_jax.nn.attention import AttentionSpec
from dspark_jax.nn.intervals import DENSE_INTERVALS


@pytest.mark.parametrize("window", [None, 1, 2, 5])
def test_context_and_block_equal_a_dense_mask(window):
    """Against one softmax over [context; all blocks] with the full mask written out cell by cell."""
    rng = np.random.default_rng(0)
    rows, length, size, heads, kv_heads, width = 2, 9, 3, 4, 2, 5
    segments = np.array([[1] * 9, [1] * 4 + [2] * 5])
    positions = np.array([[*range(9)], [*range(4), *range(5)]])
    anchors, keep = np.array([[0, 5, 8], [2, 6, 0]]), np.array([[1, 1, 1], [1, 1, 0]], bool)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    q, k, v = (draw(rows, 3, size, h, width) for h in (heads, kv_heads, kv_heads))
    context = (draw(rows, length, kv_heads, width), draw(rows, length, kv_heads, width))
    dense = np.zeros((rows, 3 * size, length + 3 * size), bool)
    for b, a, i in np.ndindex(rows, 3, size):
        at = positions[b, anchors[b, a]] + i
        for j in range(length):
            inside = j < anchors[b, a] and segments[b, j] == segments[b, anchors[b, a]] and keep[b, a]
            dense[b, a * size + i, j] = inside and (window is None or positions[b, j] > at - window)
        for m in range(size):
            dense[b, a * size + i, length + a * size + m] = window is None or m > i - window

    @jax.jit
    def both(q, k, v, context):
        attend = training_attend(*(jnp.asarray(x) for x in (anchors, keep, segments)), size, DENSE_INTERVALS)
        ours, _ = attend(AttentionSpec(scale=0.4, window=window), q, k, v, context)
        flat = lambda x: x.reshape(rows, 3 * size, -1, width)
        keys, values = (
            jnp.repeat(jnp.concatenate([c, flat(x)], 1), heads // kv_heads, axis=2)
            for c, x in zip(context, (k, v), strict=True)
        )
        scores = jnp.where(dense[:, None], jnp.einsum("bqnh,bmnh->bnqm", flat(q), keys) * 0.4, -jnp.inf)
        return flat(ours), jnp.einsum("bnqm,bmnh->bqnh", jax.nn.softmax(scores, axis=-1), values)

    ours, theirs = both(q, k, v, context)
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_gather_rows():
    values = jnp.arange(8.0).reshape(1, 4, 2)
    picked = gather_rows(values, jnp.asarray([[[3, 0], [4, 1]]]))
    np.testing.assert_array_equal(picked, [[[[6, 7], [0, 1]], [[0, 0], [2, 3]]]])


def test_shift_left_of_the_docstring():
    segments = jnp.asarray([[1, 1, 2, 2]])
    np.testing.assert_array_equal(shift_left(jnp.asarray([[5, 6, 7, 8]]), segments, 1), [[6, 0, 8, 0]])
    np.testing.assert_array_equal(shift_left(jnp.asarray([[5, 6, 7, 8]]), segments, 2), [[0, 0, 0, 0]])
    np.testing.assert_array_equal(shift_left(jnp.asarray([[5, 6, 7, 8]]), segments, 0), [[5, 6, 7, 8]])
