"""Decoding statistics against counts done by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dspark_jax.spec.metrics import (
    AcceptanceStatistics,
    auroc,
    bin_index,
    bootstrap_mean,
    bootstrap_ratio,
    confidence_metrics,
    pool,
)


def rounds(accepted, proposed, stopped=None, emitted=None, raw=None, block_size=5):
    accepted = np.array(accepted)
    stopped = np.zeros(len(accepted), bool) if stopped is None else np.array(stopped)
    emitted = accepted + ~stopped if emitted is None else np.array(emitted)
    return AcceptanceStatistics.from_rounds(
        accepted,
        np.array(proposed),
        stopped,
        emitted,
        block_size=block_size,
        num_accepted_raw=None if raw is None else np.array(raw),
    )


def assert_same(a: AcceptanceStatistics, b: AcceptanceStatistics):
    for name, value in vars(a).items():
        np.testing.assert_array_equal(value, getattr(b, name), err_msg=name)


def test_br27_a_round_that_ends_at_a_stop_token():
    """Verified [d1, d2, EOS, d4, d5, bonus]: three tokens, not six, and not four."""
    s = rounds([3], [5], [True], raw=[5])
    assert (s.emitted, s.accepted_length, s.accepted_raw, s.proposed, s.tau) == (3, 3, 5, 3, 3.0)
    np.testing.assert_array_equal(s.proposed_at, [1, 1, 1, 0, 0])
    np.testing.assert_array_equal(s.accepted_at, [1, 1, 1, 0, 0])


def test_br27_regrouping_changes_nothing():
    whole = rounds([3, 2, 1, 0], [5, 5, 5, 5])
    assert (whole.mean_accepted, whole.tau) == (1.5, 2.5)
    batches = [rounds([3, 1], [5, 5]), rounds([2, 0], [5, 5])]
    assert_same(pool(batches, block_size=5), whole)
    assert_same(pool([rounds([k], [5]) for k in (0, 3, 2, 1)], block_size=5), whole)


def test_br27_slot_zero_counts():
    s = rounds([7], [7], block_size=7)
    assert (s.mean_accepted, s.tau) == (7, 8)


def test_both_acceptance_rates_by_hand():
    """Rounds accept 2 of 3, 0 of 3, 3 of 3, 1 of 1 (cut by a schedule) and nothing of nothing."""
    s = rounds([2, 0, 3, 1, 0], [3, 3, 3, 1, 0], block_size=3)
    np.testing.assert_array_equal(s.proposed_at, [4, 3, 3])
    np.testing.assert_array_equal(s.accepted_at, [3, 2, 1])
    np.testing.assert_array_equal(s.reached_at, [4, 2, 2])
    np.testing.assert_allclose(s.conditional_acceptance, [3 / 4, 2 / 2, 1 / 2])
    np.testing.assert_allclose(s.acceptance_by_position, [3 / 4, 2 / 3, 1 / 3])
    assert s.tau == pytest.approx(11 / 5)
    assert s.verify_rate == pytest.approx(11 / 15)
    assert s.mean_proposed == pytest.approx(10 / 5)


def test_emitted_tokens_are_apart_from_accepted_length():
    s = rounds([4, 4], [5, 5], emitted=[5, 2])
    assert (s.accepted_length, s.emitted) == (10, 7)


def test_no_rounds_give_nan_and_not_zero():
    s = AcceptanceStatistics.empty(3)
    assert s.rounds == s.emitted == 0
    assert np.isnan(s.tau) and np.isnan(s.verify_rate) and np.all(np.isnan(s.conditional_acceptance))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(accepted=[4], proposed=[3]), "impossible counts"),
        (dict(accepted=[1], proposed=[6]), "impossible counts"),
        (dict(accepted=[-1], proposed=[3]), "impossible counts"),
        (dict(accepted=[2], proposed=[3], raw=[1]), "impossible counts"),
        (dict(accepted=[2], proposed=[3], emitted=[4]), "exceeds the accepted lengths"),
        (dict(accepted=[2], proposed=[3], stopped=[True], emitted=[3]), "exceeds the accepted lengths"),
    ],
)
def test_impossible_counts_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        rounds(**arguments)


def test_different_blocks_are_not_pooled():
    with pytest.raises(ValueError, match="block sizes 5 and 7"):
        rounds([1], [5]) + rounds([1], [7], block_size=7)


def test_bins_are_closed_below():
    np.testing.assert_array_equal(bin_index(np.array([0.0, 0.049, 0.25, 0.99, 1.0]), 20), [0, 0, 5, 19, 19])


def test_auroc_is_the_chance_of_the_right_order():
    generator = np.random.default_rng(0)
    predicted, observed = generator.integers(0, 40, 60) / 40 + 0.0005, generator.random(60) < 0.4
    pairs = [
        1.0 if p > n else 0.5 if p == n else 0.0
        for p, n in itertools.product(predicted[observed], predicted[~observed])
    ]
    assert auroc(predicted, observed) == pytest.approx(np.mean(pairs))
    assert np.isnan(auroc(predicted, np.ones(60, bool)))


def test_confidence_metrics_by_hand():
    """Two positions; the third proposal was cut after one token, so position 1 has two cases only."""
    logits = np.log(
        np.array([[0.8, 0.5], [0.6, 0.5], [0.6, 0.9]]) / (1 - np.array([[0.8, 0.5], [0.6, 0.5], [0.6, 0.9]]))
    )
    m = confidence_metrics(logits, np.array([2, 0, 1]), np.array([2, 2, 1]))
    np.testing.assert_array_equal(m.count, [3, 2])
    np.testing.assert_allclose(m.mean_predicted, [2 / 3, 0.35])
    np.testing.assert_allclose(m.mean_observed, [2 / 3, 0.5])
    np.testing.assert_allclose(m.ece, [(0.2 + 2 * 0.1) / 3, (0.6 + 0.3) / 2])
    np.testing.assert_allclose(m.brier, [(0.04 + 0.36 + 0.16) / 3, (0.36 + 0.09) / 2])
    np.testing.assert_allclose(m.auroc, [(1 + 0.5) / 2, 1.0])


def test_a_nan_confidence_among_the_cases_is_an_error():
    logits = np.array([[0.0, np.nan]])
    assert confidence_metrics(logits, np.array([1]), np.array([1])).count.tolist() == [1, 0]
    with pytest.raises(ValueError, match="NaN"):
        confidence_metrics(logits, np.array([1]), np.array([2]))


def test_bootstrap_interval_covers_the_truth_about_as_often_as_it_says():
    generator = np.random.default_rng(1)
    hits = 0
    for trial in range(200):
        count = generator.integers(5, 20, 40)
        total = generator.poisson(3.0 * count)
        low, high = bootstrap_ratio(total, count, seed=trial, confidence=0.9, resamples=400)[1:]
        hits += low <= 3.0 <= high
    assert 0.82 <= hits / 200 <= 0.97


def test_bootstrap_is_repeatable_and_weights_prompts_by_their_rounds():
    accepted, count = np.array([10, 100]), np.array([10, 25])
    first = bootstrap_ratio(accepted, count, seed=3)
    assert first == bootstrap_ratio(accepted, count, seed=3)
    assert first.estimate == pytest.approx(110 / 35)
    assert first.low == pytest.approx(1.0) and first.high == pytest.approx(4.0)
    assert bootstrap_mean(np.array([1.0, 3.0]), seed=0).estimate == 2.0
    with pytest.raises(ValueError, match="non-empty"):
        bootstrap_ratio(accepted[:0], count[:0], seed=0)
