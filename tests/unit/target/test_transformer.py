"""The target's outputs: final norm before the head, taps, and the same numbers from rows and from cached decoding."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_models import VOCAB, WIDTH, random_target

from dspark_jax.nn import run
from dspark_jax.nn.attention import DENSE, make_plan
from dspark_jax.nn.linear import RMSNorm
from dspark_jax.nn.paged import PagedAttention
from dspark_jax.target.transformer import check_tap_ids, create_caches, forward_ragged, forward_rows
from dspark_jax.types import RaggedTokens, TargetTables

LENGTH = 9
TARGET, GEMMA4 = random_target(), random_target(as_gemma4=True)


def tokens(seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, VOCAB, (2, LENGTH)), jnp.int32)


@functools.partial(jax.jit, static_argnames="config")
def forward(params, tables, ids, segments, positions, *, config):
    return forward_rows(config, params, tables, ids, segments, positions, (-1, 0))


def rows(target, ids, segments, positions):
    return forward(target.params, target.tables, ids, segments, positions, config=target.config)


def whole(ids, target=TARGET):
    positions = jnp.tile(jnp.arange(LENGTH, dtype=jnp.int32), (2, 1))
    return rows(target, ids, jnp.ones_like(ids), positions)


def test_br15_the_final_norm_comes_before_the_head():
    """h = (3, 4), identity head: (.42976, .57024); without the norm it would be (.26894, .73106)."""
    tables = TargetTables(embed=jnp.eye(2), head=jnp.eye(2))

    def law(weight):
        normed = run(RMSNorm(0.0), {"weight": jnp.full(2, weight)}, jnp.asarray([3.0, 4.0]))
        return jax.nn.softmax(tables.logits(normed))

    np.testing.assert_allclose(law(1.0), [0.42976, 0.57024], atol=1e-5)
    # Gemma-4 multiplies by the weight; one plus it, as in Gemma 2 and 3, would give (.29974, .70026).
    np.testing.assert_allclose(law(2.0), [0.36223, 0.63777], atol=1e-5)
    assert abs(float(law(1.0)[0]) - 0.26894) == pytest.approx(0.16082, abs=1e-5)


@pytest.mark.parametrize("target", [TARGET, GEMMA4], ids=["llama", "gemma4"])
def test_br15_rebuilt_teacher_equals_the_targets_own_argmax(target):
    """Distributions rebuilt from stored last hidden states, as in training, against cached one-token decoding."""
    ids = tokens()
    stored = np.asarray(whole(ids, target).last_hidden)
    rebuilt = target.tables.logits(jnp.asarray(stored))

    @jax.jit
    def step(params, caches, tokens, position):
        batch = RaggedTokens(tokens=tokens, slots=jnp.arange(2), positions=jnp.full(2, position))
        features, caches = forward_ragged(target.config, params, target.tables, caches, make_plan(batch, 2, 1), (-1, 0))
        return features, target.tables.logits(features.last_hidden), caches

    caches, whole_taps = create_caches(target.config, 2, LENGTH), whole(ids, target).taps
    for position in range(LENGTH):
        features, logits, caches = step(target.params, caches, ids[:, position], jnp.int32(position))
        np.testing.assert_array_equal(jnp.argmax(rebuilt[:, position], -1), jnp.argmax(logits, -1))
        np.testing.assert_allclose(rebuilt[:, position], logits, atol=1e-4)
        np.testing.assert_allclose(whole_taps[:, position], features.taps, atol=1e-4)


def test_taps_are_raw_layer_outputs_in_the_order_asked_for():
    ids = tokens()
    taps = whole(ids).taps
    np.testing.assert_array_equal(taps[..., :WIDTH], TARGET.tables.embed[ids])
    positions = jnp.tile(jnp.arange(LENGTH, dtype=jnp.int32), (2, 1))
    swapped = jax.jit(
        lambda params: forward_rows(TARGET.config, params, TARGET.tables, ids, jnp.ones_like(ids), positions, (0, -1))
    )(TARGET.params)
    np.testing.assert_allclose(swapped.taps, np.roll(taps, WIDTH, -1), atol=1e-5)


@pytest.mark.parametrize("target", [TARGET, GEMMA4], ids=["llama", "gemma4"])
def test_br10_packed_documents_equal_separate_ones(target):
    """Rows of 4 + 5 tokens in one row, positions restarting, against each document alone; padding changes nothing."""
    ids = tokens()
    packed = jnp.concatenate([ids[0, :4], ids[1, :5]])[None]
    together = jnp.concatenate([packed, packed])
    segments = jnp.asarray([[1] * 4 + [2] * 5, [1] * 4 + [0] * 5])
    positions = jnp.tile(jnp.asarray([[0, 1, 2, 3, 0, 1, 2, 3, 4]]), (2, 1))
    got, alone = rows(target, together, segments, positions).last_hidden, whole(ids, target).last_hidden
    np.testing.assert_allclose(got[0, :4], alone[0, :4], atol=1e-5)
    np.testing.assert_allclose(got[0, 4:], alone[1, :5], atol=1e-5)
    np.testing.assert_allclose(got[1, :4], alone[0, :4], atol=1e-5)


def test_br19_an_id_outside_the_table_is_not_a_wrong_row():
    looked_up = jax.jit(TARGET.tables.embed_tokens)(jnp.asarray([0, VOCAB]))
    assert np.isfinite(looked_up[0]).all() and np.isnan(looked_up[1]).all()


@pytest.mark.parametrize("layer", [-2, 1, 2])
def test_taps_that_are_refused(layer):
    with pytest.raises(ValueError, match=rf"cannot tap layer {layer} of a target with 2 layers: allowed are -1"):
        check_tap_ids(TARGET.config, (0, layer))
    check_tap_ids(TARGET.config, (-1, 0))


def test_layers_have_caches_of_their_own_shape():
    """Gemma-4: two K/V heads of width 6 where a layer sees a window, one of width 12 where it sees all."""
    config, paged = dataclasses.replace(GEMMA4.config, num_kv_heads=2), PagedAttention(page_size=4)
    shapes = lambda attention: [jax.tree.leaves(x)[0].shape for x in create_caches(config, 3, 8, attention=attention)]
    assert shapes(DENSE) == [(3, 2, 8, 6), (3, 1, 8, 12)]
    assert shapes(paged) == [(6, 4, 4, 128), (6, 4, 2, 128)]  # keys and values side by side, as wide as the lanes
    wide = dataclasses.replace(config.full_attention, head_dim=200)
    config = dataclasses.replace(config, full_attention=wide)
    assert config.widest_head == 200 and shapes(DENSE)[1] == (3, 1, 8, 200)
    with pytest.raises(ValueError, match="heads of up to 128, found 200: use dense attention"):
        shapes(paged)


def test_embedding_scale_and_soft_cap():
    tables = TargetTables(embed=jnp.eye(2), head=3 * jnp.eye(2), embed_scale=2.0, soft_cap=1.5)
    np.testing.assert_array_equal(tables.embed_tokens(jnp.asarray([1])), [[0, 2]])
    np.testing.assert_allclose(tables.logits(jnp.asarray([1.0, 0])), [1.5 * np.tanh(2), 0], rtol=1e-6)
