"""Speculative output has the target's own distribution, whatever the drafter proposes.

Target and drafter are tables over the previous token (`T[previous]`, `Q[previous]`): small enough to enumerate, and a
whole decoding run of many rounds is a few array operations.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies
from hypothesis.extra import numpy as arrays
from scipy import stats

from dspark_jax import sampling as sampling_rules
from dspark_jax.sampling import Purpose, make_sampling, probabilities, request_keys, residual, sample, uniforms
from dspark_jax.spec.verify import accept_prefix, commit_tokens, verify_block
from dspark_jax.types import Proposal

NO_STOP = -1


def propose(table, anchors, positions, keys, sampling, block):
    """A drafter with a token of memory, drawing left to right with its own named random numbers."""
    slots = jnp.broadcast_to(jnp.arange(block), (len(anchors), block))
    draws = uniforms(keys, positions, Purpose.PROPOSE, slots)

    def step(token, draw):
        law = probabilities(table[token], sampling)
        token = sample(law, draw)
        return token, (token, law)

    _, (tokens, probs) = jax.lax.scan(step, anchors, draws.T)
    count = jnp.full(len(anchors), block)
    return Proposal(tokens=tokens.T, probs=probs.swapaxes(0, 1), confidence_logits=None, num_valid=count)


@functools.partial(jax.jit, static_argnames="block")
def decode_round(target, draft, state, lengths, keys, sampling, stop_ids, *, block):
    """One round over states (anchor tokens, positions, remaining, done): the new state, and what was committed."""
    anchors, positions, remaining, done = state
    drafting = sampling.replace(mode="plain") if sampling.mode == "greedy" else sampling
    proposal = propose(draft, anchors, positions, keys, drafting, block)
    logits = target[jnp.concatenate([anchors[:, None], proposal.tokens], axis=1)]
    outcome = verify_block(logits, proposal, lengths, positions, keys, sampling, stop_ids, ~done)
    room = jnp.full_like(remaining, 10_000)
    commit = commit_tokens(outcome, proposal, remaining, room, stop_ids, ~done)
    last = jnp.take_along_axis(commit.tokens, jnp.maximum(commit.count - 1, 0)[:, None], axis=1)[:, 0]
    anchors = jnp.where(commit.count > 0, last, anchors)
    return (anchors, positions + commit.count, remaining - commit.count, done | commit.done), commit


def decode(target, draft, seeds, sampling, *, block, max_new, lengths=None, stop=NO_STOP, first=0, position=5):
    """Decode until every request is done. Returns outputs (the first token aside) and rounds per request."""
    slots = len(seeds)
    keys, stop_ids = request_keys(jnp.asarray(seeds)), jnp.full((slots, 1), stop)
    remaining = jnp.broadcast_to(jnp.asarray(max_new), (slots,))
    state = (jnp.full(slots, first), jnp.full(slots, position), remaining, remaining <= 0)
    lengths = jnp.full(slots, block) if lengths is None else jnp.asarray(lengths)
    outputs, rounds = [[] for _ in range(slots)], np.zeros(slots, int)
    while not np.all(state[3]):
        rounds += ~np.asarray(state[3])
        state, commit = decode_round(target, draft, state, lengths, keys, sampling, stop_ids, block=block)
        for output, tokens, count in zip(outputs, np.asarray(commit.tokens), np.asarray(commit.count), strict=True):
            output.extend(tokens[:count].tolist())
    return outputs, rounds


def tables(vocab, seed=0, spread=1.5):
    generator = np.random.default_rng(seed)
    return (jnp.asarray(generator.normal(0, spread, (vocab, vocab)), jnp.float32) for _ in range(2))


def test_whole_runs_have_the_target_distribution():
    """Three tokens of 24 000 runs over several rounds, temperatures and filters mixed in the batch: exact laws."""
    vocab, per_setting = 4, 4000
    target, draft = tables(vocab)
    choices = [
        dict(temperature=1.0),
        dict(temperature=0.6),
        dict(temperature=1.5, top_k=3),
        dict(temperature=1.0, top_p=0.8),
        dict(temperature=1.3, min_p=0.15),
        dict(temperature=0.0),
    ]
    spread = [choices[i % len(choices)] for i in range(per_setting * len(choices))]
    columns = {name: [c.get(name) for c in spread] for name in ("temperature", "top_k", "top_p", "min_p")}
    sampling = make_sampling(len(spread), vocab_size=vocab, **columns)
    # Verify lengths 0, 1 and 2 as a scheduler might choose them.
    lengths = np.random.default_rng(1).integers(0, 3, len(spread))
    outputs, _ = decode(target, draft, np.arange(len(spread)), sampling, block=2, max_new=3, lengths=lengths)
    outputs = np.array(outputs)
    for index, choice in enumerate(choices):
        wide = make_sampling(vocab, vocab_size=vocab, **choice).replace(mode="filtered")
        p = np.asarray(probabilities(target, wide), np.float64)
        exact = np.einsum("a,ab,bc->abc", p[0], p, p).ravel()
        seen = outputs[index :: len(choices)]
        counts = np.bincount(seen @ [16, 4, 1], minlength=vocab**3)
        assert not np.any(counts[exact == 0])
        possible = exact > 0
        if possible.sum() == 1:
            continue
        # Rare cells are pooled: the chi-square law needs a few expected counts in each.
        rare = possible & (exact * per_setting < 8)
        observed = np.append(counts[possible & ~rare], counts[rare].sum())
        expected = np.append(exact[possible & ~rare], exact[rare].sum()) * per_setting
        keep = expected > 0
        assert stats.chisquare(observed[keep], expected[keep] / expected.sum() * per_setting).pvalue > 1e-3, choice


def test_greedy_runs_equal_plain_greedy_decoding():
    target, draft = tables(7, seed=3)
    sampling = make_sampling(5, vocab_size=7, temperature=[0.0, 1e-6, 0.0, 9.9e-6, 0.0])
    assert sampling.mode == "greedy"
    expected, token = [], 0
    for _ in range(20):
        token = int(jnp.argmax(target[token]))
        expected.append(token)
    outputs, _ = decode(target, draft, np.arange(5), sampling, block=3, max_new=20, lengths=[3, 3, 0, 1, 2])
    assert outputs == [expected] * 5
    mixed = make_sampling(5, vocab_size=7, temperature=[0.0, 1.0, 0.0, 1.0, 1e-6])
    outputs, _ = decode(target, draft, np.arange(5), mixed, block=3, max_new=20)
    assert outputs[0] == outputs[2] == outputs[4] == expected


probability_rows = arrays.arrays(
    np.float64, (2, 5), elements=strategies.sampled_from([0.0, 1e-9, 1e-4, 0.05, 0.3, 1.0, 2.0])
).filter(lambda x: bool(np.all(x.sum(1) > 0.01)))


@settings(max_examples=60, deadline=None)
@given(probability_rows)
def test_the_law_is_exact_for_any_pair_of_distributions(rows):
    """Enumerated over drafts: accepted x with q(x), else the residual, together give p, tiny masses included."""
    p, q = (rows / rows.sum(1, keepdims=True)).astype(np.float32)
    ratio = np.minimum(1.0, p / np.maximum(q, 1e-8))
    below = np.where(ratio > 0, ratio * (1 - 1e-6), 0.0)
    np.testing.assert_array_equal(accepts(p, q, below), ratio > 0)
    np.testing.assert_array_equal(accepts(p, q, ratio), np.zeros(5))
    np.testing.assert_allclose(one_step_law(p, q, q), p, atol=1e-6)


def accepts(p, q, draws):
    """Accept each token alone, as the only draft token of its own row."""
    p, q, draws = (jnp.asarray(x, jnp.float32)[:, None] for x in (p, q, draws))
    return accept_prefix(p, q, draws, jnp.ones(len(p), int))


def one_step_law(p, q_drawn, q_in_ratio):
    ratio = np.minimum(1.0, p / np.maximum(q_in_ratio, 1e-8))
    correction = np.asarray(residual(jnp.asarray(p, jnp.float32), jnp.asarray(q_in_ratio, jnp.float32)))
    return q_drawn * ratio + (1 - (q_drawn * ratio).sum()) * correction


def test_br22_the_ratio_uses_the_distribution_that_was_sampled():
    raw, target = np.array([[0.5, 0.3, 0.2]]), np.array([0.5, 0.5, 0.0], np.float32)
    sampling = make_sampling(1, vocab_size=3, temperature=1.0, top_k=2)
    filtered = np.asarray(probabilities(jnp.log(raw), sampling))[0]
    np.testing.assert_allclose(one_step_law(target, filtered, filtered), [0.5, 0.5, 0], atol=1e-6)
    # What goes wrong with the unfiltered distribution in the ratio; shows that the enumeration can tell.
    wrong = one_step_law(target, filtered, raw[0].astype(np.float32))
    np.testing.assert_allclose(wrong, [0.625, 0.375, 0], atol=1e-6)


def test_br24_output_law_and_law_after_a_rejection():
    p, q, trials = jnp.array([0.1, 0.45, 0.45]), jnp.array([0.6, 0.3, 0.1]), 400_000
    sampling = make_sampling(trials, vocab_size=3, temperature=1.0)

    # p and q are arguments: as constants the compiler would fold 400 000 rows of them at leisure.
    @jax.jit
    def run(seeds, p, q):
        keys, positions = request_keys(seeds), jnp.full(trials, 11)
        table = jnp.broadcast_to(jnp.log(q), (3, 3))
        proposal = propose(table, jnp.zeros(trials, jnp.int32), positions, keys, sampling, 1)
        logits = jnp.broadcast_to(jnp.log(p), (trials, 2, 3))
        none = jnp.full((trials, 1), NO_STOP)
        out = verify_block(logits, proposal, jnp.ones(trials, int), positions, keys, sampling, none, seeds >= 0)
        return jnp.where(out.num_accepted == 1, proposal.tokens[:, 0], out.next_token), out.num_accepted, out.next_token

    first, accepted, next_token = (np.asarray(x) for x in run(jnp.arange(trials), p, q))
    np.testing.assert_allclose(np.bincount(first, minlength=3) / trials, p, atol=3e-3)
    after = np.bincount(next_token[accepted == 0], minlength=3) / np.sum(accepted == 0)
    np.testing.assert_allclose(after, [0, 0.3, 0.7], atol=3e-3)
    np.testing.assert_allclose(np.mean(accepted), 0.5, atol=3e-3)
    bonus = np.bincount(next_token[accepted == 1], minlength=3) / np.sum(accepted == 1)
    np.testing.assert_allclose(bonus, p, atol=3e-3)
    counts = np.bincount(first[:20_000], minlength=3)
    assert stats.chisquare(counts, [2_000, 9_000, 9_000]).statistic < 9.2


def test_br24_a_round_asks_for_four_kinds_of_draws(monkeypatch):
    """Slot 0 rejects, slot 1 accepts everything: the replacement and the bonus are named apart."""
    asked = []

    def record(keys, positions, purpose, slots):
        asked.append((np.broadcast_to(np.asarray(purpose), len(keys)).tolist(), np.asarray(slots).tolist()))
        return uniforms(keys, positions, purpose, slots)

    monkeypatch.setattr(sampling_rules, "uniforms", record)
    tokens = jnp.array([[1, 1], [2, 2]])
    proposal = Proposal(tokens=tokens, probs=None, confidence_logits=None, num_valid=jnp.array([2, 2]))
    logits = jnp.broadcast_to(jnp.where(jnp.arange(3) == 2, 0.0, -jnp.inf), (2, 3, 3))
    sampling = make_sampling(2, vocab_size=3, temperature=1.0)
    stop, active = jnp.full((2, 1), NO_STOP), jnp.ones(2, bool)
    keys, positions = request_keys(jnp.arange(2)), jnp.array([4, 4])
    verify_block(logits, proposal, jnp.array([2, 2]), positions, keys, sampling, stop, active)
    assert asked == [
        ([Purpose.ACCEPT, Purpose.ACCEPT], [[0, 1], [0, 1]]),
        ([Purpose.RESIDUAL, Purpose.BONUS], [[0], [2]]),
    ]
    assert Purpose.PROPOSE not in {p for purposes, _ in asked for p in purposes}


@pytest.mark.parametrize("mode", ["greedy", "plain"])
def test_br13_finished_rows_do_not_matter(mode):
    """Perfect drafter, block 4. The prompt's round gave the first token: 9 and 17 tokens have 8 and 16 to go."""
    target, _ = tables(7, seed=3)

    def run(budgets):
        sampling = make_sampling(len(budgets), vocab_size=7, temperature=0.0).replace(mode=mode)
        return decode(target, target, np.arange(len(budgets)), sampling, block=4, max_new=budgets)

    outputs, rounds = run([0, 8, 16])
    assert [len(o) for o in outputs] == [0, 8, 16]
    assert rounds.tolist() == [0, 2, 4]
    for budgets in ([16], [16, 8], [8, 16, 0, 0], [0, 16, 1, 8] * 4):
        others, other_rounds = run(budgets)
        for budget, output, count in zip(budgets, others, other_rounds, strict=True):
            assert output == outputs[2][:budget]
            assert count == -(-budget // 5)


def test_sampled_runs_do_not_depend_on_their_neighbours():
    target, draft = tables(5, seed=7)
    temperatures = [1.0, 0.0, 0.7, 1.0, 1.6]
    sampling = make_sampling(5, vocab_size=5, temperature=temperatures)
    together, _ = decode(target, draft, np.arange(5), sampling, block=3, max_new=12)
    for order in ([4, 2, 0, 1, 3], [3]):
        own = jax.tree.map(lambda x: x[np.array(order)], sampling)  # noqa: B023
        apart, _ = decode(target, draft, np.array(order), own, block=3, max_new=12)
        assert apart == [together[i] for i in order]


@pytest.mark.parametrize("max_new, rounds", [(1, 0), (2, 1), (8, 1), (9, 1), (10, 2), (17, 2)])
def test_br26_the_budget_is_exact(max_new, rounds):
    """Block 7, perfect drafter, no stop token; the prompt's own round gives the first token."""
    target, _ = tables(7, seed=3)
    sampling = make_sampling(1, vocab_size=7, temperature=0.0)
    outputs, count = decode(target, target, [0], sampling, block=7, max_new=max_new - 1)
    assert (1 + len(outputs[0]), int(count[0])) == (max_new, rounds)


@pytest.mark.parametrize("drafts", ["perfect", "poor"])
def test_br26_nothing_follows_a_stop_token(drafts):
    """Chain 3 4 7 9 1 2 6 0 …; stop id 9 inside the drafts, or as the target's own token when drafts are poor."""
    order = [3, 4, 7, 9, 1, 2, 6, 0, 5, 8]
    target = 9.0 * jax.nn.one_hot(jnp.array([order[(order.index(t) + 1) % 10] for t in range(10)]), 10)
    draft = target if drafts == "perfect" else -target
    sampling = make_sampling(1, vocab_size=10, temperature=0.0)
    run = functools.partial(decode, target, draft, [0], sampling, block=5, stop=9, first=3)
    assert run(max_new=19)[0] == [[4, 7, 9]]
    assert run(max_new=3)[0] == [[4, 7, 9]]
    assert run(max_new=2)[0] == [[4, 7]]
    assert run(max_new=0)[0] == [[]]
