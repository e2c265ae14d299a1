"""One step: global denominators, feature sources, layouts, donation, and steps that must not learn anything."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training_setup import tiny_config, tiny_corpus, tiny_target

from dspark_jax.data.pipeline import BatchSource
from dspark_jax.nn.decoder import is_constant
from dspark_jax.sharding import activation_sharding, create_mesh, tree_shardings
from dspark_jax.target.transformer import forward_rows
from dspark_jax.training.optimizer import OptimizerConfig
from dspark_jax.training.setup import create_step
from dspark_jax.training.step import init_state


def first_batch(config, corpus=None):
    source = BatchSource(corpus or tiny_corpus(), config.batch_size, config.sequence_length, 0, config.packed)
    return source.batch(0)


def parts(batch, count):
    return jax.tree.map(lambda x: np.asarray(x).reshape(count, x.shape[0] // count, *x.shape[1:]), batch)


def one_step(config, batch, *, mesh=None, times=1, params=True, target=None):
    """Run steps on one batch from the initial state; returns (state before, state after, metrics)."""
    target = target or tiny_target()
    step = create_step(config, target, 10)
    mesh = mesh or create_mesh(data=1)
    with jax.set_mesh(mesh):
        before = init_state(step.functions, step.optimizer, 0)
        state = jax.device_put(before, tree_shardings(mesh, before))
        tables = jax.device_put(target.tables, tree_shardings(mesh, target.tables))
        rows = jax.device_put(parts(batch, config.accumulation), activation_sharding(mesh, "accumulated_rows"))
        train = jax.jit(step.train)
        for _ in range(times):
            state, metrics = train(state, rows, tables, target.params if params else None)
    return before, state, jax.device_get(metrics)


def assert_same_step(one, other):
    for x, y in zip(jax.tree.leaves(one[2].terms), jax.tree.leaves(other[2].terms), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(one[2].loss, other[2].loss, rtol=1e-5)
    np.testing.assert_allclose(one[2].grad_norm, other[2].grad_norm, rtol=1e-4)


@pytest.fixture(scope="module")
def plain():
    config = tiny_config()
    return one_step(config, first_batch(config))


def test_a_step_changes_every_parameter_but_those_behind_a_zero(plain):
    before, after, metrics = plain
    assert metrics.applied and int(after.step) == 1 and int(after.skipped) == 0
    names = {jax.tree_util.keystr(p): x for p, x in jax.tree_util.tree_flatten_with_path(after.params)[0]}
    for path, old in jax.tree_util.tree_flatten_with_path(before.params)[0]:
        assert not np.array_equal(names[jax.tree_util.keystr(path)], old), path


def test_accumulation_does_not_change_the_objective(plain):
    """Rows have different numbers of slots: means of means would differ."""
    config = tiny_config(accumulation=4)
    assert_same_step(one_step(config, first_batch(config)), plain)


def test_a_sharded_step_is_the_same_step(plain):
    config = tiny_config()
    mesh = create_mesh(data=2, fsdp=2, tensor=2)
    result = one_step(config, first_batch(config), mesh=mesh)
    assert_same_step(result, plain)
    weight = result[1].params["layers_0"]["mlp"]["up_proj"]["weight"]
    assert weight.addressable_shards[0].data.size == weight.size // 4


def test_cached_features_are_the_online_ones(plain):
    config, target = tiny_config(), tiny_target()
    batch = first_batch(config)
    rows = (jnp.asarray(x) for x in (batch.tokens, batch.segments, batch.positions))
    features = forward_rows(target.config, target.params, target.tables, *rows, (0, 2))
    cached = dataclasses.replace(batch, taps=np.asarray(features.taps), last_hidden=np.asarray(features.last_hidden))
    assert_same_step(one_step(config, cached, params=False), plain)
    with pytest.raises(ValueError, match="carries no features"):
        one_step(config, batch, params=False)


@pytest.mark.parametrize("kind", ["dspark", "eagle3", "mtp"])
def test_br04_a_batch_without_supervised_tokens_teaches_nothing(kind):
    config = tiny_config(kind)
    batch = first_batch(config)
    empty = dataclasses.replace(batch, loss_mask=np.zeros_like(batch.loss_mask))
    before, after, metrics = one_step(config, empty)
    assert metrics.loss == 0 and metrics.grad_norm == 0 and not metrics.applied
    assert int(after.step) == 1 and int(after.skipped) == 1
    unchanged = np.testing.assert_array_equal
    jax.tree.map(unchanged, (before.params, before.opt_state), (after.params, after.opt_state))


def test_bfloat16_keeps_float32_masters():
    config = tiny_config(dtype="bfloat16")
    _, after, metrics = one_step(config, first_batch(config))
    assert metrics.applied and np.isfinite(metrics.loss)
    assert {x.dtype for x in jax.tree.leaves(after.params)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("kind", ["dflash", "eagle3", "mtp"])
def test_other_drafters_learn(kind):
    config = tiny_config(kind)
    batch = first_batch(config)
    first = one_step(config, batch)[2]
    later = one_step(config, batch, times=8)[2]
    assert later.loss < first.loss
    assert float(later.terms.blocks) == float(first.terms.blocks) > 0


@pytest.mark.parametrize("kind", ["dspark", "dflash", "eagle3", "mtp"])
def test_gemma4_drafters_learn_and_keep_their_layer_scalars(kind):
    """Everything else moves, also by weight decay alone; the constants of the layers do not, to the last bit."""
    optimizer = OptimizerConfig(learning_rate=1e-2, warmup=0.2, weight_decay=0.1)
    config, target = tiny_config(kind, optimizer=optimizer), tiny_target(as_gemma4=True)
    batch = first_batch(config)
    before, after, first = one_step(config, batch, target=target)
    later = one_step(config, batch, times=8, target=target)[2]
    assert first.applied and later.loss < first.loss
    constants = 0
    flat, _ = jax.tree_util.tree_flatten_with_path(before.params)
    for (path, old), new in zip(flat, jax.tree.leaves(after.params), strict=True):
        assert np.array_equal(old, new) == is_constant(path), path
        constants += is_constant(path)
    assert constants == 1


def test_mtp_learns_the_targets_distribution_after_the_next_token():
    """One step at position i reads (last hidden i, token i+1) and is taught by the target at i+1 (SPEC §6)."""
    config, target = tiny_config("mtp"), tiny_target()
    batch = first_batch(config)
    before, _, metrics = one_step(config, batch)
    rows = tuple(jnp.asarray(x) for x in (batch.tokens, batch.segments, batch.positions))
    hidden = forward_rows(target.config, target.params, target.tables, *rows).last_hidden
    functions = create_step(config, target, 10).functions
    tokens, segments, positions = rows
    states = functions.train_states(before.params, target.tables, hidden, tokens, positions, segments)[:, :-1, 0]
    draft, teacher = target.tables.logits(states), target.tables.logits(hidden[:, 1:])
    p = jax.nn.softmax(teacher)
    soft = -jnp.sum(p * jax.nn.log_softmax(draft), axis=-1)
    counts = batch.loss_mask[:, :-1] & (batch.segments[:, 1:] == batch.segments[:, :-1])
    np.testing.assert_allclose(metrics.loss, jnp.sum(soft * counts) / batch.tokens.size, rtol=1e-5)
    accept = 1 - jnp.sum(jnp.abs(p - jax.nn.softmax(draft)), axis=-1) / 2
    np.testing.assert_allclose(metrics.terms.accept_rate, [jnp.sum(accept * counts)], rtol=1e-5)
    np.testing.assert_array_equal(metrics.terms.valid, [counts.sum()])
