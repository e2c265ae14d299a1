"""The sequential head: previous tokens, the sampling scan against teacher forcing, and each form by hand."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_models import VOCAB, WIDTH, random_drafter, randomise

from dspark_jax.config import DecoderConfig, DrafterConfig, RopeConfig
from dspark_jax.draft.dspark import DSparkFunctions
from dspark_jax.draft.heads import ConfidenceHead, MarkovHead, sample_block
from dspark_jax.nn import run
from dspark_jax.types import TargetTables

SIZE = 3
FOUR = DrafterConfig(
    kind="dspark", target_layers=2, target_layer_ids=(0,), block_size=SIZE, mask_token_id=1, markov_rank=4,
    decoder=DecoderConfig(
        family="qwen3", vocab_size=4, hidden_size=4, intermediate_size=4, num_layers=1, num_heads=1, num_kv_heads=1,
        head_dim=4, rms_norm_eps=1e-6, rope=RopeConfig(), max_position=16, qk_norm=True,
    ),
)  # fmt: skip


def argmax(logits, k):
    """Draws greedily and hands the logits out in place of the distribution."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), logits


def bias_table():
    """Parameters whose only effect is a bias of 10 at (p, p+1 mod 4)."""
    functions = DSparkFunctions(FOUR)
    params = randomise(jax.eval_shape(lambda key: functions.initialise(key, 4), jax.random.key(0)), 0)
    table = {"markov_w1": {"weight": jnp.eye(4)}, "markov_w2": {"weight": 10 * jnp.roll(jnp.eye(4), 1, axis=0)}}
    return functions, {**params, "markov_head": table}


def test_br07_previous_tokens_start_with_the_anchor():
    """Training: anchor token 2 with labels [3, 0, 1] has previous tokens [2, 3, 0], shown by the rows of W1 = 1."""
    functions, params = bias_table()
    tables = TargetTables(embed=jnp.eye(4), head=jnp.zeros((4, 4)))
    tokens = jnp.asarray([[1, 2, 3, 0, 1]])
    out = jax.jit(functions.train_blocks)(
        params, tables, jnp.ones((1, 5, 4)), tokens, jnp.arange(5)[None], jnp.ones((1, 5), jnp.int32),
        jnp.asarray([[1]]), jnp.ones((1, 1), bool), jnp.asarray([[[3, 0, 1]]]),
    )  # fmt: skip
    np.testing.assert_array_equal(jnp.argmax(out.markov[0, 0], -1), [2, 3, 0])
    np.testing.assert_array_equal(out.markov[0, 0], jnp.eye(4)[jnp.asarray([2, 3, 0])])


def test_br07_drafting_follows_the_same_alignment():
    _, params = bias_table()
    tokens, previous, _ = jax.jit(lambda p, anchor: sample_block(
        FOUR, p, jnp.zeros((1, SIZE, 4)), jnp.zeros((1, SIZE, 4)), anchor, argmax
    ))(params, jnp.asarray([2]))  # fmt: skip
    np.testing.assert_array_equal(tokens, [[3, 0, 1]])
    np.testing.assert_array_equal(previous, [[2, 3, 0]])


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_br07_teacher_forcing_equals_the_scan(kind):
    """With the draws as labels, `teacher_forced` computes the scan's logits."""
    drafter = random_drafter(kind)
    config, weights = drafter.config, drafter.params["markov_head"]
    rng = np.random.default_rng(0)
    base = jnp.asarray(rng.normal(size=(3, 5, VOCAB)), jnp.float32)
    hidden = jnp.asarray(rng.normal(size=(3, 5, WIDTH)), jnp.float32)
    anchors = jnp.asarray([1, 4, 9], jnp.int32)

    @jax.jit
    def both(params):
        tokens, previous, logits = sample_block(config, params, base, hidden, anchors, argmax)
        m = run(MarkovHead(config), params["markov_head"], previous, hidden, method="teacher_forced")
        return tokens, previous, logits, base + m @ params["markov_head"]["markov_w2"]["weight"].T

    tokens, previous, logits, forced = both(drafter.params)
    np.testing.assert_array_equal(previous, np.concatenate([anchors[:, None], tokens[:, :-1]], 1))
    np.testing.assert_allclose(logits, forced, atol=1e-5)
    assert not np.allclose(logits, base, atol=1e-2), "the head must do something here"
    assert set(weights) == {"markov_w1", "markov_w2"} | {"gated": {"gate_proj"}, "rnn": {"joint_proj"}}.get(kind, set())


@pytest.mark.parametrize("kind", ["gated", "rnn"])
def test_each_form_by_hand(kind):
    """SPEC §4 written out, one slot after another."""
    drafter = random_drafter(kind)
    weights = jax.tree.map(np.asarray, drafter.params["markov_head"])
    rng = np.random.default_rng(1)
    hidden, previous = rng.normal(size=(4, WIDTH)).astype(np.float32), np.array([3, 1, 7, 7])
    sigmoid = lambda x: 1 / (1 + np.exp(-x))
    state, expected = np.zeros(3), []
    for h, token in zip(hidden, previous, strict=True):
        row = weights["markov_w1"]["weight"][token]
        if kind == "gated":
            gate = weights["gate_proj"]
            expected.append(sigmoid(gate["weight"] @ np.concatenate([h, row]) + gate["bias"]) * row)
            continue
        joint = weights["joint_proj"]
        z = joint["weight"] @ np.concatenate([state, row, h]) + joint["bias"]
        state = sigmoid(z[:3]) * state + (1 - sigmoid(z[:3])) * np.tanh(z[3:6])
        expected.append(np.tanh(z[6:]))
    head = MarkovHead(drafter.config)
    got = jax.jit(lambda w: run(head, w, jnp.asarray(previous), jnp.asarray(hidden), method="teacher_forced"))(
        drafter.params["markov_head"]
    )
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_a_new_head_is_no_bias_at_all():
    functions = DSparkFunctions(random_drafter("vanilla").config)
    params = jax.jit(lambda: functions.initialise(jax.random.key(0), 2 * WIDTH))()
    assert not np.any(np.asarray(params["markov_head"]["markov_w2"]["weight"]))
    assert np.any(np.asarray(params["markov_head"]["markov_w1"]["weight"]))


def test_br32_confidence_without_a_sequential_head():
    """Rank 0 reads the state alone; with a head it reads the raw table row too, unless the config says no."""
    config = random_drafter("vanilla").config
    rank_0 = dataclasses.replace(config, markov_rank=0)
    assert not rank_0.confidence_features
    hidden, row = jnp.ones((2, WIDTH)), jnp.ones((2, 3))
    for case, table, width in ((rank_0, None, WIDTH), (config, row, WIDTH + 3)):
        params = {"proj": {"weight": jnp.ones((1, width)), "bias": jnp.asarray([0.5])}}
        np.testing.assert_allclose(run(ConfidenceHead(case), params, hidden, table), [width + 0.5] * 2)


def test_br08_every_row_proposes():
    """A drafter whose row r always proposes token r gives [0..N-1]: row 0, the anchor's own, is not thrown away."""
    none = dataclasses.replace(FOUR, markov_rank=0, block_size=7)
    logits = jnp.eye(7)[None]
    tokens, previous, _ = sample_block(none, None, logits, jnp.zeros((1, 7, 4)), jnp.asarray([5]), argmax)
    np.testing.assert_array_equal(tokens, [list(range(7))])
    np.testing.assert_array_equal(previous, [[5, 0, 1, 2, 3, 4, 5]])
