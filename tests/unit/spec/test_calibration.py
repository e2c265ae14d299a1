"""Sequential temperature scaling: the right quantity, the right cases, and known faults of a head are found."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.sampling import make_sampling
from dspark_jax.spec.calibration import (
    GRID,
    Proposals,
    accept_rates,
    chance_error,
    fit_temperatures,
    threshold_sweep,
)
from dspark_jax.types import Proposal

STEP = np.log(GRID[1] / GRID[0])


def logit(p):
    p = np.asarray(p, np.float64)
    return np.log(p) - np.log1p(-p)


def rounds(probabilities, accepted, proposed=None, stopped=None):
    """Proposals from confidences and counts."""
    logits = logit(probabilities)
    accepted = np.array(accepted)
    proposed = np.full(len(accepted), logits.shape[1]) if proposed is None else np.array(proposed)
    stopped = np.zeros(len(accepted), bool) if stopped is None else np.array(stopped)
    return Proposals.from_rounds(logits, proposed, accepted, stopped)


def synthetic(temperatures, count=20_000, seed=0):
    """Blocks whose true conditional accept rates are sigmoid(logit / T): a head that is off by exactly these T."""
    rng = np.random.default_rng(seed)
    size = len(temperatures)
    logits = rng.normal(1.5, 1.0, (count, 1)) * np.asarray(temperatures) + rng.normal(0, 0.7, (count, size))
    rates = 1 / (1 + np.exp(-logits / np.asarray(temperatures)))
    accepted = np.cumprod(rng.random((count, size)) < rates, axis=1).sum(1)
    return Proposals.from_rounds(logits, np.full(count, size), accepted, np.zeros(count, bool), rates)


def br31():
    """Ten proposals, c = (.9, .8): four accepted whole, two up to position 1, four not at all."""
    return [[0.9, 0.8]] * 10, [2] * 4 + [1] * 2 + [0] * 4


def test_br31_the_product_is_fitted_from_left_to_right():
    proposals = rounds(*br31())
    first, second = fit_temperatures(proposals)
    assert abs(np.log(first / 5.4190)) < STEP and abs(np.log(second / 2.0)) < 2 * STEP
    before, after = proposals.metrics(), proposals.metrics((first, second))
    np.testing.assert_allclose(before.ece, [0.30, 0.32])
    np.testing.assert_allclose(after.mean_predicted, [0.6, 0.4], atol=1e-3)
    assert np.all(after.ece < 1e-3)


def test_br31_each_slot_alone_is_the_wrong_fit():
    """What a fit of c_2 alone finds (against all blocks, or the survivors) is not what the product needs."""
    proposals = rounds(*br31())
    fitted = fit_temperatures(proposals)
    for aim in (4 / 10, 4 / 6):
        alone = min(GRID, key=lambda t: abs(1 / (1 + np.exp(-logit(0.8) / t)) - aim))
        if aim < 0.5:
            assert alone == GRID[-1], "no temperature takes .8 below one half"
        product = proposals.metrics((1.0, alone)).ece[1]
        assert product > 0.05 > proposals.metrics(fitted).ece[1]


def test_br31_positions_after_an_accepted_stop_token_are_no_cases():
    probabilities, accepted = br31()
    proposals = rounds(probabilities + [[0.9, 0.8]] * 5, accepted + [1] * 5, stopped=[False] * 10 + [True] * 5)
    assert proposals.metrics().count.tolist() == [15, 10]
    first, second = fit_temperatures(proposals)
    # The second position amplifies the grid's rounding at the first: two per cent.
    assert abs(np.log(first / 2.1720)) < STEP and abs(np.log(second / 7.6036)) < 0.02
    np.testing.assert_allclose(proposals.metrics((first, second)).mean_predicted, [11 / 15, 0.4], atol=1e-3)
    wrong = rounds(probabilities + [[0.9, 0.8]] * 5, accepted + [1] * 5)
    assert fit_temperatures(wrong)[1] == GRID[-1] != second, "counted as rejections they would drive T_2 to the end"


def test_positions_after_a_cut_are_no_cases():
    """Five more blocks were cut to one token, which was accepted: the same cases as above, and the same fit."""
    probabilities, accepted = br31()
    more = probabilities + [[0.9, 0.8]] * 5, accepted + [1] * 5
    cut = rounds(*more, proposed=[2] * 10 + [1] * 5)
    assert cut.cases.tolist() == [2] * 10 + [1] * 5
    assert fit_temperatures(cut) == fit_temperatures(rounds(*more, stopped=[False] * 10 + [True] * 5))


def test_positions_after_a_rejection_are_cases():
    """They did not survive; without them the product could not be calibrated."""
    assert rounds([[0.9, 0.8, 0.7]], [1]).metrics().count.tolist() == [1, 1, 1]


def test_a_position_without_cases_keeps_1():
    proposals = rounds([[0.9, 0.8]] * 10, [1] * 6 + [0] * 4, proposed=[1] * 10)
    assert fit_temperatures(proposals)[1] == 1.0


def test_ties_go_to_1():
    """Certain confidences are the same at every temperature."""
    proposals = Proposals.from_rounds(
        np.full((4, 1), np.inf), np.ones(4, int), np.array([1, 1, 0, 1]), np.zeros(4, bool)
    )
    assert fit_temperatures(proposals) == (1.0,)


def test_a_known_fault_of_the_head_is_found():
    true = (2.0, 0.5, 2.5)
    held_out = synthetic(true, seed=1)
    fitted = fit_temperatures(synthetic(true))
    # ECE is flat around its minimum: sampling noise moves the fit by more than the grid does.
    np.testing.assert_allclose(np.log(fitted), np.log(true), atol=0.1)
    before, after = held_out.metrics(), held_out.metrics(fitted)
    assert np.all(before.ece > 0.025) and np.all(after.ece < 0.015)
    np.testing.assert_allclose(after.ece, chance_error(held_out, fitted), atol=0.004)
    # The synthetic rates are the truth here, so the oracle's error is chance.
    oracle = held_out.oracle_metrics()
    np.testing.assert_allclose(oracle.ece, chance_error(held_out, true), atol=0.004)
    assert np.all(after.brier < before.brier) and np.all(oracle.brier <= after.brier + 1e-3)


def test_a_calibrated_head_is_left_nearly_alone():
    np.testing.assert_allclose(np.log(fit_temperatures(synthetic((1.0, 1.0), seed=3))), 0, atol=0.1)


def test_chance_error_is_what_right_predictions_show():
    found = [synthetic((1.0, 1.0), count=2000, seed=seed) for seed in range(40)]
    observed = np.mean([p.metrics().ece for p in found], axis=0)
    np.testing.assert_allclose(observed, np.mean([chance_error(p) for p in found], axis=0), rtol=0.1)


def test_what_cannot_be_fitted():
    with pytest.raises(ValueError, match="nothing to calibrate on"):
        fit_temperatures(rounds([[0.9]], [0], proposed=[0]))
    broken = np.array([[0.0, np.nan]])
    one = np.ones(1, int)
    fit_temperatures(Proposals.from_rounds(broken, one, one, np.zeros(1, bool)))
    with pytest.raises(ValueError, match="NaN"):
        fit_temperatures(Proposals.from_rounds(broken, 2 * one, one, np.zeros(1, bool)))
    for accepted, proposed in (([3], [2]), ([1], [3]), ([-1], [2])):
        with pytest.raises(ValueError, match="impossible counts"):
            rounds([[0.9, 0.8]], accepted, proposed=proposed)


def test_threshold_sweep_by_hand():
    """c = (.9, .8, .5) twice and (.9, .2, .8): accepted 3, 1 and 2 (the last ends there at a stop token)."""
    proposals = rounds([[0.9, 0.8, 0.5], [0.9, 0.8, 0.5], [0.9, 0.2, 0.8]], [3, 1, 2], stopped=[False, False, True])
    points = threshold_sweep(proposals, (0.0, 0.6, 0.85, 1.0))
    assert [(round(3 * p.accepted), round(3 * p.rejected)) for p in points] == [(6, 2), (4, 1), (3, 0), (0, 0)]
    np.testing.assert_allclose([p.acceptance for p in points], [6 / 8, 4 / 5, 1, np.nan])
    cool = threshold_sweep(proposals, (0.6,), temperatures=(1.0, 1.0, 0.1))
    assert cool[0] == points[1], "a coin stays a coin, and (.2, .8) is cut at .2 whatever follows"
    with pytest.raises(ValueError, match=r"threshold is 1\.5"):
        threshold_sweep(proposals, (1.5,))


def test_a_nan_confidence_cuts_in_the_sweep():
    proposals = Proposals.from_rounds(np.array([[2.0, np.nan, 2.0]]), np.array([3]), np.array([3]), np.zeros(1, bool))
    assert threshold_sweep(proposals, (0.0,))[0].accepted == 1


def test_accept_rates_are_the_overlap_of_both_distributions():
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(2, 3, 5)), jnp.float32)
    q = jax.nn.softmax(jnp.asarray(rng.normal(size=(2, 2, 5)), jnp.float32))
    tokens = jnp.asarray([[1, 2], [3, 4]], jnp.int32)
    sampling = make_sampling(2, vocab_size=5, temperature=1.0)
    p = np.asarray(jax.nn.softmax(logits))[:, :2]
    drawn = Proposal(tokens, q, None, jnp.asarray([2, 2]))
    np.testing.assert_allclose(accept_rates(logits, drawn, sampling), np.minimum(p, q).sum(-1), rtol=1e-5)
    certain = Proposal(tokens, None, None, jnp.asarray([2, 2]))
    expected = np.take_along_axis(p, np.asarray(tokens)[..., None], -1)[..., 0]
    np.testing.assert_allclose(accept_rates(logits, certain, sampling), expected, rtol=1e-5)
