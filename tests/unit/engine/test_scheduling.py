"""What the scheduler expects of blocks it has not seen, and what it does about it."""

from __future__ import annotations

import itertools

import numpy as np

from dspark_jax.engine.scheduling import FORGETTING, REQUEST_RATE, Scheduling, shortfall
from dspark_jax.spec.schedule import CostCurve

LIKELY, UNLIKELY = np.array([0.9, 0.8]), np.array([0.2, 0.0])
CHEAP, PLAIN = CostCurve((1, 2, 3), (1.0, 1.1, 1.2)), CostCurve((1,), (0.8,))


def scheduling(curve=CHEAP, plain=PLAIN):
    return Scheduling(curve, plain, block=2, limit=2)


def test_nothing_is_known_at_first_and_blocks_are_drafted_in_full():
    assert scheduling().capacity(["a"]) == 3


def test_a_request_begins_at_the_mean_of_all_and_moves_with_its_reports():
    made = scheduling()
    made.report("a", LIKELY)
    np.testing.assert_allclose(made.usual, LIKELY)
    made.report("b", UNLIKELY)
    mean = (LIKELY + UNLIKELY) / 2
    np.testing.assert_allclose(made.usual, mean)
    b = mean + REQUEST_RATE * (UNLIKELY - mean)
    a, b, c = made.forecast(["a", "b", "c"])
    np.testing.assert_allclose(c, mean)
    np.testing.assert_allclose(a, LIKELY + FORGETTING * (mean - LIKELY))
    assert UNLIKELY[0] < b[0] < mean[0]


def test_without_reports_a_forecast_goes_back_to_the_mean():
    made = scheduling()
    for _ in range(50):
        made.report("a", LIKELY)
    made.report("a", UNLIKELY)
    distances = [abs(made.forecast(["a"])[0] - made.usual).max() for _ in range(60)]
    assert all(later < earlier for earlier, later in itertools.pairwise(distances))
    assert distances[-1] < 0.2 * distances[0]


def test_one_poor_block_does_not_end_drafting_and_many_do():
    made = scheduling()
    for _ in range(10):
        made.report("a", LIKELY)
    made.report("a", UNLIKELY)
    assert made.capacity(["a"]) == 3
    for _ in range(50):
        made.report("a", UNLIKELY)
    capacities = [made.capacity(["a"]) for _ in range(100)]
    # A row more than the anchor's takes 1.1 seconds instead of .8 and brings a fifth of a token, or little more.
    assert 0 in capacities and {c for c in capacities if c} <= set(CHEAP.buckets)
    assert capacities.count(0) > 60


def test_shortfall_is_that_of_the_bucket_that_lacks_least():
    curve, likeliest = CostCurve((1, 2, 3), (1.1, 1.8, 1.9)), np.array([0.5, 0.6])
    assert abs(shortfall(likeliest[:1], 1, curve, plain=1.0, worth=1.0) - (0.8 / 0.5 - 1)) < 1e-12
    assert abs(shortfall(likeliest, 1, curve, plain=1.0, worth=1.0) - (0.9 / 0.6 - 1)) < 1e-12
    assert abs(shortfall(likeliest, 1, curve, plain=1.0, worth=2.0) - (1.8 / 0.6 - 1)) < 1e-12
    assert shortfall(likeliest, 1, curve, plain=1.5, worth=1.0) < 0
    assert shortfall(np.zeros(2), 1, curve, plain=1.0, worth=1.0) == np.inf
    assert shortfall(likeliest, 3, curve, plain=1.0, worth=1.0) == np.inf  # no bucket has room for a draft


def test_requests_without_a_plain_curve_always_draft():
    made = scheduling(plain=None)
    for _ in range(50):
        made.report("a", np.zeros(2))
    assert [made.capacity(["a"]) for _ in range(20)] == [1] * 20


def test_where_drafting_pays_a_little_it_is_found_out_again_and_again():
    """Forecasts go wrong by chance; only drafts correct those that are too low (two tokens or none, .5 each)."""
    rng = np.random.default_rng(0)
    made = Scheduling(CostCurve((1, 2, 3), (1.6, 1.65, 1.7)), CostCurve((1,), (1.0,)), block=2, limit=2)
    drafted = 0
    for _ in range(2000):
        if made.capacity(["a"]):
            drafted += 1
            made.report("a", np.full(2, float(rng.random() < 0.5)))
    assert drafted > 1000  # 2 / 1.7 > 1 / 1


def test_few_requests_for_a_moment_do_not_draft_at_the_cost_of_the_others():
    """Alone, 1.5 / 1.4 > 1 / 1; but where four running bring 4 tokens in 1.1 seconds, .4 seconds are worth more."""
    curve, plain = CostCurve((1, 2, 4, 8), (1.3, 1.4, 3.0, 6.0)), CostCurve((1, 4), (1.0, 1.1))
    few, many = scheduling(curve, plain), scheduling(curve, plain)
    for made, running in ((few, ["a"]), (many, ["a", "b", "c", "d"])):
        made.probing.drafts = lambda missing: missing <= 0
        for _ in range(100):
            made.report("a", np.array([0.5, 0.0]))
            made.capacity(running)
    assert few.capacity(["a"]) == 2 and many.capacity(["a"]) == 0
    assert abs(few.tokens / few.seconds - 1.5 / 1.4) < 0.01 and abs(many.tokens / many.seconds - 4 / 1.1) < 0.1


def test_ended_requests_are_forgotten_but_for_the_mean():
    made = scheduling()
    made.report("a", UNLIKELY)
    made.report("b", LIKELY)
    before = made.forecast(["b", "c"])[1]
    np.testing.assert_allclose(made.forecast(["a"])[0], before)


def test_br32_nan_counts_as_lost():
    made = scheduling()
    made.report("a", np.array([0.9, np.nan]))
    np.testing.assert_array_equal(made.usual, [0.9, 0.0])
    np.testing.assert_array_equal(made.forecast(["a"])[0], [0.9, 0.0])
