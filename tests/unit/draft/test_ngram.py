"""Prompt lookup: the longest and then the most recent match, and what follows it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_models import random_drafter, random_target

from dspark_jax.draft.loading import functions_for, save_drafter
from dspark_jax.draft.ngram import NgramState, find_match, ngram_drafter
from dspark_jax.sampling import make_sampling, request_keys

TARGET = random_target()


def brute_force(text, last, shortest, longest):
    """End of the best earlier match, or None."""
    for n in range(min(longest, last), shortest - 1, -1):
        for end in range(last - 1, n - 2, -1):
            if list(text[end - n + 1 : end + 1]) == list(text[last - n + 1 : last + 1]):
                return end
    return None


@pytest.mark.parametrize(("shortest", "longest"), [(1, 1), (1, 3), (2, 4)])
def test_matches_are_those_of_a_plain_search(shortest, longest):
    rng = np.random.default_rng(0)
    text = rng.integers(0, 3, (64, 17)).astype(np.int32)
    last = rng.integers(0, 17, 64).astype(np.int32)
    ends, found = jax.jit(find_match, static_argnums=(2, 3))(jnp.asarray(text), jnp.asarray(last), shortest, longest)
    expected = [brute_force(t, n, shortest, longest) for t, n in zip(text, last, strict=True)]
    assert [int(e) if f else None for e, f in zip(ends, found, strict=True)] == expected
    assert None in expected and len(set(expected)) > 5


@pytest.mark.parametrize(
    ("text", "drafts"),
    [
        ([7, 8, 9, 5, 8, 9, 6, 8, 9], [6, 8, 9]),  # the recent one of two equal matches
        ([7, 8, 9, 5, 6, 9, 3, 8, 9], [5, 6, 9]),  # the longer one before the recent one
        ([1, 2, 3, 4, 5, 6], []),  # nothing to look up
        ([4, 4], [4]),  # the text ends before the block
        ([4], []),
    ],
)
def test_drafts_follow_the_match(text, drafts):
    drafter = ngram_drafter(TARGET, block_size=3, min_ngram=1)
    tokens = jnp.zeros((1, 12), jnp.int32).at[0, : len(text)].set(jnp.asarray(text))
    state = NgramState(tokens.at[0, len(text) - 1 :].set(10))  # junk where the anchor belongs and after it
    _, proposal = drafter.functions.propose(
        {}, TARGET.tables, state, jnp.asarray(text[-1:]), jnp.asarray([len(text) - 1]), jnp.asarray([True]),
        request_keys(jnp.zeros(1, jnp.uint32)), make_sampling(1, vocab_size=11, temperature=1.0), 3,
    )  # fmt: skip
    assert proposal.num_valid.tolist() == [len(drafts)]
    assert proposal.tokens[0, : len(drafts)].tolist() == drafts
    assert proposal.probs is None and proposal.confidence_logits is None


def test_settings_out_of_range():
    for settings in ({"min_ngram": 0}, {"min_ngram": 3, "max_ngram": 2}):
        with pytest.raises(ValueError, match="expected 1 <= min_ngram <= max_ngram"):
            ngram_drafter(TARGET, **settings)
    with pytest.raises(ValueError, match="block_size must be at least 1"):
        ngram_drafter(TARGET, block_size=0)


@pytest.mark.parametrize("kind", ["ngram", "lm"])
def test_what_has_no_checkpoint_is_not_saved(kind, tmp_path):
    drafter = random_drafter(kind)
    with pytest.raises(ValueError, match="has no checkpoint of its own: make it with ngram_drafter"):
        save_drafter(drafter, tmp_path / "x")
    assert not (tmp_path / "x").exists()
    with pytest.raises(ValueError, match="has no checkpoint of its own"):
        functions_for(drafter.config)
