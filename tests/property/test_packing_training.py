"""Packed rows train like separate ones, and rows with nothing to teach train nothing: losses and gradients."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_models import TAPS, VOCAB, WIDTH, random_drafter, random_target

from dspark_jax.training.anchors import Anchors, block_labels
from dspark_jax.training.losses import LossConfig, block_loss, eagle3_loss
from dspark_jax.types import TargetTables

DOCUMENT, LENGTH, ANCHORS = 5, 10, 8
TABLES: TargetTables = random_target().tables
KINDS = ("rnn", "sliding", "eagle3")


@functools.lru_cache
def objective(kind):
    """Numerators (denominator 1), their terms and gradients of two rows of ten, compiled once a kind."""
    drafter = random_drafter(kind)
    functions, one = drafter.functions, jnp.float32(1)
    config = LossConfig(confidence=1.0 if drafter.config.confidence_head else 0.0)

    def loss(params, row):
        shared = (params, TABLES, row["taps"], row["tokens"], row["positions"], row["segments"])
        if kind == "eagle3":
            states = functions.train_states(*shared)
            return eagle3_loss(
                states, TABLES, row["last_hidden"], row["loss_mask"], row["segments"], 0.8, one, chunk=4
            )  # fmt: skip
        anchors = row["anchors"]
        labels = block_labels(anchors, row["tokens"], row["loss_mask"], row["segments"], drafter.config.block_size)
        outputs = functions.train_blocks(*shared, anchors.index, anchors.keep, labels.tokens)
        return block_loss(outputs, params, TABLES, row["last_hidden"], anchors, labels, config, one, chunk=3)

    return functools.partial(jax.jit(jax.value_and_grad(loss, has_aux=True)), drafter.params)


def documents():
    rng = np.random.default_rng(0)
    draw = lambda width: rng.normal(size=(2, DOCUMENT, width)).astype(np.float32)
    tokens = rng.integers(0, VOCAB, (2, DOCUMENT)).astype(np.int32)
    return {"tokens": tokens, "taps": draw(len(TAPS) * WIDTH), "last_hidden": draw(WIDTH)}


def batch(placed, anchors):
    """Two rows with documents `(row, start, document)` placed in them, junk in the padding, and given anchors."""
    rng = np.random.default_rng(1)
    source = documents()
    row = {
        "tokens": rng.integers(0, VOCAB, (2, LENGTH)).astype(np.int32),
        "taps": rng.normal(size=(2, LENGTH, len(TAPS) * WIDTH)).astype(np.float32),
        "last_hidden": rng.normal(size=(2, LENGTH, WIDTH)).astype(np.float32),
        "segments": np.zeros((2, LENGTH), np.int32),
        "positions": np.zeros((2, LENGTH), np.int32),
        "loss_mask": np.zeros((2, LENGTH), bool),
    }
    for at, start, document in placed:
        part = slice(start, start + DOCUMENT)
        for name, values in source.items():
            row[name][at, part] = values[document]
        row["segments"][at, part] = 1 + start // DOCUMENT
        row["positions"][at, part], row["loss_mask"][at, part] = np.arange(DOCUMENT), True
    index, keep = np.zeros((2, ANCHORS), np.int32), np.zeros((2, ANCHORS), bool)
    for at, chosen in enumerate(anchors):
        index[at, : len(chosen)], keep[at, : len(chosen)] = chosen, True
    row = jax.tree.map(jnp.asarray, row)
    return {**row, "anchors": Anchors(index=jnp.asarray(index), keep=jnp.asarray(keep))}


def assert_close(ours, theirs):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), ours, theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_br10_packed_numerators_equal_the_sum_of_separate_runs(kind):
    """Both documents in one row beside a row of padding, against a row each: same terms, same gradients."""
    run, own = objective(kind), [0, 1, 2, 3]
    packed = run(batch([(0, 0, 0), (0, DOCUMENT, 1)], [[*own, 5, 6, 7, 8], []]))
    separate = run(batch([(0, 0, 0), (1, 0, 1)], [own, own]))
    assert_close(packed, separate)
    (loss, terms), gradients = packed
    expected = 20 if kind != "eagle3" else 2 * sum(4 - t for t in range(4))
    assert loss > 0 and terms.valid.sum() == expected
    assert all(np.any(np.asarray(g)) for g in jax.tree.leaves(gradients)), "every parameter learns something"
    alone = [run(batch([(0, 0, d)], [own, []])) for d in (0, 1)]
    assert_close(packed, jax.tree.map(jnp.add, *alone))


@pytest.mark.parametrize("kind", KINDS)
def test_br04_a_batch_with_no_valid_slot(kind):
    """A prompt cut off before its answer: exactly zero loss and sums, zero and finite gradients."""
    row = batch([(0, 0, 0), (1, 0, 1)], [[], []])
    row["loss_mask"] = jnp.zeros_like(row["loss_mask"])
    (loss, terms), gradients = objective(kind)(row)
    assert loss == 0.0
    for leaf in jax.tree.leaves((terms, gradients)):
        np.testing.assert_array_equal(leaf, jnp.zeros_like(leaf))


@pytest.mark.parametrize("kind", KINDS)
def test_dummies_and_padding_teach_nothing(kind):
    """Fewer anchors than slots, and other tokens and states in the padding: nothing changes."""
    run = objective(kind)
    row = batch([(0, 0, 0)], [[1, 2], []])
    rng = np.random.default_rng(5)
    padding = row["segments"] == 0
    changed = dict(row)
    changed["tokens"] = jnp.where(padding, jnp.asarray(rng.integers(0, VOCAB, padding.shape)), row["tokens"])
    for name in ("taps", "last_hidden"):
        other = jnp.asarray(rng.normal(size=row[name].shape), jnp.float32)
        changed[name] = jnp.where(padding[..., None], other, row[name])
    changed["anchors"] = row["anchors"].replace(index=jnp.where(row["anchors"].keep, row["anchors"].index, 7))
    assert_close(run(row), run(changed))
