"""Replays whose outcome can be worked out by hand, and the scheduler between the fixed lengths it chooses from."""

from __future__ import annotations

import numpy as np
import pytest
from random_models import VOCAB, random_drafter, random_target

from dspark_jax.evaluation.replay import PromptCost, Trace, load_traces, record_traces, replay, save_traces
from dspark_jax.spec.schedule import CostCurve, Fixed, Greedy, NoDraft, Scheduled, Threshold

BLOCK = 3


def traces(rate, count=40, rounds=60, seed=0):
    """Well calibrated drafts: each accepted with its predicted rate, drawn per block around `rate`."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        confidence = np.clip(rate + rng.uniform(-0.3, 0.3, (rounds, BLOCK)), 0.02, 0.98)
        accepted = np.cumprod(rng.random((rounds, BLOCK)) < confidence, axis=1).sum(axis=1)
        made.append(Trace(confidence, accepted.astype(np.int32)))
    return made


def linear(slots, base, row):
    """Seconds that grow with the rows: `base + row * rows`."""
    buckets = tuple(range(1, slots * (BLOCK + 1) + 1))
    return CostCurve(buckets, tuple(base + row * b for b in buckets))


def test_fixed_lengths_by_hand():
    """Two blocks, of which 3 and 1 drafts survive, in turn: with 2 verified, 3 and 2 tokens a round of 3 rows."""
    trace = Trace(np.full((2, BLOCK), 0.5), np.array([3, 1], np.int32))
    point = replay([trace], Fixed(2), linear(1, 1.0, 0.5), linear(1, 0.5, 0.5), concurrency=1, steps=10)
    assert point.throughput == pytest.approx(2.5 / 2.5) and point.budget == 3
    assert point.accepted_per_verified == pytest.approx(1.5 / 2)
    plain = replay([trace], NoDraft(), linear(1, 1.0, 0.5), linear(1, 0.5, 0.5), concurrency=1, steps=10)
    assert plain.throughput == pytest.approx(1.0) and np.isnan(plain.accepted_per_verified)


def test_prompts_take_time_of_their_own():
    """4 tokens an answer at a second each, and a prompt of 2 seconds before it."""
    trace = Trace(np.full((1, BLOCK), 0.5), np.array([0], np.int32))
    flat = linear(1, 1.0, 0.0)
    point = replay([trace], NoDraft(), flat, flat, concurrency=1, steps=8, prompt=PromptCost(seconds=2.0, tokens=4.0))
    assert point.throughput == pytest.approx(8 / (8 + 4))


def test_thresholds_cut_where_the_confidence_falls():
    trace = Trace(np.array([[0.9, 0.4, 0.9]]), np.array([3], np.int32))
    point = replay([trace], Threshold(0.5), linear(2, 1.0, 0.0), linear(2, 1.0, 0.0), concurrency=2, steps=5)
    assert point.budget == 4 and point.throughput == pytest.approx(4.0)


@pytest.mark.parametrize("rate, row", [(0.8, 0.02), (0.8, 0.3), (0.4, 0.1), (0.4, 0.6)])
def test_the_scheduler_is_no_worse_than_any_fixed_length(rate, row):
    """On a smooth curve and good predictions, whatever a row costs; with cheap rows it verifies more."""
    made, slots = traces(rate), 8
    curve, plain = linear(slots, 1.0, row), linear(slots, 0.8, row)
    run = lambda policy: replay(made, policy, curve, plain, concurrency=slots, steps=300).throughput
    best = max(run(NoDraft()), *(run(Fixed(k)) for k in range(1, BLOCK + 1)))
    assert run(Scheduled()) > 0.985 * best
    assert run(Greedy()) > 0.9 * best


def test_the_budget_shrinks_with_load():
    made = traces(0.6)
    budgets = []
    for slots in (1, 4, 16):
        # The machine has room for some eight rows before it becomes slower.
        buckets = tuple(range(1, slots * (BLOCK + 1) + 1))
        curve = CostCurve(buckets, tuple(1.0 + 0.12 * max(0, b - 8) for b in buckets))
        budgets.append(replay(made, Scheduled(), curve, curve, concurrency=slots, steps=200).budget / slots)
    assert budgets[0] > budgets[1] > budgets[2]


def test_traces_are_recorded_and_kept(tmp_path):
    prompts = [np.random.default_rng(i).integers(0, VOCAB, 4).tolist() for i in range(3)]
    made = record_traces(random_target(), random_drafter("vanilla"), prompts, max_new_tokens=8, batch_size=3)
    assert len(made) == 3
    for trace in made:
        assert trace.confidence.shape == (len(trace.accepted), 4) and np.all(trace.accepted <= 4)
    save_traces(made, tmp_path / "traces.json")
    for a, b in zip(load_traces(tmp_path / "traces.json"), made, strict=True):
        np.testing.assert_array_equal(a.confidence, b.confidence)
        np.testing.assert_array_equal(a.accepted, b.accepted)
    (tmp_path / "wrong.json").write_text('[{"a": 1}]')
    with pytest.raises(ValueError, match="holds no traces"):
        load_traces(tmp_path / "wrong.json")
    with pytest.raises(FileNotFoundError, match="bench serve --traces"):
        load_traces(tmp_path / "none.json")
    with pytest.raises(ValueError, match="no confidence head"):
        record_traces(random_target(), random_drafter("dflash"), prompts, max_new_tokens=8)
