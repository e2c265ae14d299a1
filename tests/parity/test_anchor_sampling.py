"""Which anchors given uniforms choose, against the reference, and what the draw of a row depends on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from goldens import golden_cases

from dspark_jax.training.anchors import candidate_mask, choose_anchors, draw_anchors, row_keys


@pytest.mark.parametrize("case", ["plenty", "few", "none", "short", "len1"])
@pytest.mark.parametrize("folder", golden_cases("anchor_sampling*"), ids=lambda f: f.name)
def test_given_uniforms(folder, case):
    data = np.load(folder / "expected.npz")
    mask = jnp.asarray(data[f"{case}/loss_mask"], bool)
    candidates = candidate_mask(mask, jnp.ones(mask.shape, jnp.int32))
    np.testing.assert_array_equal(candidates, data[f"{case}/candidate_mask"])
    uniforms = jnp.asarray(data[f"{case}/uniforms"])
    anchors = choose_anchors(candidates, uniforms, int(data[f"{case}/num_anchors"]))
    keep = data[f"{case}/keep"]
    np.testing.assert_array_equal(anchors.keep, keep)
    np.testing.assert_array_equal(np.asarray(anchors.index)[keep], data[f"{case}/anchors"][keep])


def test_a_row_draws_the_same_in_any_batch():
    """The draw is a function of (seed, step, row): neither the other rows nor their order matter."""
    rng = np.random.default_rng(0)
    mask, segments = jnp.asarray(rng.random((6, 32)) < 0.8), jnp.ones((6, 32), jnp.int32)
    rows = jnp.asarray([3, 14, 15, 9, 26, 5])

    def draw(order, step=7, seed=1):
        order = jnp.asarray(order)
        return draw_anchors(mask[order], segments[order], row_keys(seed, jnp.int32(step), rows[order]), 5).index

    whole = draw(range(6))
    np.testing.assert_array_equal(draw([4, 2, 0]), whole[jnp.asarray([4, 2, 0])])
    assert not np.array_equal(draw(range(6), step=8), whole)
    assert not np.array_equal(draw(range(6), seed=2), whole)


def test_draws_are_uniform():
    mask = jnp.asarray([[True] * 6 + [False]])
    keys = row_keys(0, jnp.int32(0), jnp.arange(4000))
    draw = jax.vmap(lambda key: draw_anchors(mask, jnp.ones((1, 7), jnp.int32), key[None], 2).index[0])
    counts = np.bincount(np.asarray(draw(keys)).ravel(), minlength=7)
    assert counts[5:].tolist() == [0, 0]
    assert np.abs(counts[:5] - 1600).max() < 5 * np.sqrt(4000 * 0.4 * 0.6)
