"""Schedulers find what they search for, and leave the target's law alone.

The first half compares them with brute force and with plain-Python readings of their rules. The second enumerates whole
decoding rounds of models that are tables over the previous token: every proposal, every acceptance, in float64.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies

from dspark_jax.spec import schedule as rules
from dspark_jax.spec.schedule import CostCurve, Fixed, Greedy, Policy, Scheduled, Threshold, choose_capacity
from dspark_jax.spec.verify import confidence_cut

SLOTS, BLOCK = 4, 4
jit_greedy, jit_fill = jax.jit(rules.greedy_lengths), jax.jit(rules.fill_capacity)

# Quarters make every sum exact and ties frequent; rows that start with NaN or end early are part of the deal.
rates = strategies.lists(
    strategies.lists(strategies.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0, np.nan]), min_size=BLOCK, max_size=BLOCK),
    min_size=SLOTS,
    max_size=SLOTS,
)
activity = strategies.lists(strategies.booleans(), min_size=SLOTS, max_size=SLOTS).filter(any)
validity = strategies.lists(strategies.integers(0, BLOCK), min_size=SLOTS, max_size=SLOTS)


@strategies.composite
def staircases(draw):
    """Buckets and seconds of a cost curve, in eighths of a second, over a few or all numbers of rows."""
    largest = SLOTS * (1 + BLOCK)
    buckets = sorted(draw(strategies.sets(strategies.integers(1, largest - 1))) | {largest})
    rises = [draw(strategies.sampled_from([0, 0, 1, 2, 9])) for _ in buckets]
    return buckets, np.cumsum([8, *rises[1:]]) / 8


def survivals(rates, valid, active):
    """Products of rates, zero from a NaN on and where nothing can be verified."""
    usable = (np.arange(BLOCK) < np.array(valid)[:, None]) & np.array(active)[:, None]
    return np.cumprod(np.where(usable, np.nan_to_num(rates), 0.0), axis=1)


@settings(max_examples=60, deadline=None)
@given(rates, validity, activity, staircases(), strategies.sampled_from([0.0, 0.71, 1.31, 2.93, 40.3]))
def test_the_search_finds_the_best_of_all_prefix_lengths(rates, valid, active, stairs, rate):
    """The best throughput; where none comes up to the long-run rate, the most tokens less what their time is worth."""
    values, curve = survivals(rates, valid, active), CostCurve.monotone(*stairs)
    requests, limits = sum(active), np.where(active, valid, 0)
    capacity = choose_capacity(values, requests, curve, rate=rate)
    chosen = jit_fill(jnp.asarray(values, jnp.float32), jnp.asarray(valid), jnp.asarray(active), capacity)
    gains = np.pad(np.cumsum(values, axis=1), ((0, 0), (1, 0)))

    def tokens(lengths):
        return requests + gains[np.arange(SLOTS), np.array(lengths)].sum()

    rounds = [
        (tokens(lengths), curve.seconds(requests + sum(lengths)))
        for lengths in itertools.product(*(range(limit + 1) for limit in limits))
    ]
    best = max(t / s for t, s in rounds)
    found, seconds = tokens(chosen), curve.seconds(capacity)
    if best >= rate:
        np.testing.assert_allclose(found / seconds, best, rtol=1e-12)
    else:
        np.testing.assert_allclose(found - rate * seconds, max(t - rate * s for t, s in rounds), rtol=1e-12)


@settings(max_examples=60, deadline=None)
@given(rates, validity, activity, strategies.integers(0, 25))
def test_capacity_is_filled_in_the_stated_order(rates, valid, active, capacity):
    values = survivals(rates, valid, active)
    chosen = jit_fill(jnp.asarray(values, jnp.float32), jnp.asarray(valid), jnp.asarray(active), capacity)
    drafts = [(-values[r, j], j, r) for r in range(SLOTS) if active[r] for j in range(valid[r])]
    expected = [0] * SLOTS
    for _, j, r in sorted(drafts)[: max(capacity - sum(active), 0)]:
        # Taking each draft right after its predecessor is what makes the chosen ones prefixes.
        assert j == expected[r]
        expected[r] += 1
    assert chosen.tolist() == expected


def algorithm_1(values, active, curve):
    """SPEC §9 in exact arithmetic: sort by survival, position, slot; stop at the first admission without a gain."""
    rows = sum(active)
    expected, lengths = Fraction(rows), [0] * SLOTS
    throughput = expected / Fraction(curve.seconds(rows))
    for a, _, r in sorted((-values[r, j], j, r) for r in range(SLOTS) if active[r] for j in range(BLOCK)):
        expected, rows = expected - Fraction(a), rows + 1
        if not expected / Fraction(curve.seconds(rows)) > throughput:
            break
        throughput = expected / Fraction(curve.seconds(rows))
        lengths[r] += 1
    return lengths


@settings(max_examples=60, deadline=None)
@given(rates, validity, activity, staircases())
def test_greedy_follows_the_stated_rule(rates, valid, active, stairs):
    values, curve = survivals(rates, valid, active), CostCurve.monotone(*stairs)
    seconds = jnp.asarray(curve.seconds_by_rows(SLOTS * (1 + BLOCK)))
    lengths = jit_greedy(jnp.asarray(values, jnp.float32), jnp.asarray(active), seconds)
    assert lengths.tolist() == algorithm_1(values, active, curve)


# Enumeration of decoding rounds. A proposal is a pair of drafts; a committed block holds one to three tokens.


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """Tables over the previous token: target, drafter, accept rates it predicts, drafts it makes after x_1.

    Confidence in x_1 sees the anchor, confidence in x_2 also x_1, as in a drafter with a Markov head.
    """

    target: np.ndarray
    draft: np.ndarray
    first_rate: np.ndarray
    second_rate: np.ndarray
    num_valid: np.ndarray

    @functools.cached_property
    def proposals(self):
        return list(itertools.product(range(len(self.target)), repeat=2))

    def chance(self, anchor, proposal):
        return self.draft[anchor, proposal[0]] * self.draft[proposal[0], proposal[1]]

    @functools.cached_property
    def committed(self):
        """{(anchor, proposal, length): [(tokens, probability)]} by the verification rule of SPEC §7."""
        keys = itertools.product(range(len(self.target)), self.proposals, range(3))
        return {(anchor, x, length): self._verify(anchor, x[:length]) for anchor, x, length in keys}

    def _verify(self, anchor, drafts):
        outcomes, reached, previous = [], 1.0, anchor
        for index, x in enumerate(drafts):
            p, q = self.target[previous], self.draft[previous]
            accept = min(1.0, p[x] / q[x]) if q[x] > 0 else 0.0
            excess = np.maximum(p - q, 0)
            law = excess / excess.sum() if excess.sum() > 1e-12 else p
            outcomes += [((*drafts[:index], y), reached * (1 - accept) * law[y]) for y in range(len(p))]
            reached, previous = reached * accept, x
        bonus = self.target[previous]
        outcomes += [((*drafts, y), reached * bonus[y]) for y in range(len(bonus))]
        return [(tokens, chance) for tokens, chance in outcomes if chance > 0]


def random_model(seed):
    """Three tokens, one impossible after token 0, one row on which both models agree, no second draft after token 2."""
    generator = np.random.default_rng(seed)
    target, draft = generator.dirichlet(np.full(3, 0.8), (2, 3))
    target[0] = [0.0, 0.7, 0.3]
    draft[2] = target[2]
    return Model(
        target,
        draft,
        first_rate=np.array([0.9, 0.8, 0.25]),
        # Strongly dependent on x_1, as whatever would leak it must be.
        second_rate=np.array([[0.95, 0.05, 0.6], [0.6, 0.97, 0.05], [0.05, 0.6, 0.97]]),
        num_valid=np.array([2, 2, 1]),
    )


# A lone request of Appendix A: confidence in x_2 tells which token x_1 is.
APPENDIX_A = Model(
    target=np.array([[0.7, 0.3]] * 2),
    draft=np.array([[0.5, 0.5]] * 2),
    first_rate=np.array([0.8, 0.8]),
    second_rate=np.array([[0.9, 0.0]] * 2),
    num_valid=np.array([2, 2]),
)
APPENDIX_A_CURVE = CostCurve.monotone((1, 2, 3), (1.0, 1 / 0.5, 1 / 0.45))


@functools.partial(jax.jit, static_argnums=0)
def device_lengths(policy: Policy, logits, num_valid, active, capacity, seconds):
    """Lengths of many rounds at once, as a policy chooses them. Also the survivals they were chosen by."""

    def one(logits, num_valid, active, capacity):
        survival = rules.survival(logits, num_valid, active)
        if isinstance(policy, Fixed):
            lengths = jnp.minimum(policy.k, num_valid)
        elif isinstance(policy, Threshold):
            lengths = jnp.minimum(confidence_cut(logits, policy.c), num_valid)
        elif isinstance(policy, Greedy):
            lengths = rules.greedy_lengths(survival, active, seconds)
        else:
            lengths = rules.fill_capacity(survival, num_valid, active, capacity)
        return jnp.where(active, lengths, 0), survival

    return jax.vmap(one)(logits, num_valid, active, capacity)


class Rounds:
    """Rounds of R requests that share a batch, under one policy."""

    def __init__(self, model: Model, requests: int, policy: Policy, curve: CostCurve):
        self.model, self.requests, self.policy, self.curve = model, requests, policy, curve
        self.tokens = range(len(model.target))
        self.used: set[tuple[int, ...]] = set()
        self._first_law: dict = {}
        self._table: dict = {}

    def table(self, active, capacity):
        """{(anchors, proposals): (lengths, survival)} of all rounds with these requests and capacity."""
        if (active, capacity) in self._table:
            return self._table[active, capacity]
        model = self.model
        every = (
            itertools.product(self.tokens, repeat=self.requests),
            itertools.product(model.proposals, repeat=self.requests),
        )
        states = list(itertools.product(*every))
        anchors = np.array([anchors for anchors, _ in states])
        x_1 = np.array([[x for x, _ in proposals] for _, proposals in states])
        rate = np.stack([model.first_rate[anchors], model.second_rate[anchors, x_1]], axis=-1)
        with np.errstate(divide="ignore"):
            logits = jnp.asarray(np.log(rate) - np.log1p(-rate), jnp.float32)
        count = len(states)
        lengths, survival = device_lengths(
            self.policy,
            logits,
            jnp.asarray(model.num_valid[x_1]),
            jnp.tile(jnp.asarray(active), (count, 1)),
            jnp.full(count, capacity),
            jnp.asarray(self.curve.seconds_by_rows(3 * self.requests)),
        )
        rows = zip(states, np.asarray(lengths).tolist(), np.asarray(survival), strict=True)
        self._table[active, capacity] = {state: (tuple(chosen), values) for state, chosen, values in rows}
        return self._table[active, capacity]

    def choose(self, survival):
        """Capacity the host derives from some round's survivals."""
        return choose_capacity(survival, self.requests, self.curve) if isinstance(self.policy, Scheduled) else 0

    def proposals(self, anchors):
        """[(proposals, probability)] of one round."""
        for proposals in itertools.product(self.model.proposals, repeat=self.requests):
            chance = np.prod([self.model.chance(a, x) for a, x in zip(anchors, proposals, strict=True)])
            if chance > 0:
                yield proposals, float(chance)

    def stale_capacity(self, anchors):
        """{capacity: probability} from a round of the past that proposed after these anchors."""
        seen = self.table((True,) * self.requests, 0)
        capacities: dict[int, float] = {}
        for proposals, chance in self.proposals(anchors):
            capacity = self.choose(seen[anchors, proposals][1])
            capacities[capacity] = capacities.get(capacity, 0.0) + chance
        return capacities

    def first_law(self, anchors, active, capacity):
        """Joint law of the first token that one round commits for each request, `[V] * R`."""
        key = anchors, active, capacity
        if key not in self._first_law:
            law, table = 0.0, self.table(active, capacity)
            for proposals, chance in self.proposals(anchors):
                each = [np.zeros(len(self.tokens)) for _ in anchors]
                for own, *state in zip(each, anchors, proposals, table[anchors, proposals][0], strict=True):
                    for block, probability in self.model.committed[tuple(state)]:
                        own[block[0]] += probability
                law = law + chance * functools.reduce(np.multiply.outer, each)
            self._first_law[key] = law
        return self._first_law[key]

    def law(self, anchors, *, before, live=False, lag=2, leave=True):
        """Joint law of the first two tokens of each request, `[V] * 2R`, in the order of the requests.

        Args:
            anchors: last token of each prompt.
            before: anchors of the two rounds before, from which capacities come.
            live: let the first round's capacity come from its own confidences, which is wrong.
            lag: 2, or 1 to let the second round's capacity come from the first round's confidences.
            leave: requests end with their second token, or go on and compete for rows.
        """
        size, everyone = len(self.tokens), (True,) * self.requests
        law = np.zeros((size,) * (2 * self.requests))
        first, second = (self.stale_capacity(b) for b in before)
        for proposals, chance in self.proposals(anchors):
            now = self.choose(self.table(everyone, 0)[anchors, proposals][1])
            capacities = itertools.product(({now: 1.0} if live else first).items(), self._next(now, lag, second))
            for (capacity, share), (later, later_share) in capacities:
                lengths = self.table(everyone, capacity)[anchors, proposals][0]
                self.used.add(lengths)
                blocks = [self.model.committed[state] for state in zip(anchors, proposals, lengths, strict=True)]
                for outcome in itertools.product(*blocks):
                    weight = chance * share * later_share * np.prod([p for _, p in outcome])
                    self._finish(law, [tokens for tokens, _ in outcome], weight, later, leave)
        return law

    @staticmethod
    def _next(now, lag, second):
        return [(now, 1.0)] if lag == 1 else second.items()

    def _finish(self, law, blocks, weight, capacity, leave):
        """Add one outcome of the first round, with what a second round gives the requests that need it."""
        short = tuple(len(block) == 1 for block in blocks)
        index = [i for block, s in zip(blocks, short, strict=True) for i in (block[0], slice(None) if s else block[1])]
        if not any(short):
            law[tuple(index)] += weight
            return
        active = short if leave else (True,) * self.requests
        after = self.first_law(tuple(block[-1] for block in blocks), active, capacity)
        law[tuple(index)] += weight * after.sum(axis=tuple(r for r, s in enumerate(short) if not s))


def exact_law(model, anchors):
    each = [model.target[a][:, None] * model.target for a in anchors]
    return functools.reduce(np.multiply.outer, each)


# Costs under which lengths differ between proposals: rising ones for the early stop, and for the search steps that pay
# only together with what lies behind them. On a cliff even the first draft hangs on the second one's confidence.
RISING = {1: CostCurve((1, 2, 3), (1.0, 1.3, 1.75)), 2: CostCurve((2, 3, 4, 5, 6), (1.0, 1.15, 1.35, 1.55, 1.8))}
STEEP = {1: CostCurve((1, 2, 3), (1.0, 1.9, 2.0)), 2: CostCurve((2, 4, 6), (1.0, 1.75, 2.0))}
CLIFF = {1: STEEP[1], 2: CostCurve((2, 3, 6), (1.0, 1.6, 1.9))}
BEFORE = {1: ((1,), (0,)), 2: ((1, 0), (0, 0))}
ANCHORS = {1: (0,), 2: (0, 1)}


@pytest.mark.parametrize("requests", [1, 2])
@pytest.mark.parametrize("kind", ["fixed", "threshold", "greedy", "scheduled"])
def test_two_tokens_have_the_target_law(kind, requests):
    curve, used = (STEEP if kind == "scheduled" else RISING)[requests], set()
    policy = {"fixed": Fixed(2), "threshold": Threshold(0.58), "greedy": Greedy(curve), "scheduled": Scheduled(curve)}
    for seed, variant in ((0, {}), (1, {}), (1, {"leave": False}), (2, {"lag": 1})):
        model = random_model(seed)
        rounds = Rounds(model, requests, policy[kind], curve)
        law = rounds.law(ANCHORS[requests], before=BEFORE[requests], **variant)
        np.testing.assert_allclose(law, exact_law(model, ANCHORS[requests]), atol=1e-6, err_msg=f"{seed} {variant}")
        used |= rounds.used
    # The test says nothing where every proposal is verified to the same length.
    assert len(used) >= 2


@pytest.mark.parametrize("requests", [1, 2])
def test_only_live_confidences_move_the_law(requests):
    """One model, one curve, one search: on confidences of the same round it leaks, on earlier ones it does not."""
    model, curve = random_model(0), CLIFF[requests]
    rounds = Rounds(model, requests, Scheduled(curve), curve)
    law = functools.partial(rounds.law, ANCHORS[requests], before=BEFORE[requests])
    exact = exact_law(model, ANCHORS[requests])
    leaking = law(live=True)
    np.testing.assert_allclose(leaking.sum(), 1.0)
    assert np.abs(leaking - exact).max() > 5e-3
    np.testing.assert_allclose(law(), exact, atol=1e-6)


def test_appendix_a_both_ways():
    curve, anchors, before = APPENDIX_A_CURVE, (0,), ((0,), (0,))
    stopped = Rounds(APPENDIX_A, 1, Greedy(curve), curve)
    np.testing.assert_allclose(stopped.law(anchors, before=before).sum(1), [0.7, 0.3], atol=1e-12)
    assert stopped.used == {(0,)}
    leaking = Rounds(APPENDIX_A, 1, Scheduled(curve), curve)
    np.testing.assert_allclose(leaking.law(anchors, before=before, live=True).sum(1), [0.85, 0.15], atol=1e-12)
    assert leaking.used == {(0,), (2,)}
    # The same search on an earlier round's confidences: both lengths occur, and the law is the target's.
    stale = Rounds(APPENDIX_A, 1, Scheduled(curve), curve)
    np.testing.assert_allclose(stale.law(anchors, before=before), exact_law(APPENDIX_A, anchors), atol=1e-12)
    assert stale.used == {(0,), (2,)}
