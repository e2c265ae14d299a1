"""The sampled vocabulary: exact where it covers everything, unbiased normaliser, labels always present."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.training.columns import SampledVocabulary, draw_columns, frequent_tokens
from dspark_jax.training.vocab_loss import SlotWeights, vocab_loss
from dspark_jax.types import TargetTables

V, D, R = 61, 5, 3


def case(seed=0):
    keys = jax.random.split(jax.random.key(seed), 6)
    return {
        "hidden": jax.random.normal(keys[0], (2, 3, 4, D)),
        "markov": jax.random.normal(keys[1], (2, 3, 4, R)),
        "w2": jax.random.normal(keys[2], (V, R)) * 0.3,
        "target_hidden": jax.random.normal(keys[3], (2, 3, 4, D)),
        "labels": jax.random.randint(keys[4], (2, 3, 4), 0, V),
        "tables": TargetTables(embed=jnp.zeros((V, D)), head=jax.random.normal(keys[5], (V, D))),
    }


WEIGHTS = SlotWeights(cross_entropy=jnp.full((2, 3, 4), 0.1), total_variation=jnp.full((2, 3, 4), 0.9))


def loss(hidden, markov, w2, columns=None, **rest):
    return vocab_loss(
        hidden, markov, w2, rest["target_hidden"], rest["labels"], rest["tables"], WEIGHTS, columns=columns, chunk=2
    )[0]


@pytest.mark.parametrize("cap", [None, 1.5])
def test_all_columns_give_the_exact_loss_and_gradients(cap):
    c = case()
    c["tables"] = c["tables"].replace(soft_cap=cap)
    columns = draw_columns(jax.random.key(1), c["labels"], (), V, V)
    exact = jax.value_and_grad(lambda h, m, w: loss(h, m, w, **rest(c)), (0, 1, 2))
    drawn = jax.value_and_grad(lambda h, m, w: loss(h, m, w, columns, **rest(c)), (0, 1, 2))
    args = (c["hidden"], c["markov"], c["w2"])
    for a, b in zip(jax.tree.leaves(exact(*args)), jax.tree.leaves(drawn(*args)), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def rest(c):
    return {k: c[k] for k in ("target_hidden", "labels", "tables")}


def test_exact_columns_hold_frequent_and_batch_tokens_once():
    tokens = jnp.asarray([[3, 3, 60, 9]])
    columns = draw_columns(jax.random.key(0), tokens, (1, 2, 3), V, 20)
    ids, weights = np.asarray(columns.ids), np.asarray(columns.log_weight)
    assert len(set(ids.tolist())) == 20
    exact = set(ids[weights == 0].tolist())
    assert exact == {1, 2, 3, 9, 60}
    np.testing.assert_allclose(np.exp(weights[weights > 0]), (V - 5) / (20 - 5), rtol=1e-6)
    for token in (1, 2, 3, 9, 60):
        assert ids[int(columns.place[token])] == token


def test_the_normaliser_is_unbiased():
    logits = jax.random.normal(jax.random.key(3), (V,))
    tokens = jnp.asarray([5, 6])

    def estimate(key):
        columns = draw_columns(key, tokens, (0, 1, 2, 3), V, 24)
        return jnp.sum(jnp.exp(logits[columns.ids] + columns.log_weight))

    estimates = jax.vmap(estimate)(jax.random.split(jax.random.key(0), 4000))
    error = float(jnp.std(estimates)) / np.sqrt(4000)
    assert abs(float(jnp.mean(estimates)) - float(jnp.sum(jnp.exp(logits)))) < 4 * error


def test_draws_are_named_by_seed_and_step():
    sampled = SampledVocabulary(count=20, frequent=(1, 2), seed=7)
    draw = lambda step: np.asarray(sampled.draw(jnp.int32(step), jnp.asarray([4]), V).ids)
    np.testing.assert_array_equal(draw(3), draw(3))
    assert set(draw(3).tolist()) != set(draw(4).tolist())


def test_frequent_tokens_breaks_ties_by_id_and_leaves_out_what_never_occurs():
    assert frequent_tokens(np.asarray([0, 0, 1, 0, 2, 0, 0, 1, 0, 2]), 3) == (4, 9, 2)
    assert frequent_tokens(np.asarray([0, 0, 0, 0, 1]), 3) == (4,)
