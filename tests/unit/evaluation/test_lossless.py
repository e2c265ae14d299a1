"""Comparing speculative outputs with plain decoding: what counts as equal, as rounding, and as a fault."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from decoded import answer, measurement

from dspark_jax.evaluation.lossless import NEAR_TIE, check_lossless
from dspark_jax.evaluation.measure import PLAIN


def check(plain_tokens, tokens, dtype=jnp.float32, gap=1.0, **settings):
    plain = answer([0] * (len(plain_tokens) - 1), plain=True, tokens=plain_tokens, gap=gap)
    ours = answer([1], tokens=tokens, gap=9.0)
    return check_lossless(measurement({PLAIN: [plain], "a": [ours]}, ["x"], **settings), dtype)


def test_equal_outputs():
    result = check([5, 6, 7], [5, 6, 7])
    assert not result.differences
    assert result.statement() == "Lossless: all 1 speculative outputs equal plain decoding, token for token."


@pytest.mark.parametrize(
    ("tokens", "position", "pair"),
    [([9, 6, 7], 0, (5, 9)), ([5, 6, 8], 2, (7, 8)), ([5, 6], 2, (7, None)), ([5, 6, 7, 8], 3, (None, 8))],
)
def test_the_first_difference_is_found(tokens, position, pair):
    difference = check([5, 6, 7], tokens).faults[0]
    assert (difference.system, difference.prompt, difference.position) == ("a", "file:1", position)
    assert (difference.plain_token, difference.token) == pair


def test_float32_excuses_nothing():
    result = check([5, 6], [5, 7], gap=1e-6)
    assert len(result.faults) == 1
    assert "NOT LOSSLESS: 0 of 1" in result.statement() and "token 1: 7 instead of 6" in result.statement()


def test_bfloat16_excuses_near_ties_only():
    near = check([5, 6], [5, 7], jnp.bfloat16, gap=NEAR_TIE)
    assert near.differences and not near.faults
    assert "up to near-ties: 0 of 1" in near.statement()
    assert check([5, 6], [5, 7], jnp.bfloat16, gap=NEAR_TIE * 1.01).faults
    # An output that goes on after plain decoding has stopped is no rounding.
    assert check([5, 6], [5, 6, 7], jnp.bfloat16, gap=0.0).faults
    assert check([5, 6], [5, 7], jnp.bfloat16, gap=float("nan")).faults


def test_sampled_outputs_are_not_compared():
    result = check([5, 6], [5, 7], temperature=1.0)
    assert not result.differences and "temperature 0 only" in result.statement()
    # The engine decodes greedily below 1e-5.
    assert check([5, 6], [5, 7], temperature=1e-6).faults


def test_without_drafters():
    result = check_lossless(measurement({PLAIN: [answer([0], plain=True)]}, ["x"]), jnp.float32)
    assert "no drafter" in result.statement() and not result.faults
