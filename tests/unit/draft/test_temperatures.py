"""Confidence temperatures of a drafter: in the file, out of range, and applied where it drafts, only there."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_models import BLOCK, VOCAB, random_drafter, random_target
from tiny_models import write_drafter, write_target

from dspark_jax.draft.loading import config_json, drafter_config, load_drafter, save_drafter, write_temperatures
from dspark_jax.sampling import make_sampling, request_keys
from dspark_jax.target.loading import load_target

RAW = random_drafter("vanilla").config
FITTED = dataclasses.replace(RAW, confidence_temperatures=(2.0, 0.5, 1.0, 4.0))


def propose(config, block_size=BLOCK, temperature=1.0):
    """Proposal after an empty context, of a drafter with this config."""
    drafter, target = random_drafter("vanilla"), random_target()
    functions = dataclasses.replace(drafter.functions, config=config)
    slots = 2
    return functions.propose(
        drafter.params,
        target.tables,
        functions.init(slots, 8),
        jnp.asarray([3, 5]),
        jnp.zeros(slots, jnp.int32),
        jnp.ones(slots, bool),
        request_keys(jnp.arange(slots, dtype=jnp.uint32)),
        make_sampling(slots, vocab_size=VOCAB, temperature=temperature),
        block_size,
    )[1]


def test_the_config_survives_the_file():
    stored = config_json(FITTED)
    assert drafter_config(json.loads(json.dumps(stored)), "x") == FITTED
    # Readers of the plain layout see nothing new but one entry.
    assert {k: v for k, v in stored.items() if k != "dspark_jax"} == config_json(RAW)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"confidence_temperatures": (1.0, 2.0)}, "2 entries for a block of 4"),
        ({"confidence_temperatures": ()}, "0 entries for a block of 4"),
        ({"confidence_temperatures": (1.0, 0.0, 1.0, 1.0)}, "finite numbers above 0"),
        ({"confidence_temperatures": (1.0, -2.0, 1.0, 1.0)}, "finite numbers above 0"),
        ({"confidence_temperatures": (1.0, float("nan"), 1.0, 1.0)}, "finite numbers above 0"),
        ({"confidence_temperatures": (1.0, float("inf"), 1.0, 1.0)}, "finite numbers above 0"),
        ({"confidence_head": False, "confidence_temperatures": (1.0,) * 4}, "no confidence head"),
        ({"confidence_temperatures": (1.0,) * 4, "block_size": 3}, "4 entries for a block of 3"),
    ],
)
def test_values_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(RAW, **changes)


@pytest.mark.parametrize(
    "own, message",
    [
        ({"confidence_temperatures": 2.0}, "some/config.json: confidence_temperatures is 2.0: expected a list"),
        ({"confidence_temperatures": ["hot"] * 4}, "expected a list of numbers"),
        ({"confidence_temperature": [1.0] * 4}, r"\['confidence_temperature'\], which this version does not know"),
    ],
)
def test_entries_that_nobody_reads_are_refused(own, message):
    with pytest.raises(ValueError, match=message):
        drafter_config({**config_json(RAW), "dspark_jax": own}, "some/config.json")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafting_divides_the_logits_and_changes_nothing_else(temperature):
    raw, fitted = propose(RAW, temperature=temperature), propose(FITTED, temperature=temperature)
    divisors = np.asarray(FITTED.confidence_temperatures)
    np.testing.assert_allclose(fitted.confidence_logits, raw.confidence_logits / divisors, rtol=1e-6)
    np.testing.assert_array_equal(fitted.tokens, raw.tokens)
    if temperature:
        np.testing.assert_array_equal(fitted.probs, raw.probs)


def test_a_shorter_block_takes_the_first_ones_and_a_longer_one_is_refused():
    raw, fitted = propose(RAW, 2), propose(FITTED, 2)
    np.testing.assert_allclose(fitted.confidence_logits, raw.confidence_logits / np.asarray([2.0, 0.5]), rtol=1e-6)
    with pytest.raises(ValueError, match=r"block_size is 5, but .* calibrated for 4 positions"):
        propose(FITTED, 5)


def test_training_sees_the_logits_as_they_are():
    drafter, target = random_drafter("vanilla"), random_target()
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, VOCAB, (1, 9)), jnp.int32)
    taps = jnp.asarray(rng.normal(size=(1, 9, 2 * target.config.hidden_size)), jnp.float32)
    logits = [
        dataclasses.replace(drafter.functions, config=config)
        .train_blocks(
            drafter.params,
            target.tables,
            taps,
            tokens,
            jnp.arange(9, dtype=jnp.int32)[None],
            jnp.zeros((1, 9), jnp.int32),
            jnp.asarray([[2, 4]]),
            jnp.ones((1, 2), bool),
            jnp.zeros((1, 2, BLOCK), jnp.int32),
        )
        .confidence_logits
        for config in (RAW, FITTED)
    ]
    np.testing.assert_array_equal(*logits)


def test_a_checkpoint_keeps_everything_but_the_temperatures(tmp_path):
    target = load_target(str(write_target(tmp_path / "target")), dtype=jnp.float32)
    source = write_drafter(tmp_path / "draft", "dspark")
    path = source / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "training": {"step": 7}}))
    (source / "metrics.jsonl").write_text("{}\n")
    before = {file.name: file.read_bytes() for file in source.iterdir()}

    write_temperatures(source, [2.0, 1.5, 3.0], tmp_path / "copy")
    assert {file.name: file.read_bytes() for file in source.iterdir()} == before
    copy = {file.name: file.read_bytes() for file in (tmp_path / "copy").iterdir()}
    assert copy.keys() == before.keys()
    assert all(copy[name] == before[name] for name in before if name != "config.json")
    assert json.loads(copy["config.json"])["training"] == {"step": 7}

    drafter = load_drafter(str(tmp_path / "copy"), target)
    assert drafter.config.confidence_temperatures == (2.0, 1.5, 3.0)
    assert drafter.functions.config == drafter.config
    save_drafter(drafter, tmp_path / "again")
    assert load_drafter(str(tmp_path / "again"), target).config == drafter.config
    jax.tree.map(np.testing.assert_array_equal, drafter.params, load_drafter(str(source), target).params)

    write_temperatures(tmp_path / "copy", [1.0, 1.0, 4.0])
    assert load_drafter(str(tmp_path / "copy"), target).config.confidence_temperatures == (1.0, 1.0, 4.0)


def test_refusals_leave_the_files_alone(tmp_path):
    source = write_drafter(tmp_path / "draft", "dspark")
    before = (source / "config.json").read_bytes()
    with pytest.raises(ValueError, match="2 entries for a block of 3"):
        write_temperatures(source, [1.0, 2.0])
    with pytest.raises(ValueError, match="no confidence head"):
        write_temperatures(write_drafter(tmp_path / "eagle3", "eagle3"), [1.0, 2.0, 3.0])
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "model-00001-of-00002.safetensors").touch()
    with pytest.raises(ValueError, match=r"model-00001-of-00002\.safetensors, which is no part of"):
        write_temperatures(source, [1.0, 2.0, 3.0], tmp_path / "used")
    assert (source / "config.json").read_bytes() == before
