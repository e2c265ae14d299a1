"""What devices tell each other while a block is drafted, with the sequential head's tables split and whole."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training_setup import KINDS, VOCAB, tiny_config, tiny_target

from dspark_jax.draft.loading import functions_for
from dspark_jax.engine.abstract import abstract_round
from dspark_jax.engine.state import Limits
from dspark_jax.sharding import create_mesh
from dspark_jax.target.loading import parameter_shapes
from dspark_jax.training.collectives import collectives
from dspark_jax.training.config import drafter_config

SLOTS, TENSOR, RANK = 5, 4, 6
TARGET = tiny_target(num_heads=4, num_kv_heads=2)
DRAFTER = drafter_config(tiny_config(drafter=dataclasses.replace(KINDS["dspark"][0], markov_rank=RANK)), TARGET.config)
FUNCTIONS = functions_for(DRAFTER)


def described(markov_tables, tensor):
    params = jax.eval_shape(lambda: FUNCTIONS.initialise(jax.random.key(0), DRAFTER.feature_width))
    mesh = create_mesh(data=1, tensor=tensor)
    return abstract_round(
        TARGET.config, FUNCTIONS, (parameter_shapes(TARGET.config), params), mesh, slots=SLOTS, max_length=32,
        dtype=jnp.float32, markov_tables=markov_tables,
    )  # fmt: skip


@functools.cache
def drafted(markov_tables, tensor=TENSOR):
    """The compiled program and the block it drafts from random weights and an empty context."""
    engine = described(markov_tables, tensor)
    compiled = engine.lower_propose().compile()
    rng = np.random.default_rng(0)

    def fill(x):
        draw = rng.normal(0, 0.5, x.shape) if jnp.issubdtype(x.dtype, jnp.floating) else np.zeros(x.shape)
        return jax.device_put(draw.astype(x.dtype), x.sharding)

    weights = jax.tree.map(fill, engine.weights)
    slots, memory = jax.jit(lambda: engine.steps.init(VOCAB, engine.slots.stop_ids.shape[1]))()
    slots = dataclasses.replace(slots, done=jnp.zeros_like(slots.done), anchors=jnp.arange(SLOTS, dtype=jnp.int32))
    slots, memory = jax.device_put((slots, memory), jax.tree.map(lambda x: x.sharding, (engine.slots, engine.memory)))
    limits = Limits(jnp.float32(0), jnp.int32(0), jnp.zeros((1,)))
    _, draft = compiled(weights, slots, memory, limits)
    return compiled.as_text(), jax.device_get(draft.proposal)


def in_scan(text):
    """Exchanges of the sequential head's scan: those that happen once a draft token."""
    return [x for x in collectives(text) if x.times == DRAFTER.block_size]


def test_split_tables_exchange_rows_and_choices_once_a_token():
    text, _ = drafted("split")
    found = in_scan(text)
    # The table row of the last token, and each device's likeliest token with its logit: nothing as wide as the
    # vocabulary.
    assert {(x.kind, x.shape) for x in found} == {
        ("all-gather", (SLOTS, TENSOR)),
        ("all-reduce", (SLOTS, RANK)),
    }
    assert len(found) <= 3, [str(x) for x in found]


def test_split_caches_stay_where_they_are():
    """Two K/V heads over two devices: nothing of four dimensions, which caches and scores have, is exchanged."""
    text, _ = drafted("split", 2)
    assert not [str(x) for x in collectives(text) if len(x.shape) > 3]


def test_replicated_tables_gather_logits_once_a_block():
    text, _ = drafted("replicated")
    assert not in_scan(text), [str(x) for x in in_scan(text)]
    gathered = [x for x in collectives(text) if x.kind == "all-gather" and VOCAB in x.shape]
    assert [(math.prod(x.shape), x.times) for x in gathered] == [(SLOTS * DRAFTER.block_size * VOCAB, 1)]


def test_layouts_draft_the_same_blocks():
    _, one = drafted("split", 1)
    assert len(set(one.tokens.reshape(-1).tolist())) > 2
    for layout in ("split", "replicated"):
        _, many = drafted(layout)
        np.testing.assert_array_equal(many.tokens, one.tokens)
        np.testing.assert_allclose(many.confidence_logits, one.confidence_logits, rtol=1e-4, atol=1e-5)


def test_drafters_without_the_head_have_no_such_choice():
    shape = drafter_config(tiny_config("dflash"), TARGET.config)
    functions = functions_for(shape)
    params = jax.eval_shape(lambda: functions.initialise(jax.random.key(0), shape.feature_width))
    with pytest.raises(ValueError, match="no drafter with a sequential head"):
        abstract_round(
            TARGET.config, functions, (parameter_shapes(TARGET.config), params), create_mesh(data=1, tensor=2),
            slots=SLOTS, max_length=32, markov_tables="replicated",
        )  # fmt: skip
