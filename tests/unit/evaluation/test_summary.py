"""Numbers of a measurement against counts done by hand."""

from __future__ import annotations

import numpy as np
import pytest
from decoded import answer, example, measurement

from dspark_jax.evaluation.measure import PLAIN
from dspark_jax.evaluation.summary import OVERALL, summarize


def row(summary, system, domain):
    return next(r for r in summary.rows if (r.system, r.domain) == (system, domain))


def test_rows_go_domain_by_domain():
    rows = [(r.domain, r.system) for r in summarize(example()).rows]
    assert rows == [(d, s) for d in ("math", "chat", OVERALL) for s in (PLAIN, "good", "poor")]


def test_accepted_lengths_and_counts():
    summary = summarize(example())
    good = row(summary, "good", OVERALL)
    # math: rounds of 4 and 4; chat: 2, 2 and 4.
    assert row(summary, "good", "math").tau.estimate == 4
    assert row(summary, "good", "chat").tau.estimate == pytest.approx(8 / 3)
    assert good.tau.estimate == pytest.approx(16 / 5)
    assert good.macro_tau.estimate == pytest.approx((4 + 8 / 3) / 2)
    assert row(summary, "good", "chat").macro_tau is None
    assert (good.prompts, good.statistics.rounds, good.statistics.proposed) == (3, 5, 15)
    assert good.statistics.verify_rate == pytest.approx(16 / 20)
    np.testing.assert_allclose(good.statistics.conditional_acceptance, [1, 3 / 5, 1])
    np.testing.assert_allclose(good.statistics.acceptance_by_position, [1, 3 / 5, 3 / 5])
    assert row(summary, PLAIN, OVERALL).tau.estimate == 1


def test_rates_and_speedup():
    summary = summarize(example())
    assert row(summary, PLAIN, OVERALL).speed.tokens_per_second == pytest.approx(16 / 4)
    assert row(summary, PLAIN, OVERALL).speed.speedup is None
    good = row(summary, "good", OVERALL).speed
    assert (good.tokens, good.decode_seconds, good.prefill_seconds, good.compile_seconds) == (16, 2.0, 1.5, 6.0)
    assert good.speedup.estimate == pytest.approx(2.0)
    assert row(summary, "poor", "math").speed.speedup.estimate == pytest.approx(0.5)


def test_constant_ratios_have_no_width():
    """Plain decoding is exactly twice as slow on every prompt: resampling prompts in pairs leaves 2."""
    low, high = row(summarize(example()), "good", OVERALL).speed.speedup[1:]
    assert (low, high) == (pytest.approx(2.0), pytest.approx(2.0))


def test_neighbours_share_their_batch_seconds():
    """Two prompts in one batch: its seconds count once."""
    plain = [answer([0] * 4, plain=True, decode=8.0), answer([0] * 4, plain=True, decode=8.0)]
    ours = [answer([3], decode=2.0), answer([3], decode=2.0)]
    speed = row(summarize(measurement({PLAIN: plain, "a": ours}, ["x", "x"], batch_of=[0, 0])), "a", "x").speed
    assert (speed.tokens, speed.decode_seconds, speed.compile_seconds) == (8, 2.0, 2.0)
    assert speed.speedup.estimate == pytest.approx(4.0)


def test_first_drafter_is_compared_with_the_others():
    summary = summarize(example())
    assert [(c.system, c.baseline) for c in summary.comparisons] == [("good", "poor")]
    ratio = summary.comparisons[0].ratio
    # poor: math 1, chat (2 + 2 + 4 x 1) / 6.
    assert ratio.estimate == pytest.approx((4 + 8 / 3) / (1 + 8 / 6))
    assert ratio.low <= ratio.estimate <= ratio.high


def test_a_drafter_against_itself():
    answers = [answer([k, 3 - k, 1]) for k in (0, 1, 2, 3)]
    plain = [answer([0] * 6, plain=True)] * 4
    summary = summarize(measurement({PLAIN: plain, "a": answers, "b": answers}, ["x", "x", "y", "y"]))
    assert summary.comparisons[0].ratio == (1, 1, 1)


def test_br27_stop_token_in_the_block():
    """A round that ends at an accepted stop token adds its drafts and nothing else."""
    ours = [answer([3, 2], stopped=True)]
    summary = summarize(measurement({PLAIN: [answer([0] * 6, plain=True)], "a": ours}, ["x"]))
    found = row(summary, "a", "x")
    assert found.tau.estimate == (4 + 2) / 2
    assert found.statistics.emitted == 6
    assert found.emitted_per_round == 3


def test_answers_that_end_at_their_first_token():
    """No rounds, no rate, and no division by zero."""
    empty = [answer([], plain=True, decode=0.0)]
    summary = summarize(measurement({PLAIN: empty, "a": [answer([], decode=0.0)]}, ["x"]))
    found = row(summary, "a", OVERALL)
    assert found.statistics.rounds == 0
    assert np.isnan([found.tau.estimate, found.speed.tokens_per_second, found.speed.speedup.estimate]).all()


def test_intervals_follow_the_seed():
    answers = {PLAIN: [answer([0] * 4, plain=True)] * 8, "a": [answer([k % 4]) for k in range(8)]}
    one, same = (summarize(measurement(answers, ["x"] * 8, seed=3)) for _ in range(2))
    assert [r.tau for r in one.rows] == [r.tau for r in same.rows]
    assert row(one, "a", "x").tau.low < row(one, "a", "x").tau.estimate < row(one, "a", "x").tau.high
