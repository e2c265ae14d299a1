"""The drafter contract, one suite for every kind: what `init`, `extend` and `propose` promise to the engine."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_models import (
    AUTOREGRESSIVE,
    BLOCK,
    HEADS,
    KINDS,
    REDUCED,
    TAPS,
    UNTRAINED,
    VOCAB,
    WIDTH,
    random_drafter,
    random_target,
)

from dspark_jax.draft.loading import functions_for
from dspark_jax.draft.vocabulary import draft_ids
from dspark_jax.nn.attention import make_plan
from dspark_jax.sampling import Purpose, make_sampling, probabilities, request_keys, sample, uniforms
from dspark_jax.target.transformer import forward_rows
from dspark_jax.types import RaggedTokens, TargetFeatures

SLOTS, ROWS, PADDING, LENGTH = 3, 7, 2, 20
TABLES = random_target().tables
LENGTHS = (7, 5, 6)
EVERYONE = np.ones(SLOTS, bool)
SEEDS = np.array([3, 14, 15], np.uint32)

every_kind = pytest.mark.parametrize("kind", (*KINDS, *UNTRAINED))
every_model = pytest.mark.parametrize("kind", (*KINDS, "lm"))


def text(seed=0):
    """Tokens and features of every slot: any will do, the drafter cannot know that no target made them."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCAB, (SLOTS, LENGTH)).astype(np.int32)
    return tokens, rng.normal(size=(SLOTS, LENGTH, len(TAPS) * WIDTH)).astype(np.float32)


TEXT = text()


def inputs(kind, taps):
    """What training reads of these features: the taps, or for MTP the last hidden states, here the first tap."""
    return taps[..., :WIDTH] if kind == "mtp" else taps


@functools.lru_cache
def extend_program(kind):
    drafter = random_drafter(kind)

    @jax.jit
    def extend(params, state, batch, taps, next_tokens, lengths):
        plan = make_plan(batch, SLOTS, ROWS)
        features = TargetFeatures(taps=taps, last_hidden=taps[..., :WIDTH])
        return drafter.functions.extend(params, TABLES, state, plan, features, next_tokens, lengths)

    return extend


def feed(kind, state, spans, lengths, source=TEXT, junk=0.0, params=None):
    """Extend by spans `(slot, row of the text, start, stop)`; padding rows follow and hold `junk`."""
    tokens, taps = source
    count = SLOTS * ROWS + PADDING
    slots = np.full(count, SLOTS, np.int32)
    positions, own, following = (np.zeros(count, np.int32) for _ in range(3))
    features = np.full((count, taps.shape[-1]), junk, np.float32)
    at = 0
    for slot, row, start, stop in spans:
        part = slice(at, at + stop - start)
        slots[part], positions[part] = slot, np.arange(start, stop)
        own[part] = tokens[row, start:stop]
        following[part], features[part] = tokens[row, start + 1 : stop + 1], taps[row, start:stop]
        at += stop - start
    batch = RaggedTokens(tokens=jnp.asarray(own), slots=jnp.asarray(slots), positions=jnp.asarray(positions))
    params = random_drafter(kind).params if params is None else params
    inputs = (jnp.asarray(features), jnp.asarray(following), jnp.asarray(lengths, jnp.int32))
    return extend_program(kind)(params, state, batch, *inputs)


@functools.lru_cache
def empty(kind):
    return random_drafter(kind).functions.init(SLOTS, LENGTH)


@functools.lru_cache
def filled(kind):
    """Slots with the first 7, 5 and 6 tokens of their text, the next token being the anchor."""
    return feed(kind, empty(kind), [(s, s, 0, n) for s, n in enumerate(LENGTHS)], LENGTHS)


@functools.lru_cache
def propose_program(kind, mode, block):
    drafter = random_drafter(kind)

    @jax.jit
    def propose(params, state, anchors, lengths, active, seeds):
        sampling = make_sampling(SLOTS, vocab_size=VOCAB, temperature=[0.9, 0.6, 1.0]).replace(mode=mode)
        keys = request_keys(seeds)
        return drafter.functions.propose(params, TABLES, state, anchors, lengths, active, keys, sampling, block)

    return functools.partial(propose, drafter.params)


def propose(kind, state, lengths=LENGTHS, source=TEXT, rows=(0, 1, 2), active=EVERYONE, seeds=SEEDS, mode="plain",
            block=BLOCK):  # fmt: skip
    lengths = jnp.asarray(lengths, jnp.int32)
    anchors = jnp.asarray(source[0][np.asarray(rows), np.asarray(lengths)])
    return propose_program(kind, mode, block)(state, anchors, lengths, jnp.asarray(active), jnp.asarray(seeds))


def assert_same_proposal(ours, theirs, rows=slice(None), other_rows=slice(None)):
    for name in ("tokens", "probs", "confidence_logits", "num_valid"):
        a, b = getattr(ours, name), getattr(theirs, name)
        assert (a is None) == (b is None), name
        if a is not None:
            np.testing.assert_allclose(np.asarray(a)[rows], np.asarray(b)[other_rows], atol=2e-5, err_msg=name)


@functools.lru_cache
def train_program(kind, block):
    """Teacher-forced logits and confidences of whole rows: of two blocks a row, or of all steps at all rows."""
    drafter = random_drafter(kind)
    functions = functions_for(dataclasses.replace(drafter.config, block_size=block))
    positions = jnp.tile(jnp.arange(LENGTH, dtype=jnp.int32), (SLOTS, 1))

    @jax.jit
    def blocks(params, tokens, taps, segments, anchors, labels):
        keep = jnp.ones(anchors.shape, bool)
        out = functions.train_blocks(params, TABLES, taps, tokens, positions, segments, anchors, keep, labels)
        logits = TABLES.logits(out.hidden)
        if out.markov is not None:
            logits = logits + out.markov @ params["markov_head"]["markov_w2"]["weight"].T
        return logits, out.confidence_logits

    @jax.jit
    def steps(params, tokens, taps, segments):
        states = functions.train_states(params, TABLES, inputs(kind, taps), tokens, positions, segments)
        return TABLES.logits(states)

    return functools.partial(steps if kind in AUTOREGRESSIVE else blocks, drafter.params)


def text_with(drafted):
    """The texts of `filled` with these blocks after their anchors, and a mask of what is text then."""
    rows, (slots, block) = np.array(TEXT[0]), drafted.shape
    for s, n in enumerate(LENGTHS[:slots]):
        rows[s, n + 1 : n + 1 + block] = drafted[s]
    return rows, np.arange(LENGTH) < np.asarray(LENGTHS)[:, None] + 1 + block


@functools.lru_cache
def language_model_program():
    model, tables = random_target(VOCAB + 2, seed=7), random_target(VOCAB + 2, seed=7).tables
    positions = jnp.tile(jnp.arange(LENGTH, dtype=jnp.int32), (SLOTS, 1))

    @jax.jit
    def logits(rows, segments):
        features = forward_rows(model.config, model.params, tables, rows, segments, positions)
        return tables.logits(features.last_hidden)[..., :VOCAB]

    return logits


def training_logits(kind, drafted, block):
    """Logits and confidences of a forward over whole rows for the blocks `drafted` after the texts of `filled`."""
    if kind in REDUCED:
        logits, confidence = training_logits(REDUCED[kind], drafted, block)
        kept = np.isin(np.arange(VOCAB), np.asarray(draft_ids(random_drafter(kind).params)))
        return np.where(kept, logits, -np.inf), confidence
    tokens, taps = (jnp.asarray(x) for x in TEXT)
    lengths = np.asarray(LENGTHS)
    if kind in HEADS:
        anchors = jnp.asarray(np.stack([lengths, lengths - 2], 1), jnp.int32)
        labels = jnp.asarray(np.stack([drafted, drafted[:, ::-1]], 1))
        ones = jnp.asarray(np.ones(tokens.shape, np.int32))
        logits, confidence = train_program(kind, block)(tokens, taps, ones, anchors, labels)
        return np.asarray(logits)[:, 0], None if confidence is None else np.asarray(confidence)[:, 0]
    rows, inside = text_with(drafted)
    segments = jnp.asarray(inside, jnp.int32)
    if kind == "lm":
        logits = np.asarray(language_model_program()(jnp.asarray(rows), segments))
        return logits[np.arange(SLOTS)[:, None], lengths[:, None] + np.arange(block)], None
    logits = train_program(kind, block)(jnp.asarray(rows), taps, segments)
    return np.asarray(logits)[np.arange(SLOTS), lengths - 1], None


@every_kind
def test_chunks_equal_one_extension(kind):
    state = feed(kind, empty(kind), [(2, 2, 0, 2), (0, 0, 0, 4), (1, 1, 0, 5)], (4, 5, 2))
    state = feed(kind, state, [(0, 0, 4, 7), (2, 2, 2, 6)], LENGTHS)
    assert_same_proposal(propose(kind, state)[1], propose(kind, filled(kind))[1])


@every_kind
def test_rejected_rows_change_nothing(kind):
    """Rows past the committed length carry another text's tokens and features; later rows overwrite them."""
    junk = text(seed=9)
    state = feed(kind, filled(kind), [(0, 0, 7, 9), (1, 1, 5, 10), (2, 2, 6, 13)], LENGTHS, source=junk)
    assert_same_proposal(propose(kind, state)[1], propose(kind, filled(kind))[1])
    longer = (9, 6, 10)
    spans = [(s, s, a, b) for s, (a, b) in enumerate(zip(LENGTHS, longer, strict=True))]
    after, clean = (feed(kind, s, spans, longer) for s in (state, filled(kind)))
    assert_same_proposal(propose(kind, after, longer)[1], propose(kind, clean, longer)[1])


@every_kind
def test_a_proposal_leaves_no_trace(kind):
    """Drafting, then extending by what was committed, equals never having drafted."""
    drafted, _ = propose(kind, filled(kind))
    assert_same_proposal(propose(kind, drafted)[1], propose(kind, filled(kind))[1])
    longer, spans = (8, 9, 6), [(0, 0, 7, 8), (1, 1, 5, 9)]
    after, clean = (feed(kind, s, spans, longer) for s in (drafted, filled(kind)))
    assert_same_proposal(propose(kind, after, longer)[1], propose(kind, clean, longer)[1])


@every_kind
def test_accepted_drafts_are_committed_text(kind):
    """A whole block accepted, then a row that nobody drafted for: like a text that was never drafted."""
    drafted, proposal = propose(kind, filled(kind))
    source = (text_with(np.asarray(proposal.tokens))[0], TEXT[1])
    clean = filled(kind)
    for start, stop in ((0, BLOCK + 1), (BLOCK + 1, BLOCK + 2)):
        lengths = [n + stop for n in LENGTHS]
        spans = [(s, s, n + start, n + stop) for s, n in enumerate(LENGTHS)]
        drafted, clean = (feed(kind, state, spans, lengths, source) for state in (drafted, clean))
    ours, theirs = (propose(kind, state, lengths, source)[1] for state in (drafted, clean))
    assert_same_proposal(ours, theirs)


@pytest.mark.parametrize("accepted", range(BLOCK + 1))
def test_a_language_model_does_not_run_again_what_it_drafted(accepted):
    """Extending by an anchor and accepted drafts does not touch the model: broken parameters do not show."""
    drafted, proposal = propose("lm", filled("lm"))
    source = (text_with(np.asarray(proposal.tokens))[0], TEXT[1])
    lengths = [n + 1 + accepted for n in LENGTHS]
    spans = [(s, s, n, n + BLOCK + 1) for s, n in enumerate(LENGTHS)]
    broken = jax.tree.map(lambda x: x * jnp.nan, random_drafter("lm").params)
    ours = feed("lm", drafted, spans, lengths, source, params=broken)
    theirs = feed("lm", filled("lm"), spans, lengths, source)
    assert_same_proposal(*(propose("lm", state, lengths, source)[1] for state in (ours, theirs)))


@every_kind
def test_padding_rows_write_nothing(kind):
    state = feed(kind, filled(kind), [], LENGTHS, junk=np.nan)
    jax.tree.map(np.testing.assert_array_equal, state, filled(kind))
    some = feed(kind, filled(kind), [(1, 1, 5, 7)], (7, 7, 6), junk=np.nan)
    assert_same_proposal(propose(kind, some, (7, 7, 6))[1], propose(kind, filled(kind))[1], [0, 2], [0, 2])


@every_kind
def test_inactive_slots_are_left_alone(kind):
    active = np.array([True, False, True])
    state, proposal = propose(kind, filled(kind), active=active)
    own = lambda tree: jax.tree.map(lambda x: x[1], tree)
    jax.tree.map(np.testing.assert_array_equal, own(state), own(filled(kind)))
    assert_same_proposal(proposal, propose(kind, filled(kind))[1], [0, 2], [0, 2])


@every_kind
def test_slots_are_independent_and_interchangeable(kind):
    order = [2, 0, 1]  # slot s holds text order[s]
    lengths = [LENGTHS[i] for i in order]
    state = feed(kind, empty(kind), [(s, order[s], 0, lengths[s]) for s in (1, 2, 0)], lengths)
    # Temperatures belong to slots here, so equality is of the greedy proposals and of what precedes sampling.
    _, moved = propose(kind, state, lengths, rows=order, seeds=SEEDS[order], mode="greedy")
    _, home = propose(kind, filled(kind), mode="greedy")
    assert_same_proposal(moved, home, slice(None), order)

    others = text(seed=5)
    mixed = tuple(np.concatenate([x[:1], y[1:]]) for x, y in zip(others, TEXT, strict=True))
    state = feed(kind, empty(kind), [(s, s, 0, n) for s, n in enumerate((3, 5, 6))], (3, 5, 6), source=mixed)
    _, proposal = propose(kind, state, (3, 5, 6), source=mixed)
    assert_same_proposal(proposal, propose(kind, filled(kind))[1], [1, 2], [1, 2])


@jax.jit
def law_and_draws(logits, probs):
    """The distributions of logits, and the tokens that the requests' own random numbers draw from `probs`."""
    sampling = make_sampling(SLOTS, vocab_size=VOCAB, temperature=[0.9, 0.6, 1.0])
    slots = jnp.tile(jnp.arange(probs.shape[1]), (SLOTS, 1))
    draws = uniforms(request_keys(jnp.asarray(SEEDS)), jnp.asarray(LENGTHS), Purpose.PROPOSE, slots)
    return probabilities(logits, sampling), sample(probs, draws)


@every_model
@pytest.mark.parametrize("block", [BLOCK, 2])
def test_br07_proposals_equal_the_teacher_forced_training_forward(kind, block):
    """Labels being the drafted tokens: same logits, so same distributions, draws and confidences."""
    if block != BLOCK and kind not in ("vanilla", "sliding", "eagle3", "mtp", "lm"):
        pytest.skip("a shorter block is the same code for this kind as for `vanilla`")
    _, proposal = propose(kind, filled(kind), block=block)
    logits, confidence = training_logits(kind, np.asarray(proposal.tokens), block)
    expected, drawn = law_and_draws(logits, proposal.probs)
    np.testing.assert_allclose(proposal.probs, expected, atol=2e-5)
    np.testing.assert_allclose(np.sum(np.asarray(proposal.probs), -1), 1, atol=1e-6)
    np.testing.assert_array_equal(proposal.tokens, drawn)
    assert (proposal.confidence_logits is None) == (not random_drafter(kind).config.confidence_head)
    if confidence is not None:
        np.testing.assert_allclose(proposal.confidence_logits, confidence, atol=2e-5)
    np.testing.assert_array_equal(proposal.num_valid, block)


@every_model
def test_greedy_proposals_are_the_argmax_of_training_logits(kind):
    _, proposal = propose(kind, filled(kind), mode="greedy")
    logits, _ = training_logits(kind, np.asarray(proposal.tokens), BLOCK)
    np.testing.assert_array_equal(proposal.tokens, np.argmax(logits, -1))
    assert proposal.probs is None, "greedy drafts are deterministic: q is one-hot"


@pytest.mark.parametrize("kind", HEADS)
def test_tokens_after_an_anchor_never_change_its_block(kind):
    """Nor do the tapped states from the anchor on, nor the other block of the row."""
    (tokens, taps), (other_tokens, other_taps) = TEXT, text(seed=7)
    anchors = np.array([[9, 4], [6, 6], [12, 3]], np.int32)
    labels = np.random.default_rng(2).integers(0, VOCAB, (SLOTS, 2, BLOCK)).astype(np.int32)
    ones = jnp.ones(tokens.shape, jnp.int32)
    run = train_program(kind, BLOCK)
    logits, confidence = run(jnp.asarray(tokens), jnp.asarray(taps), ones, jnp.asarray(anchors), jnp.asarray(labels))
    index, first = np.arange(LENGTH), anchors[:, :1]
    changed_tokens = np.where(index > first, other_tokens, tokens)
    changed_taps = np.where((index >= first)[..., None], other_taps, taps)
    moved = np.stack([anchors[:, 0], [2, 1, 0]], 1)
    relabelled = np.stack([labels[:, 0], labels[:, 1][:, ::-1]], 1)
    again, confidence_again = run(
        jnp.asarray(changed_tokens), jnp.asarray(changed_taps), ones, jnp.asarray(moved), jnp.asarray(relabelled)
    )
    np.testing.assert_allclose(again[:, 0], logits[:, 0], atol=1e-5)
    assert not np.allclose(again[:, 1], logits[:, 1], atol=1e-2)
    if confidence is not None:
        np.testing.assert_allclose(confidence_again[:, 0], confidence[:, 0], atol=1e-5)


@pytest.mark.parametrize("kind", AUTOREGRESSIVE)
def test_later_tokens_never_change_autoregressive_steps(kind):
    """Step t at position i reads tokens up to i+1+t and features up to i."""
    (tokens, taps), (other_tokens, other_taps) = TEXT, text(seed=7)
    last, index = 6, np.arange(LENGTH)
    run, ones = train_program(kind, BLOCK), jnp.ones(tokens.shape, jnp.int32)
    logits = run(jnp.asarray(tokens), jnp.asarray(taps), ones)
    changed = run(
        jnp.asarray(np.where(index > last + BLOCK, other_tokens, tokens)),
        jnp.asarray(np.where((index > last)[:, None], other_taps, taps)),
        ones,
    )
    np.testing.assert_allclose(changed[:, : last + 1], logits[:, : last + 1], atol=1e-5)
    assert not np.allclose(changed[:, last + 1 :], logits[:, last + 1 :], atol=1e-2)


@every_kind
def test_br30_a_reused_slot_equals_a_fresh_one(kind):
    """(c) A slot that held 12 tokens and a proposal, then 5 of another text, drafts like one that never did."""
    state = feed(kind, filled(kind), [(0, 0, 7, 12)], (12, 5, 6))
    state, _ = propose(kind, state, (12, 5, 6))
    second, lengths = text(seed=8), (5, 3, 1)
    spans = [(s, s, 0, n) for s, n in enumerate(lengths)]
    reused = feed(kind, state, spans, lengths, source=second)
    fresh = feed(kind, empty(kind), spans, lengths, source=second)
    ours, theirs = (propose(kind, s, lengths, source=second)[1] for s in (reused, fresh))
    assert_same_proposal(ours, theirs)
