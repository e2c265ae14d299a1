"""The continuous-batching engine against plain decoding: policies, orders of arrival, cancellation, mixed settings."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest
from random_models import VOCAB, random_drafter, random_target

from dspark_jax.engine.engine import Engine, EngineFull
from dspark_jax.engine.probing import Probing
from dspark_jax.engine.programs import PROGRAMS
from dspark_jax.engine.results import Statistics
from dspark_jax.spec.schedule import CostCurve, Fixed, Greedy, NoDraft, Scheduled, Threshold

TARGET = random_target()
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, VOCAB, n).tolist() for n in (3, 1, 17, 9, 5, 40, 2)]
BUDGETS = [12, 20, 9, 1, 15, 8, 0]
SLOTS, LENGTH = 3, 64
CURVE = CostCurve.monotone((1, 2, 3, 4, 6, 9, 12, 15), (1.0, 1.05, 1.1, 1.2, 1.5, 2.2, 2.5, 3.5))
POLICIES = {
    "none": NoDraft(),
    "fixed": Fixed(2),
    "threshold": Threshold(0.5),
    "greedy": Greedy(CURVE),
    "scheduled": Scheduled(CURVE),
}
LADDERS = {"row_ladder": (3, 6, 15), "mixed_ladder": (6, 15), "chunk_ladder": (8, 16)}


def engine(policy, kind="vanilla", slots=SLOTS, drafter=None, policies=POLICIES, **options):
    drafter = None if policy == "none" else drafter or random_drafter(kind)
    return Engine(TARGET, drafter, slots=slots, max_length=LENGTH, policy=policies[policy], **{**LADDERS, **options})


def run(policy, prompts=PROMPTS, budgets=BUDGETS, settings=None, **options):
    made = engine(policy, **options)
    settings = settings or [{}] * len(prompts)
    numbers = [
        made.submit(p, max_new_tokens=b, stop_token_ids=(), **s)
        for p, b, s in zip(prompts, budgets, settings, strict=True)
    ]
    results = made.run()
    assert made.idle and set(results) == set(numbers)
    return [results[n] for n in numbers]


@functools.lru_cache
def alone():
    """Every prompt decoded plainly with the engine to itself."""
    return tuple(
        run("none", [p], [b], slots=1, row_ladder=(1,), mixed_ladder=(1,))[0]
        for p, b in zip(PROMPTS, BUDGETS, strict=True)
    )


def texts(results):
    return [(r.tokens, r.finish_reason) for r in results]


def test_plain_text_is_the_targets_own_argmax():
    from dspark_jax.engine.generate import generate

    theirs = generate(TARGET, None, PROMPTS, max_new_tokens=BUDGETS, stop_token_ids=())
    assert texts(alone()) == texts(theirs)


@pytest.mark.parametrize("policy", POLICIES)
def test_greedy_text_does_not_depend_on_the_policy(policy):
    results = run(policy)
    assert texts(results) == texts(alone())
    for result, budget in zip(results, BUDGETS, strict=True):
        assert len(result.tokens) == budget
        assert len(result.tokens) == min(budget, 1) + sum(r.emitted for r in result.rounds)


@pytest.mark.parametrize("kind", ["eagle3", "gated", "mtp", "ngram", "lm"])
def test_other_drafters(kind):
    assert texts(run("fixed", kind=kind)) == texts(alone())


@pytest.mark.parametrize("policy", [pytest.param("none", marks=pytest.mark.slow), "fixed", "threshold"])
def test_seeded_text_does_not_depend_on_neighbours(policy):
    """Alone, together, in reverse order, and after other requests have used the slots."""
    settings = [
        {"temperature": t, "seed": 10 + i, **more}
        for i, (t, more) in enumerate(
            [
                (1.0, {}),
                (0.0, {}),
                (0.8, {"top_k": 5}),
                (1.0, {"top_p": 0.9}),
                (0.7, {}),
                (1.0, {"min_p": 0.1}),
                (1.0, {}),
            ]
        )
    ]
    together = run(policy, settings=settings)
    backwards = run(policy, PROMPTS[::-1], BUDGETS[::-1], settings[::-1])
    assert texts(backwards[::-1]) == texts(together)
    for i in (0, 2, 3):
        single = run(policy, [PROMPTS[i]], [BUDGETS[i]], [settings[i]])
        assert texts(single) == texts([together[i]])
    doubled = run(policy, PROMPTS + PROMPTS, BUDGETS + BUDGETS, settings + settings)
    assert texts(doubled) == texts(together + together)


def test_a_random_life_of_the_engine():
    """Requests arrive, finish and are cancelled in any order; whoever is left alone gets its own text."""
    made, rng = engine("scheduled", max_queue=2), np.random.default_rng(5)
    expected, cancelled, refused = {}, set(), 0
    streamed: dict[int, list[int]] = {}
    for _ in range(60):
        for _ in range(rng.integers(0, 3)):
            i = int(rng.integers(0, len(PROMPTS)))
            try:
                expected[made.submit(PROMPTS[i], max_new_tokens=BUDGETS[i], stop_token_ids=())] = i
            except EngineFull:
                refused += 1
        if expected and rng.random() < 0.15:
            victim = int(rng.choice(list(expected)))
            if made.cancel(victim):
                cancelled.add(victim)
        for event in made.step():
            streamed.setdefault(event.request, []).extend(event.tokens)
    for event in made.stream():
        streamed.setdefault(event.request, []).extend(event.tokens)
    results = {n: made.take(n) for n in list(made.results)}
    assert set(results) == set(expected) and refused and cancelled and len(expected) > 15
    for number, i in expected.items():
        result, whole = results[number], alone()[i]
        assert tuple(streamed.get(number, ())) == result.tokens
        if number in cancelled:
            assert result.finish_reason == "cancelled" and result.tokens == whole.tokens[: len(result.tokens)]
        else:
            assert texts([result]) == texts([whole])


def test_the_executed_shapes_follow_the_policy_and_nothing_compiles_after_warm_up():
    made = engine("scheduled")
    made.warm_up()
    before = PROGRAMS.count
    for p, b in zip(PROMPTS, BUDGETS, strict=True):
        made.submit(p, max_new_tokens=b, stop_token_ids=())
    made.run()
    assert PROGRAMS.count == before
    s = made.statistics
    assert 0 < s.real_rows <= s.rows and s.tokens == sum(BUDGETS)
    # A steep curve must lead to smaller steps than verifying everything does.
    everything = engine("threshold", policies={"threshold": Threshold(0.0)})
    for p, b in zip(PROMPTS, BUDGETS, strict=True):
        everything.submit(p, max_new_tokens=b, stop_token_ids=())
    everything.run()
    whole = everything.statistics
    assert whole.padding < 1 and s.verify_budget / s.verify_steps < 0.8 * whole.verify_budget / whole.verify_steps


def test_the_caches_stay_where_they_are():
    """A view of donated state would turn donation into a copy."""
    made = engine("fixed", slots=1, row_ladder=(3,), mixed_ladder=(3,))
    made.submit(PROMPTS[1], max_new_tokens=60, stop_token_ids=())
    pointers = set()
    while not made.idle:
        made.step()
        jax.block_until_ready(made.memory)
        pointers.add(made.memory.caches[0].k.unsafe_buffer_pointer())
    assert len(pointers) == 1


def test_refusals_name_the_request_and_leave_the_others_alone():
    made = engine("fixed")
    number = made.submit(PROMPTS[0], max_new_tokens=BUDGETS[0], stop_token_ids=())
    for prompt, message in (([], "empty"), ([VOCAB + 5], "rows 0"), ([1] * 64, "leaves no room")):
        with pytest.raises(ValueError, match=message):
            made.submit(prompt, max_new_tokens=3)
    with pytest.raises(ValueError, match="temperature"):
        made.submit([1], max_new_tokens=3, temperature=float("nan"))
    assert texts([made.run()[number]]) == texts([alone()[0]])
    with pytest.raises(KeyError, match="no result"):
        made.take(number)


@pytest.mark.parametrize("policy", ["threshold", "greedy", "scheduled"])
def test_br32_confidences_that_are_no_numbers_cut_and_harm_nothing(policy):
    drafter = random_drafter("vanilla")
    broken = jax.tree.map(lambda x: np.full_like(x, np.nan), drafter.params["confidence_head"])
    drafter = dataclasses.replace(drafter, params={**drafter.params, "confidence_head": broken})
    results = run(policy, drafter=drafter)
    assert texts(results) == texts(alone())
    if policy != "scheduled":  # which fills its rows with drafts whatever it thinks of them
        assert all(r.proposed == 0 for x in results for r in x.rounds)


@pytest.mark.parametrize("lag", [0, 2])
def test_no_step_is_spent_on_requests_that_surely_have_ended(lag):
    """One slot, budgets and no stop tokens: a step with the prompt's end gives a token, each of the others one more."""
    made = engine("none", slots=1, lag=lag)
    budgets = [3, 1, 5]
    for prompt, budget in zip(PROMPTS[:3], budgets, strict=True):
        made.submit(prompt, max_new_tokens=budget, stop_token_ids=())
    results = made.run()
    assert [len(results[i].tokens) for i in range(3)] == budgets
    assert made.statistics.steps - made.statistics.prompt_steps == sum(budgets) - 3


def test_a_request_is_cancelled_while_its_last_steps_are_on_their_way():
    made = engine("none", slots=1)
    first = made.submit(PROMPTS[0], max_new_tokens=2, stop_token_ids=())
    other = made.submit(PROMPTS[1], max_new_tokens=3, stop_token_ids=())
    while made.requests[0] is None or made.requests[0].id != other:
        made.step()
    assert first not in made.results and made.cancel(first) and not made.cancel(first)
    results = made.run()
    assert results[first].finish_reason == "cancelled" and len(results[other].tokens) == 3


def test_a_curve_that_ends_too_early_is_refused():
    with pytest.raises(ValueError, match="ends at 4 rows, this engine's steps have up to 15"):
        engine("scheduled", policies={"scheduled": Scheduled(CostCurve((1, 4), (1.0, 2.0)))})


def test_the_context_ends_a_request_that_would_outgrow_its_slot():
    result = run("fixed", [PROMPTS[5]], [100])[0]
    assert result.finish_reason == "context" and len(result.prompt) + len(result.tokens) == LENGTH


def test_policies_that_cannot_be_followed_are_refused():
    with pytest.raises(ValueError, match="no drafter"):
        Engine(TARGET, None, slots=1, max_length=LENGTH, policy=Fixed(2))
    with pytest.raises(ValueError, match="no confidence head"):
        Engine(TARGET, random_drafter("eagle3"), slots=1, max_length=LENGTH, policy=Threshold(0.5))
    with pytest.warns(UserWarning, match="verifies every draft token"):
        Engine(TARGET, random_drafter("vanilla"), slots=1, max_length=LENGTH, policy=Scheduled())


def test_what_requests_told_is_remembered_when_all_have_ended():
    """Where drafting does not pay, a request that finds the engine empty is not drafted for: another was before it."""
    costly = CostCurve.monotone(CURVE.buckets, [3 * x for x in CURVE.bucket_seconds])
    made = engine("scheduled", policies={"scheduled": Scheduled(costly, CURVE)})
    for expected in (True, False):
        made.statistics, made.scheduling.probing = Statistics(), Probing()
        made.submit(PROMPTS[0], max_new_tokens=12, stop_token_ids=())
        made.run()
        assert (made.statistics.drafts > 0) == expected


@pytest.mark.slow
def test_greedy_text_on_a_real_model_does_not_depend_on_the_policy():
    """SmolLM2 with the package's drafter: whole answers to built-in prompts, four at a time."""
    from dspark_jax.draft.loading import load_drafter
    from dspark_jax.evaluation.tasks import load_tasks
    from dspark_jax.target.loading import load_target

    target = load_target("smollm2-135m")
    drafter = load_drafter("dspark", target)
    prompts = [prompt.messages for prompt in load_tasks(())][::3]
    curve = CostCurve.monotone((1, 4, 8, 16, 32), (1.0, 1.2, 1.5, 2.2, 4.0))
    policies = (NoDraft(), Fixed(7), Fixed(3), Threshold(0.4), Greedy(curve), Scheduled(curve))
    answers = []
    for policy in policies:
        made = Engine(
            target, None if isinstance(policy, NoDraft) else drafter, slots=4, max_length=256, policy=policy,
            row_ladder=(4, 8, 16, 32), mixed_ladder=(32,), chunk_ladder=(64,),
        )  # fmt: skip
        numbers = [made.submit(p, max_new_tokens=40) for p in prompts]
        results = made.run()
        answers.append([results[n].tokens for n in numbers])
        assert answers[-1] == answers[0], policy
    assert sum(map(len, answers[0])) > 150
