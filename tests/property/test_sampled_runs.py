"""The law of whole sampled runs: prefill, drafting, verification and caches together, against exact enumeration.

    DSPARK_SAMPLED_RUNS=21000 pytest tests/property/test_sampled_runs.py -m "slow or not slow"

samples every policy's law more closely than the default does.
"""

from __future__ import annotations

import functools
import itertools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_models import random_drafter, random_target
from scipy import stats

from dspark_jax.engine.engine import Engine
from dspark_jax.engine.generate import generate
from dspark_jax.spec.schedule import CostCurve, Fixed, Greedy, NoDraft, Scheduled, Threshold
from dspark_jax.target.transformer import forward_rows

VOCAB, BLOCK, SLOTS = 5, 2, 4
RUNS = int(os.environ.get("DSPARK_SAMPLED_RUNS", "2400"))
ROWS = (1, 2, 3, 4, 5, 6, 8, 12)
PROMPT = [1, 3, 0]
TARGET = random_target(VOCAB)
SETTINGS = ({"temperature": 1.0}, {"temperature": 1.0, "top_k": 3}, {"temperature": 0.7, "top_p": 0.8})
# A prompt enters at every step, so two or three requests run at a time: there the curve must make cutting pay.
CURVE = CostCurve(ROWS, (1.0, 1.15, 1.35, 1.5, 1.7, 1.75, 2.6, 4.0))
POLICIES = {
    "none": NoDraft(),
    "fixed": Fixed(2),
    "threshold": Threshold(0.55),
    "greedy": Greedy(CURVE),
    "scheduled": Scheduled(CURVE),
}


def distribution(logits, temperature=1.0, top_k=None, top_p=None):
    """The sampled law of rows of logits, in float64: temperature, then top-k, then top-p."""
    weights = np.exp((logits - logits.max(-1, keepdims=True)) / temperature)
    if top_k is not None:
        weights = np.where(logits >= np.sort(logits, -1)[..., -top_k, None], weights, 0)
    probs = weights / weights.sum(-1, keepdims=True)
    if top_p is not None:
        order = np.argsort(-probs, -1)
        falling = np.take_along_axis(probs, order, -1)
        kept = np.cumsum(falling, -1) - falling < top_p
        probs = np.where(np.take_along_axis(kept, np.argsort(order, -1), -1), probs, 0)
    return probs / probs.sum(-1, keepdims=True)


@functools.lru_cache
def rows():
    """Target logits after the prompt and after each text of one and of two tokens, for every such text."""
    pairs = list(itertools.product(range(VOCAB), repeat=2))
    ids = jnp.asarray([[*PROMPT, *pair] for pair in pairs])
    positions = jnp.tile(jnp.arange(ids.shape[1]), (len(pairs), 1))
    hidden = jax.jit(
        lambda params: forward_rows(TARGET.config, params, TARGET.tables, ids, jnp.ones_like(ids), positions)
    )(TARGET.params).last_hidden
    return pairs, np.asarray(TARGET.tables.logits(hidden), np.float64)[:, len(PROMPT) - 1 :]


def exact_law(**settings):
    """Probability of every text of three tokens after the prompt, `[V, V, V]`, by plain decoding."""
    pairs, logits = rows()
    first, second, third = np.moveaxis(distribution(logits, **settings), 1, 0)
    law = np.zeros((VOCAB,) * 3)
    for n, (a, b) in enumerate(pairs):
        law[a, b] = first[n, a] * second[n, b] * third[n]
    return law


def p_value(texts, law):
    """Chi-square of observed texts; rare cells are pooled. Impossible texts must not occur at all."""
    counts = np.zeros(law.shape)
    for text in texts:
        counts[text] += 1
    assert counts[law == 0].sum() == 0
    pooled, cell = [], np.zeros(2)
    for pair in sorted(zip((law * len(texts)).ravel(), counts.ravel(), strict=True)):
        cell = cell + pair
        if cell[0] >= 8:
            pooled, cell = [*pooled, cell], np.zeros(2)
    pooled[-1] = pooled[-1] + cell
    expected, observed = np.array(pooled).T
    return stats.chisquare(observed, expected * len(texts) / expected.sum()).pvalue


def lengths(results):
    """Verify lengths that occurred, and the accept rate."""
    rounds = [r for x in results for r in x.rounds]
    rate = sum(r.accepted for r in rounds) / max(1, sum(r.proposed for r in rounds))
    return {r.proposed for r in rounds}, rate


@pytest.mark.parametrize(
    "policy", [pytest.param(p, marks=pytest.mark.slow if p in ("none", "fixed") else ()) for p in POLICIES]
)
def test_sampled_text_from_the_engine_has_the_targets_law(policy):
    """Three settings side by side in every batch, requests coming and going."""
    drafter = None if policy == "none" else random_drafter("vanilla", BLOCK, VOCAB)
    engine = Engine(
        TARGET, drafter, slots=SLOTS, max_length=16, policy=POLICIES[policy], chunk_ladder=(4,), row_ladder=ROWS,
        mixed_ladder=ROWS,
    )  # fmt: skip
    # The scheduler plans from reports two steps old: its requests must live to see one of their own.
    budget = 8 if policy == "scheduled" else 3
    numbers = [
        engine.submit(PROMPT, max_new_tokens=budget, seed=5000 + i, stop_token_ids=(), **SETTINGS[i % 3])
        for i in range(RUNS)
    ]
    found = engine.run()
    results = [found[n] for n in numbers]
    verified, rate = lengths(results)
    if policy in ("threshold", "greedy", "scheduled"):
        assert len(verified) > 1, "the policy must really cut blocks"
    if policy != "none":
        assert 0.2 < rate < 0.95, "both acceptance and correction must occur"
    laws = [exact_law(**settings) for settings in SETTINGS]
    for i, law in enumerate(laws):
        assert p_value([r.tokens[:3] for r in results[i::3]], law) > 1e-3, (policy, SETTINGS[i])
    # The test can tell: filtered text does not have the plain law.
    assert p_value([r.tokens[:3] for r in results[1::3]], laws[0]) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vanilla", "eagle3"])
def test_sampled_text_of_a_fixed_batch_has_the_targets_law(kind):
    """All requests at once, every other one with top-k 3."""
    results = generate(
        TARGET, random_drafter(kind, BLOCK, VOCAB), [PROMPT] * RUNS, max_new_tokens=3, temperature=1.0,
        top_k=[None, 3] * (RUNS // 2), seed=1000, batch_size=RUNS,
    )  # fmt: skip
    assert 0.2 < lengths(results)[1] < 0.95
    for start, settings in enumerate(SETTINGS[:2]):
        assert p_value([r.tokens for r in results[start::2]], exact_law(**settings)) > 1e-3
