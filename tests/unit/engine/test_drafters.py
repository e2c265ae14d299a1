"""Drafters by name, and language models that may or may not draft for a target."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import pytest
import tiny_models
from random_models import random_target

from dspark_jax.engine.drafters import find_drafter, independent_drafter
from dspark_jax.engine.generate import generate
from dspark_jax.target.loading import load_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_models.write_target(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def target(folder):
    return load_target(str(folder), dtype=jnp.float32)


def test_a_model_that_drafts_for_itself_is_always_right(folder, target):
    drafter = find_drafter(f"lm:{folder}", target)
    assert drafter.name == f"lm:{folder}" and drafter.config.name == "language model"
    assert "head" not in drafter.params, "a tied table is not counted, nor fingerprinted, twice"
    (answer,) = generate(target, drafter, [[5, 6, 7]], max_new_tokens=13, stop_token_ids=())
    assert [r.accepted for r in answer.rounds] == [5, 5]


def test_names(folder, target, tmp_path):
    assert find_drafter("ngram", target).config.name == "n-gram"
    shipped = tiny_models.write_drafter(tmp_path, "mtp")
    assert find_drafter(str(shipped), target).config.name == "MTP"
    with pytest.raises(FileNotFoundError, match="nowhere"):
        find_drafter("lm:./nowhere", target)


def test_models_of_another_vocabulary_are_refused(target):
    with pytest.raises(ValueError, match="table of 11 tokens, target 'random' one of 13"):
        independent_drafter(random_target(11), random_target(13))
    other = tiny_models.tokenizer()
    other.add_tokens(["new"])
    with pytest.raises(ValueError, match=r"token 'new' is 259 for the target and unknown for the model \(1 tokens"):
        independent_drafter(target, dataclasses.replace(target, tokenizer=other))
