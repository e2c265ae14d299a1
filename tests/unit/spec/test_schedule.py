"""Schedulers against literal matrices: cost curves, survival, both ways to choose lengths, policy names."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.spec import schedule as rules
from dspark_jax.spec.schedule import (
    CostCurve,
    Fixed,
    Greedy,
    NoDraft,
    Scheduled,
    Threshold,
    choose_capacity,
    parse_policy,
)

# Appendix A: SPS(1, 2, 3) = 1, .5, .45.
APPENDIX_A = CostCurve.monotone((1, 2, 3), (1.0, 1 / 0.5, 1 / 0.45))
jit_survival, jit_greedy, jit_fill = (jax.jit(f) for f in (rules.survival, rules.greedy_lengths, rules.fill_capacity))


def logits(rates):
    """Logits of accept rates; 0 and 1 become infinite ones."""
    rates = np.asarray(rates, np.float64)
    with np.errstate(divide="ignore"):
        return jnp.asarray(np.log(rates) - np.log1p(-rates), jnp.float32)


def survival(rates, *, num_valid=None, active=None):
    slots, block = np.shape(rates)
    valid = [block] * slots if num_valid is None else num_valid
    return jit_survival(logits(rates), jnp.asarray(valid), jnp.asarray([True] * slots if active is None else active))


def fill(values, capacity, *, num_valid=None, active=None):
    slots, block = np.shape(values)
    valid = [block] * slots if num_valid is None else num_valid
    active = jnp.asarray([True] * slots if active is None else active)
    return jit_fill(jnp.asarray(values, jnp.float32), jnp.asarray(valid), active, capacity).tolist()


def greedy(values, curve, active=None):
    slots, block = np.shape(values)
    active = jnp.asarray([True] * slots if active is None else active)
    seconds = curve if isinstance(curve, np.ndarray) else curve.seconds_by_rows(slots * (block + 1))
    return jit_greedy(jnp.asarray(values, jnp.float32), active, jnp.asarray(seconds, jnp.float32)).tolist()


class TestCostCurve:
    def test_a_bucket_never_costs_more_than_a_larger_one(self):
        curve = CostCurve.monotone(np.array([1, 2, 4, 8]), np.array([3.0, 9.0, 4.0, 6.0]))
        np.testing.assert_allclose(curve.bucket_seconds, (3.0, 19 / 3, 19 / 3, 19 / 3))

    def test_measurements_that_rise_are_left_alone(self):
        assert CostCurve.monotone((1, 2, 4), (0.1, 0.3, 0.4)) == CostCurve((1, 2, 4), (0.1, 0.3, 0.4))

    def test_noise_does_not_make_a_curve_cheaper(self):
        rng = np.random.default_rng(0)
        curves = [CostCurve.monotone(range(1, 9), rng.normal(1, 0.05, 8)) for _ in range(500)]
        assert abs(np.mean([curve.bucket_seconds for curve in curves]) - 1) < 0.002

    def test_cost_is_that_of_the_bucket(self):
        curve = CostCurve((2, 4, 8), (1.0, 1.5, 4.0))
        assert [curve.seconds(rows) for rows in (0, 1, 2, 3, 4, 5, 8)] == [1.0, 1.0, 1.0, 1.5, 1.5, 4.0, 4.0]
        np.testing.assert_array_equal(curve.seconds_by_rows(5), np.float32([1, 1, 1, 1.5, 1.5, 4]))
        with pytest.raises(ValueError, match=r"9 does not fit the largest bucket 8"):
            curve.seconds(9)
        with pytest.raises(ValueError, match="does not fit"):
            curve.seconds_by_rows(9)
        with pytest.raises(ValueError, match="-1 rows"):
            curve.seconds(-1)

    @pytest.mark.parametrize(
        "buckets, seconds, message",
        [
            ((), (), "at least one bucket"),
            ((1, 2), (1.0,), "2 buckets and 1 measurements"),
            ((2, 1), (1.0, 2.0), "ascending"),
            ((1, 1), (1.0, 2.0), "ascending"),
            ((0, 1), (1.0, 2.0), "from at least 1"),
            ((1, 2, 4), (1.0, float("nan"), 2.0), "positive finite"),
            ((1, 2), (1.0, float("inf")), "positive finite"),
            ((1, 2), (0.0, 1.0), "positive finite"),
        ],
    )
    def test_bad_measurements_are_refused(self, buckets, seconds, message):
        with pytest.raises(ValueError, match=message):
            CostCurve.monotone(buckets, seconds)

    def test_a_falling_curve_must_be_mended_by_name(self):
        with pytest.raises(ValueError, match=r"CostCurve\.monotone"):
            CostCurve((1, 2), (2.0, 1.0))

    def test_is_a_value(self):
        curve = CostCurve.monotone((1, 2, 4), (0.1, 0.1 + 0.2, 1))
        assert CostCurve.from_json(json.loads(json.dumps(curve.to_json()))) == curve
        assert len({curve, CostCurve.from_json(curve.to_json())}) == 1
        with pytest.raises(ValueError, match="rows"):
            CostCurve.from_json({"rows": [1], "seconds": [1.0]})
        with pytest.raises(ValueError, match="fall somewhere"):
            CostCurve.from_json({"buckets": [1, 2], "seconds": [2.0, 1.0]})


class TestSurvival:
    def test_br32_edges(self):
        rates = [[0.9, 0.8, 0.5], [0.9, 0.0, 0.8], [0.9, np.nan, 0.8], [np.nan] * 3, [1.0, 1.0, 1.0]]
        expected = [[0.9, 0.72, 0.36], [0.9, 0, 0], [0.9, 0, 0], [0, 0, 0], [1, 1, 1]]
        np.testing.assert_allclose(survival(rates), expected, atol=1e-6)

    def test_invalid_and_inactive_drafts_have_none(self):
        rates = [[0.5, 0.5, 0.5], [0.5, 0.5, 0.5], [0.5, 0.5, np.nan]]
        values = survival(rates, num_valid=[1, 3, 0], active=[True, False, True])
        np.testing.assert_allclose(values, [[0.5, 0, 0], [0, 0, 0], [0, 0, 0]], atol=1e-7)

    def test_never_rises_although_rates_are_all_but_one(self):
        rates = 1 - np.random.default_rng(0).uniform(0, 3e-7, (40, 16))
        assert np.all(np.diff(survival(rates), axis=1) <= 0)


class TestGreedy:
    @pytest.mark.parametrize("second", [0.0, 0.9, 1.0])
    def test_appendix_a_does_not_look_behind_the_stop(self, second):
        assert greedy(survival([[0.8, second]]), APPENDIX_A) == [0]

    def test_admits_while_throughput_grows(self):
        # 2, 2.9, 3.71, 4.31 and 4.67 tokens for 2 to 6 rows.
        curve = CostCurve((4, 6), (1.0, 2.0))
        values = [[0.9, 0.81], [0.6, 0.36]]
        assert greedy(values, curve) == [2, 0]
        assert greedy(values, CostCurve((4, 5, 6), (1.0, 1.1, 1.3))) == [2, 1]
        assert greedy(values, CostCurve((6,), (1.0,))) == [2, 2]

    def test_an_admission_that_changes_nothing_is_the_last(self):
        # Theta 1, then 1.5/1.5 = 1: not an increase, although the third row would be free.
        assert greedy([[0.5, 0.5]], CostCurve((1, 3), (1.0, 1.5))) == [0]
        assert greedy([[0.625, 0.5]], CostCurve((1, 3), (1.0, 1.5))) == [2]

    def test_ties_go_to_the_smaller_position_then_slot(self):
        flat = [[0.5, 0.5], [0.5, 0.5]]
        for admitted, lengths in enumerate(([0, 0], [1, 0], [1, 1], [2, 1], [2, 2])):
            seconds = np.where(np.arange(7) <= 2 + admitted, 1.0, 100.0)
            assert greedy(flat, seconds) == lengths

    def test_bad_slots_take_no_part_and_change_nothing(self):
        curve = CostCurve((16,), (1.0,))
        values = survival([[0.9, 0.8], [np.nan, 0.9], [0.9, 0.9], [0.7, np.nan]], active=[True, True, False, True])
        assert greedy(values, curve, [True, True, False, True]) == [2, 0, 0, 1]
        assert greedy(np.full((2, 2), np.nan), CostCurve((6,), (1.0,))) == [0, 0]
        assert greedy(values, curve, [False] * 4) == [0] * 4

    def test_costs_that_fall_do_not_admit_what_cannot_be_verified(self):
        assert greedy([[0.5, 0.0]], np.array([1.0, 1.0, 0.9, 0.5])) == [1]

    def test_incomplete_costs_are_refused(self):
        with pytest.raises(ValueError, match="expected 7"):
            greedy([[0.5, 0.5], [0.5, 0.5]], np.ones(6))


class TestChooseCapacity:
    def test_appendix_a_on_live_confidences(self):
        assert choose_capacity(np.array([[0.8, 0.72]]), 1, APPENDIX_A) == 3
        assert choose_capacity(np.array([[0.8, 0.0]]), 1, APPENDIX_A) == 1

    def test_looks_over_a_step_of_the_staircase(self):
        curve = CostCurve((2, 3, 4, 6), (1.0, 1.0, 1.2, 2.4))
        values = np.array([[0.9, 0.81], [0.6, 0.36]], np.float32)
        assert choose_capacity(values, 2, curve) == 4
        assert choose_capacity(values, 2, CostCurve((2, 3, 4, 6), (1.0, 2.0, 2.0, 2.0))) == 6

    def test_equally_good_buckets_give_the_smallest(self):
        assert choose_capacity(np.zeros((2, 2)), 2, CostCurve((1, 2, 4, 8), (1.0, 1.0, 1.0, 1.0))) == 2
        assert choose_capacity(np.full((1, 3), np.nan), 1, CostCurve((4, 8), (1.0, 1.0))) == 4
        # Rows beyond the last draft bring nothing.
        assert choose_capacity(np.full((1, 2), 0.9), 1, CostCurve((2, 3, 8), (1.0, 1.0, 1.0))) == 3

    def test_drafts_of_ended_requests_are_not_counted_beyond_what_the_others_can_hold(self):
        assert choose_capacity(np.full((4, 2), 0.9), 1, CostCurve((1, 3, 9), (1.0, 1.0, 1.001))) == 3
        assert choose_capacity(np.full((4, 2), 0.9), 0, CostCurve((1, 3), (1.0, 1.0))) == 1

    def test_time_is_worth_what_it_brings_in_the_long_run(self):
        curve, values = CostCurve((1, 2, 4), (1.2, 1.3, 1.9)), np.array([[0.6, 0.5, 0.4]])
        # Throughputs 1/1.2 < 1.6/1.3 < 2.5/1.9 decide up to 1.3; at 1.6, -.92, -.48, -.54; at 7, -7.4 and less.
        rates = (0.0, 1.3, 1.6, 3.0, 7.0)
        assert [choose_capacity(values, 1, curve, rate=r) for r in rates] == [4, 4, 2, 2, 1]

    def test_what_must_run_must_fit(self):
        with pytest.raises(ValueError, match="5 does not fit the largest bucket 4"):
            choose_capacity(np.zeros((5, 1)), 5, CostCurve((4,), (1.0,)))

    def test_budgets_shrink_as_load_grows(self):
        """Fixed cost until 32 rows, then proportional: every draft at low load, next to none at high load."""
        buckets = np.arange(1, 513)
        curve = CostCurve.monotone(buckets, np.maximum(32, buckets) + 0.01 * buckets)
        row = 0.8 ** np.arange(1, 8)
        budgets = [choose_capacity(np.tile(row, (load, 1)), load, curve) / load - 1 for load in range(1, 65)]
        assert np.all(np.diff(budgets) <= 1e-9)
        assert budgets[0] == 7 and budgets[3] == 7 and 2 < budgets[7] < 4 and budgets[-1] == 0


class TestFillCapacity:
    def test_br34_ranks_by_current_survival(self):
        now = [[0.9, 0.81, 0.405], [0.6, 0.36, 0.18]]
        old = [[0.3, 0.06, 0.03], [0.95, 0.855, 0.7695]]
        assert fill(now, 2 + 3) == [2, 1]
        assert fill(old, 2 + 3) == [0, 3]  # what ranking by the old confidences would give

    def test_br34_ties_go_to_the_smaller_position_then_slot(self):
        tied = [[0.5, 0.25], [0.5, 0.25]]
        assert [fill(tied, 2 + k) for k in range(5)] == [[0, 0], [1, 0], [1, 1], [2, 1], [2, 2]]
        assert [fill(np.ones((2, 2)), 2 + k) for k in range(5)] == [[0, 0], [1, 0], [1, 1], [2, 1], [2, 2]]

    def test_br34_an_ended_slot_frees_its_rows(self):
        now = [[0.9, 0.81, 0.405], [0.6, 0.36, 0.18], [0.99, 0.98, 0.97]]
        assert fill(now, 3 + 2) == [0, 0, 2]
        assert fill(now, 3 + 2, active=[True, True, False]) == [2, 1, 0]

    def test_capacity_of_any_size(self):
        values = [[0.9, 0.8], [0.7, 0.6]]
        assert fill(values, 0) == fill(values, 1) == fill(values, 2) == [0, 0]
        assert fill(values, 3) == [1, 0]
        assert fill(values, 6) == fill(values, 1000) == [2, 2]
        assert fill(values, 6, active=[False, False]) == [0, 0]

    def test_rounding_goes_to_valid_drafts_of_no_promise(self):
        values = [[0.0, 0.0, 0.0], [0.9, 0.0, 0.0], [np.nan] * 3]
        assert fill(values, 3 + 4, num_valid=[3, 1, 2]) == [2, 1, 1]
        assert fill(values, 3 + 9, num_valid=[3, 1, 2]) == [3, 1, 2]

    def test_lengths_are_prefixes_even_of_rising_values(self):
        assert fill([[0.2, 0.9], [0.5, 0.1]], 2 + 1) == [0, 1]
        assert fill([[np.nan, 0.9], [0.5, 0.1]], 2 + 2) == [0, 2]

    def test_one_program_serves_every_capacity(self):
        traced = []

        @jax.jit
        def counted(*arguments):
            traced.append(1)
            return rules.fill_capacity(*arguments)

        values, valid, active = jnp.array([[0.5, 0.4]]), jnp.array([2]), jnp.array([True])
        assert [counted(values, valid, active, jnp.int32(c)).tolist() for c in (1, 2, 3)] == [[0], [1], [2]]
        assert len(traced) == 1


class TestPolicies:
    @pytest.mark.parametrize(
        "policy", [NoDraft(), Fixed(3), Threshold(0.25), Threshold(0.1234567891), Greedy(), Scheduled()]
    )
    def test_names_are_read_back(self, policy):
        assert parse_policy(str(policy)) == policy

    def test_the_curve_reaches_those_who_use_it(self):
        assert parse_policy("scheduled", APPENDIX_A) == Scheduled(APPENDIX_A)
        assert parse_policy("greedy", APPENDIX_A) == Greedy(APPENDIX_A) != Scheduled(APPENDIX_A)
        assert parse_policy("fixed:2", APPENDIX_A) == Fixed(2)

    def test_without_a_profile_nothing_is_trimmed(self):
        for kind in (Greedy, Scheduled):
            assert kind().verifies_everything and not kind(APPENDIX_A).verifies_everything

    @pytest.mark.parametrize(
        "text, message",
        [
            ("", "unknown policy ''"),
            ("fastest", "unknown policy"),
            ("Fixed:3", "unknown policy"),
            ("fixed", "whole number"),
            ("fixed:", "whole number"),
            ("fixed:2.5", "whole number"),
            ("fixed:0", "at least 1"),
            ("fixed:-1", "at least 1"),
            ("threshold", "probability"),
            ("threshold:high", "probability"),
            ("threshold:-0.1", r"in \[0, 1\]"),
            ("threshold:1.5", r"in \[0, 1\]"),
            ("threshold:nan", r"in \[0, 1\]"),
            ("none:1", "just 'none'"),
            ("scheduled:", "just 'scheduled'"),
        ],
    )
    def test_errors(self, text, message):
        with pytest.raises(ValueError, match=message):
            parse_policy(text)
