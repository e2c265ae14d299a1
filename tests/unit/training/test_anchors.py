"""Which slots of which blocks are trained: literal masks of the fault reports, and what packing must not change."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.nn.intervals import anchor_intervals
from dspark_jax.training.anchors import (
    Anchors,
    block_labels,
    candidate_mask,
    choose_anchors,
    document_shares,
    draw_anchors,
    row_keys,
    slot_decay,
)


def anchors_at(*index):
    return Anchors(index=jnp.asarray([index], jnp.int32), keep=jnp.ones((1, len(index)), bool))


def test_br05_the_mask_is_read_at_the_label():
    """Mask set on 8..39: the slot whose label is 40 does not count, though it sits on a supervised token itself."""
    mask = jnp.asarray((np.arange(48) >= 8) & (np.arange(48) <= 39))[None]
    ones = jnp.ones((1, 48), jnp.int32)
    labels = block_labels(anchors_at(36, 37, 38), jnp.arange(48)[None], mask, ones, 4)
    np.testing.assert_array_equal(labels.valid[0], [[1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0]])
    np.testing.assert_array_equal(labels.tokens[0, 0], [37, 38, 39, 40])
    candidates = np.flatnonzero(candidate_mask(mask, ones)[0])
    assert candidates.tolist() == list(range(8, 39)), "39 has no supervised successor"


def test_br05_every_counted_label_is_supervised():
    rng = np.random.default_rng(0)
    mask = jnp.asarray(rng.random((5, 40)) < 0.7)
    segments = jnp.asarray(np.repeat([[1] * 17 + [2] * 13 + [3] * 6 + [0] * 4], 5, 0))
    anchors = draw_anchors(mask, segments, row_keys(0, jnp.int32(0), jnp.arange(5)), 9)
    labels = block_labels(anchors, jnp.zeros((5, 40), jnp.int32), mask, segments, 5)
    row, block, slot = np.nonzero(labels.valid)
    label = np.asarray(anchors.index)[row, block] + 1 + slot
    assert len(row) > 30
    assert np.asarray(mask)[row, label].all() and np.asarray(mask)[row, label - 1].all()
    assert (np.asarray(segments)[row, label] == np.asarray(segments)[row, label - slot - 1]).all()
    # Runs are unbroken: a counted slot's neighbour before it counts too.
    valid = np.asarray(labels.valid)
    assert not (valid[..., 1:] & ~valid[..., :-1]).any()
    assert not valid[~np.asarray(anchors.keep)].any()


def test_br10_literal_packing():
    segments, mask = jnp.asarray([[1] * 5 + [2] * 5]), jnp.ones((1, 10), bool)
    allowed = np.flatnonzero(candidate_mask(mask, segments)[0])
    assert allowed.tolist() == [0, 1, 2, 3, 5, 6, 7, 8]
    anchors = anchors_at(*allowed.tolist())
    labels = block_labels(anchors, jnp.arange(10)[None], mask, segments, 4)
    assert labels.valid.sum() == 20
    np.testing.assert_array_equal(labels.valid[0, 3], [1, 0, 0, 0])
    seen = anchor_intervals(anchors.index, anchors.keep, segments, 4).mask(10)[0, ::4]
    assert np.flatnonzero(seen[3]).tolist() == [0, 1, 2]
    assert np.flatnonzero(seen[5]).tolist() == [5]  # anchor 6
    assert not seen[4].any(), "a document's first token has no context"
    whole = block_labels(anchors_at(*range(9)), jnp.arange(10)[None], mask, jnp.ones((1, 10), jnp.int32), 4)
    assert whole.valid.sum() == 30, "what ignoring the border would count"


@pytest.mark.parametrize("mask", [[1, 0, 1, 0, 1], [0, 0, 0, 0, 1], [0, 0, 0, 0, 0], [1, 1, 0, 0, 0]])
def test_br04_rows_with_little_or_nothing_to_teach(mask):
    mask, ones = jnp.asarray([mask], bool), jnp.ones((1, 5), jnp.int32)
    anchors = draw_anchors(mask, ones, row_keys(0, jnp.int32(0), jnp.arange(1)), 3)
    expected = 1 if mask[0, 0] and mask[0, 1] else 0
    assert anchors.keep.sum() == expected
    assert block_labels(anchors, jnp.zeros((1, 5), jnp.int32), mask, ones, 3).valid.sum() == expected


def test_choose_anchors_of_the_docstring():
    anchors = choose_anchors(jnp.asarray([[True, False, True, True]]), jnp.asarray([[0.5, 0.1, 0.2, 0.9]]), 2)
    np.testing.assert_array_equal(anchors.index, [[0, 2]])
    np.testing.assert_array_equal(anchors.keep, [[True, True]])


def test_more_slots_than_candidates():
    anchors = choose_anchors(jnp.asarray([[False, True, False]]), jnp.zeros((1, 3)), 5)
    np.testing.assert_array_equal(anchors.index, [[1, 0, 0, 0, 0]])
    np.testing.assert_array_equal(anchors.keep, [[1, 0, 0, 0, 0]])


def test_candidates_of_the_docstring():
    mask, segments = jnp.ones((1, 5), bool), jnp.asarray([[1, 1, 1, 2, 2]])
    np.testing.assert_array_equal(candidate_mask(mask, segments), [[1, 1, 0, 1]])


def test_a_row_of_one_token_has_no_anchor():
    anchors = draw_anchors(jnp.ones((2, 1), bool), jnp.ones((2, 1), jnp.int32), jax.random.split(jax.random.key(0)), 3)
    assert anchors.index.shape == (2, 3) and not anchors.keep.any()


def test_slot_decay():
    np.testing.assert_allclose(slot_decay(3, 4.0), [1.0, np.exp(-0.25), np.exp(-0.5)], rtol=1e-6)
    np.testing.assert_array_equal(slot_decay(3, None), [1, 1, 1])


def test_document_shares_of_the_docstring():
    segments = jnp.asarray([[1, 1, 1, 1, 2, 2]])
    uniforms = jnp.asarray([[0.1, 0.2, 0.3, 0.4, 0.8, 0.9]])
    found = document_shares(jnp.ones((1, 6), bool), segments, uniforms)
    np.testing.assert_allclose(found, [[0.025, 0.3, 0.575, 0.85, 0.4, 0.95]], atol=1e-6)


def test_every_packed_document_has_its_share():
    """Whatever the draw: the number of a document's anchors is its part of the candidates, give or take one or two."""
    segments = jnp.asarray(np.repeat([1, 2, 3, 4, 0], [40, 9, 25, 3, 5])[None])
    mask = segments > 0
    candidates = np.asarray(candidate_mask(mask, segments))[0]
    owner = np.asarray(segments)[0, :-1]
    counts = np.array([np.sum(candidates & (owner == i + 1)) for i in range(4)])
    assert counts.tolist() == [39, 8, 24, 2]
    draws = set()
    for step in range(8):
        anchors = draw_anchors(mask, segments, row_keys(0, jnp.int32(step), jnp.arange(1)), 20)
        index = np.asarray(anchors.index)[0]
        assert anchors.keep.all() and len(set(index.tolist())) == 20 and candidates[index].all()
        drawn = np.array([np.sum(owner[index] == i + 1) for i in range(4)])
        assert np.all(np.abs(drawn - 20 * counts / counts.sum()) < 2), drawn
        draws.add(tuple(index.tolist()))
    assert len(draws) == 8


def test_a_row_of_one_document_draws_its_smallest_uniforms():
    mask = jnp.ones((2, 30), bool).at[1, 10:15].set(False)
    segments, keys = jnp.ones((2, 30), jnp.int32), row_keys(3, jnp.int32(1), jnp.arange(2))
    uniforms = jax.vmap(lambda key: jax.random.uniform(key, (29,)))(keys)
    expected = choose_anchors(candidate_mask(mask, segments), uniforms, 7)
    found = draw_anchors(mask, segments, keys, 7)
    np.testing.assert_array_equal(found.index, expected.index)
