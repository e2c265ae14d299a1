"""Speculative generation equals plain decoding: every drafter, batch, threshold and width; prompts around buckets."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_models import KINDS, UNTRAINED, VOCAB, random_drafter, random_target

from dspark_jax.engine import generate as engine
from dspark_jax.engine.compiled import CompiledSteps
from dspark_jax.engine.generate import generate
from dspark_jax.engine.programs import PROGRAMS
from dspark_jax.engine.prompts import next_chunk
from dspark_jax.engine.requests import Request
from dspark_jax.engine.state import Draft, Weights
from dspark_jax.engine.steps import Steps
from dspark_jax.target.transformer import forward_rows
from dspark_jax.types import Proposal

TARGET = random_target()
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, VOCAB, n).tolist() for n in (3, 1, 17, 9, 5)]
BUDGETS = [12, 20, 9, 1, 15]


@functools.lru_cache
def plain(batch_size=5):
    return tuple(generate(TARGET, None, PROMPTS, max_new_tokens=BUDGETS, batch_size=batch_size))


def speculate(kind, prompts=PROMPTS, budgets=BUDGETS, batch_size=5, **options):
    return generate(TARGET, random_drafter(kind), prompts, max_new_tokens=budgets, batch_size=batch_size, **options)


def assert_same_text(ours, theirs):
    """Equal tokens and endings; a failure shows how near to ties the choices were."""
    for a, b in zip(ours, theirs, strict=True):
        assert a.tokens == b.tokens, (a.first_top2_gap, [r.top2_gap for r in a.rounds])
        assert a.finish_reason == b.finish_reason


def assert_own_argmax(target, result):
    """Token by token against one forward over the finished text, without any cache."""
    ids = jnp.asarray([[*result.prompt, *result.tokens]])
    positions = jnp.arange(ids.shape[1])[None]
    hidden = jax.jit(
        lambda params: forward_rows(target.config, params, target.tables, ids, jnp.ones_like(ids), positions)
    )(target.params).last_hidden
    best = np.asarray(jnp.argmax(target.tables.logits(hidden), -1))[0]
    assert tuple(best[len(result.prompt) - 1 : -1]) == result.tokens


def test_plain_text_is_the_targets_own_argmax():
    assert_own_argmax(TARGET, plain()[0])
    assert len({r.tokens[:5] for r in plain()}) >= 4, "prompts must matter for the tests below to mean anything"


@pytest.mark.parametrize("kind", (*KINDS, *UNTRAINED))
def test_greedy_text_equals_plain_decoding(kind):
    results = speculate(kind)
    assert_same_text(results, plain())
    for result, budget in zip(results, BUDGETS, strict=True):
        assert len(result.tokens) == budget == 1 + sum(r.emitted for r in result.rounds)
        assert all(r.proposed <= 4 and 0 <= r.accepted <= r.accepted_raw <= r.proposed for r in result.rounds)
        has_head = random_drafter(kind).config.confidence_head
        assert all((r.confidences is not None) == has_head for r in result.rounds)


def test_a_gemma4_pair():
    """Two kinds of layers in target and drafter, each with caches of its own width; capped logits."""
    target = random_target(as_gemma4=True)
    alone, drafted = (
        generate(target, drafter, PROMPTS, max_new_tokens=BUDGETS, batch_size=5)
        for drafter in (None, random_drafter("gemma4"))
    )
    assert_own_argmax(target, alone[0])
    assert len({r.tokens[:5] for r in alone}) >= 4, "prompts must matter for this test to mean anything"
    assert_same_text(drafted, alone)


@pytest.mark.parametrize("kind, batch_size", [("vanilla", 1), ("vanilla", 2), ("eagle3", 1)])
def test_greedy_text_does_not_depend_on_the_batch(kind, batch_size):
    assert_same_text(speculate(kind, batch_size=batch_size), plain())


def test_blocks_shorter_than_trained():
    assert_same_text(speculate("vanilla", block_size=2), plain())


def test_thresholds_change_the_drafts_but_not_the_text():
    proposed = []
    for threshold in (0.3, 0.55, 1.0):
        results = speculate("vanilla", confidence_threshold=threshold)
        assert_same_text(results, plain())
        proposed.append(sum(r.proposed for x in results for r in x.rounds) / sum(len(x.rounds) for x in results))
        for round_ in (r for x in results for r in x.rounds):
            kept = np.cumprod(np.asarray(round_.confidences) >= threshold).sum()
            assert round_.proposed == kept
    assert proposed[0] > proposed[1] > proposed[2] == 0


def test_the_rows_of_a_round_follow_what_is_kept(monkeypatch):
    """Alone, a round runs the anchor and the drafts that are kept: rungs for blocks of four hold every number."""
    ran = []

    def step(self, slots, memory, mode, draft, chunk, rows, diagnostics=False, step=CompiledSteps.step):
        ran.append(rows)
        return step(self, slots, memory, mode, draft, chunk, rows, diagnostics)

    monkeypatch.setattr(CompiledSteps, "step", step)
    for threshold in (0.0, 0.55):
        ran.clear()
        (result,) = speculate("vanilla", PROMPTS[:1], BUDGETS[0], batch_size=1, confidence_threshold=threshold)
        assert ran == [0, *(r.proposed + 1 for r in result.rounds)]
        assert all(r.proposed == 4 for r in result.rounds) == (threshold == 0)


@pytest.mark.parametrize("kind", ["vanilla", "eagle3", *UNTRAINED])
def test_br21_mixed_temperatures_keep_greedy_rows_greedy(kind):
    """Temperatures 0, 1e-6 and 9.9e-6 beside sampled rows decode the plain greedy text."""
    results = speculate(kind, temperature=[0.0, 1.0, 9.9e-6, 0.7, 1e-6])
    for i in (0, 2, 4):
        assert_same_text([results[i]], [plain()[i]])
    tiny = speculate(kind, temperature=1e-6)
    assert_same_text(tiny, plain())


@pytest.mark.parametrize("kind", ["vanilla", "eagle3", *UNTRAINED])
def test_seeded_text_is_the_same_alone_and_in_a_batch(kind):
    seeds = [7, 8, 9, 10, 11]
    settings = {"temperature": 1.0, "batch_size": 5}
    together = speculate(kind, seed=7, **settings)
    assert_same_text(speculate(kind, seed=seeds, **settings), together)
    reordered = speculate(kind, PROMPTS[::-1], BUDGETS[::-1], seed=seeds[::-1], **settings)
    assert_same_text(reordered[::-1], together)
    for i in (1, 2):
        assert_same_text(speculate(kind, [PROMPTS[i]], BUDGETS[i], seed=[seeds[i]], **settings), [together[i]])
    other = speculate(kind, seed=100, **settings)
    assert [r.tokens for r in other] != [r.tokens for r in together]


def test_a_numpy_seed_counts_up_like_an_int():
    settings = {"temperature": 1.0, "batch_size": 5}
    assert_same_text(speculate("vanilla", seed=np.int64(7), **settings), speculate("vanilla", seed=7, **settings))


WIDTHS, NEW, PROMPT = range(1, 9), 20, 4
STOPS = np.full(1, -1, np.int32)


@functools.lru_cache
def verified_run(width):
    """Three rows from the same prompt verified `width` rows at a time, with drafts that are wrong, half right, right.

    Returns the text of every row and its caches over all positions that were run.
    """
    steps = Steps(
        target=TARGET.config, drafter=None, dtype=jnp.float32, slots=3, max_length=40, context=64, policy="fixed",
        limit=width - 1, block_size=width - 1,
    )  # fmt: skip
    weights = Weights(TARGET.params, TARGET.tables, None)
    slots, memory = steps.init(VOCAB, num_stops=1)
    slots = dataclasses.replace(slots, budgets=jnp.full(3, NEW, jnp.int32))
    texts: list[list[int]] = []
    prefill, verify = (jax.jit(functools.partial(steps.step, rows=rows)) for rows in (0, 3 * width))
    for slot in range(3):
        request = Request(slot, PROMPTS[3][:PROMPT], NEW, {}, "greedy", 0, STOPS)
        chunk, firsts = next_chunk([(slot, request)], (PROMPT,), 3)
        assert firsts == {slot}
        slots, memory, report = prefill(weights, slots, memory, None, chunk)
        texts.append([int(report.tokens[slot, 0])])
    known = None if width == 1 else verified_run(1)[0][0]
    while not np.all(np.asarray(slots.done)):
        draft = None
        if known is not None:
            drafts = np.array([(known[len(t) :] + [0] * width)[: width - 1] for t in texts], np.int32)
            right = np.array([0, (width - 1) // 2, width - 1])
            drafts = np.where(np.arange(width - 1) < right[:, None], drafts, (drafts + 1) % VOCAB)
            keep = jnp.full(3, width - 1, jnp.int32)
            draft = Draft(Proposal(jnp.asarray(drafts), None, None, keep), keep, None)
        slots, memory, report = verify(weights, slots, memory, draft, None)
        for text, tokens, count in zip(texts, np.asarray(report.tokens), np.asarray(report.count), strict=True):
            text += [int(t) for t in tokens[:count]]
    run = PROMPT + NEW - 1  # the last token has not been run
    return texts, [np.asarray(x)[:, :, :run] for cache in memory.caches for x in (cache.k, cache.v)]


@pytest.mark.parametrize("width", WIDTHS)
def test_br30_verify_widths_leave_the_same_text_and_caches(width):
    """(b) Widths 1..B+1, after none, part and all of a block accepted, against one token at a time."""
    texts, caches = verified_run(width)
    one_by_one, expected = verified_run(1)
    assert texts == one_by_one and all(len(t) == NEW for t in texts)
    for ours, theirs in zip(caches, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_br30_one_drafter_object_serves_long_then_short_prompts():
    """(c) Its second result equals the first use of a fresh object."""
    drafter = random_drafter("eagle3")
    speculate("eagle3", [PROMPTS[2][:12]], 20)
    second = speculate("eagle3", [PROMPTS[4]], 15)
    assert random_drafter("eagle3") is drafter
    assert_same_text(second, [plain()[4]])
    random_drafter.cache_clear()
    fresh = speculate("eagle3", [PROMPTS[4]], 15)
    assert [r.accepted for r in fresh[0].rounds] == [r.accepted for r in second[0].rounds]


@pytest.mark.parametrize("kind", ["eagle3", "vanilla"])
def test_a_prompt_in_chunks_drafts_like_a_prompt_at_once(kind, monkeypatch):
    """The last token of a chunk is followed by the first of the next, for drafters that pair them."""
    at_once = speculate(kind, [PROMPTS[2]], 15)
    monkeypatch.setattr(engine, "CHUNK_LADDER", (4,))
    in_chunks = speculate(kind, [PROMPTS[2]], 15)
    assert_same_text(in_chunks, at_once)
    assert [r.accepted for r in in_chunks[0].rounds] == [r.accepted for r in at_once[0].rounds]


def test_br36_prompts_around_the_rungs(monkeypatch):
    """Lengths 1..33 on rungs 16 and 32: two prefill programs, the unpadded answer, and no compilation ever after."""
    monkeypatch.setattr(engine, "CHUNK_LADDER", (16, 32))
    long = np.random.default_rng(3).integers(0, VOCAB, 33).tolist()
    prompts = [long[:n] for n in range(1, 34)]  # 33 runs as 32 + 1
    before = PROGRAMS.count
    first = generate(TARGET, None, prompts, max_new_tokens=1, batch_size=1)
    # One of the two may be known from other tests; `init` is the third.
    assert PROGRAMS.count - before <= 3
    before = PROGRAMS.count
    second = generate(TARGET, None, prompts, max_new_tokens=1, batch_size=1)
    assert PROGRAMS.count == before, "a second sweep must not compile"
    assert_same_text(second, first)

    ids, positions = jnp.asarray([long]), jnp.arange(33)[None]
    hidden = jax.jit(
        lambda params: forward_rows(TARGET.config, params, TARGET.tables, ids, jnp.ones_like(ids), positions)
    )(TARGET.params).last_hidden
    logits = np.asarray(TARGET.tables.logits(hidden))[0]
    top = np.sort(logits, -1)
    assert [r.tokens[0] for r in first] == logits.argmax(-1).tolist()
    np.testing.assert_allclose([r.first_top2_gap for r in first], top[:, -1] - top[:, -2], atol=1e-5)
