"""How generation ends and counts: stop tokens, exact budgets, full contexts, finished neighbours, step counts."""

from __future__ import annotations

import functools

import pytest
from perfect_drafter import chain_drafter, chain_target

from dspark_jax.engine.generate import generate

EOS = 9
# 0 -> 3 -> 4 -> 7 -> 9 -> 1 -> 2 -> 6 -> 5 -> 8 -> 10 -> 0
CYCLE = [0, 3, 4, 7, 9, 1, 2, 6, 5, 8, 10]
FOLLOWING = [CYCLE[(CYCLE.index(t) + 1) % 11] for t in range(11)]


def chain_after(token, count):
    start = CYCLE.index(token) + 1
    return tuple(CYCLE[(start + i) % 11] for i in range(count))


@functools.lru_cache
def chain(block, right=1_000_000, max_position=64):
    target = chain_target(FOLLOWING, max_position=max_position)
    return target, chain_drafter(target, block, right=right)


def run(prompts, max_new, stops=(), block=5, batch_size=5, **options):
    return generate(
        *chain(block), prompts, max_new_tokens=max_new, stop_token_ids=stops, batch_size=batch_size, **options
    )


@pytest.mark.parametrize("stops", [(EOS,), (10, EOS, 8)])
def test_br26_stop_before_budget(stops):
    """Prefill gives 3, the block 4, 7, EOS, 1, 2: budgets of 20, 4, 3 and 1, and a prompt whose first token is EOS."""
    results = run([[0], [0], [0], [0], [7]], [20, 4, 3, 1, 20], stops)
    assert [r.tokens for r in results] == [(3, 4, 7, 9), (3, 4, 7, 9), (3, 4, 7), (3,), (9,)]
    assert [r.finish_reason for r in results] == ["stop", "stop", "length", "length", "stop"]
    assert [len(r.rounds) for r in results] == [1, 1, 1, 0, 0]


@pytest.mark.parametrize("stops", [(EOS,), (10, EOS, 8)])
def test_br26_stop_as_the_bonus_token(stops):
    """Block 2 accepts 4, 7 and the target itself adds EOS."""
    result = run([[0]], 20, stops, block=2)[0]
    assert (result.tokens, result.finish_reason) == ((3, 4, 7, 9), "stop")
    assert [(r.accepted, r.emitted, r.stopped, r.accepted_length) for r in result.rounds] == [(2, 3, False, 3)]


def test_br26_exact_budgets_without_a_stop_token():
    budgets = [1, 2, 8, 9, 10, 17]
    results = run([[0]] * 6, budgets, block=7, batch_size=6)
    assert [len(r.rounds) for r in results] == [0, 1, 1, 1, 2, 2]
    for result, budget in zip(results, budgets, strict=True):
        assert result.tokens == chain_after(0, budget) and result.finish_reason == "length"
        assert 1 + sum(r.emitted for r in result.rounds) == budget


def test_br26_plain_decoding_ends_alike():
    target, _ = chain(5)
    results = generate(
        target, None, [[0], [0], [0], [0], [7]], max_new_tokens=[20, 4, 3, 1, 20], stop_token_ids=(EOS,)
    )  # fmt: skip
    assert [r.tokens for r in results] == [(3, 4, 7, 9), (3, 4, 7, 9), (3, 4, 7), (3,), (9,)]
    assert [r.finish_reason for r in results] == ["stop", "stop", "length", "length", "stop"]


def test_br27_a_stop_inside_the_block_is_not_counted_beyond():
    """Verified [4, 7, EOS, 1, 2, bonus]: three tokens emitted, five accepted before the cut, no token of the target."""
    (step,) = run([[0]], 20, (EOS,))[0].rounds
    assert (step.proposed, step.accepted, step.accepted_raw, step.emitted, step.stopped) == (5, 3, 5, 3, True)
    assert step.accepted_length == 3


def test_br27_a_budget_inside_the_block_cuts_what_is_emitted_only():
    (step,) = run([[0]], 3)[0].rounds
    assert (step.accepted, step.accepted_raw, step.emitted, step.stopped) == (5, 5, 2, False)
    assert step.accepted_length == 6, "the paper's raw length counts the whole round"


@pytest.mark.parametrize("right", [0, 2])
def test_br27_partial_blocks(right):
    target, drafter = chain(5, right)
    result = generate(target, drafter, [[0]], max_new_tokens=8, batch_size=5)[0]
    assert result.tokens == chain_after(0, 8)
    assert all(r.accepted == r.accepted_raw == right for r in result.rounds)
    assert len(result.rounds) == -(-7 // (right + 1))


@pytest.mark.parametrize("batch_size", [1, 2, 4, 16])
def test_br13_a_finished_row_holds_nobody_up(batch_size):
    """Block 4; A has ended already, B wants 9 tokens, C 17. (Counts have one type here: arrays.)"""
    rows = {"A": (0, (), 0), "B": (9, chain_after(4, 9), 2), "C": (17, chain_after(6, 17), 4)}
    prompts = {"A": [0, 3], "B": [3, 4], "C": [2, 6]}
    for order in ("ABC", "CBA", "BAC"):
        results = run([prompts[n] for n in order], [rows[n][0] for n in order], block=4, batch_size=batch_size)
        for name, result in zip(order, results, strict=True):
            budget, tokens, rounds = rows[name]
            assert result.tokens == tokens and len(result.tokens) == budget, (order, name)
            assert len(result.rounds) == rounds, (order, name)


def test_br13_a_row_that_ends_at_its_prompt_gains_nothing():
    first, second = run([[0], [3, 4]], [1, 9], block=4, batch_size=2)
    assert first.tokens == (3,) and first.rounds == ()
    assert second.tokens == chain_after(4, 9) and len(second.rounds) == 2


def test_no_tokens_wanted():
    results = run([[0], [3, 4]], 0)
    assert [(r.tokens, r.finish_reason, r.rounds) for r in results] == [((), "length", ())] * 2
    assert run([], 5) == []


@pytest.mark.parametrize("speculative", [False, True])
def test_a_full_context_ends_the_request(speculative):
    """Text never outgrows the context, and speculation uses it to the last position as plain decoding does."""
    target, drafter = chain(5, max_position=20)
    results = generate(
        target, drafter if speculative else None, [[0] * 10, [0] * 19, [0] * 10], max_new_tokens=[50, 50, 10]
    )
    assert [len(r.prompt) + len(r.tokens) for r in results] == [20, 20, 20]
    assert [r.finish_reason for r in results] == ["context", "context", "length"]
    assert results[0].tokens == chain_after(0, 10)


def test_progress_and_the_stream_never_pass_the_stop():
    seen: list[tuple[int, int]] = []
    results = run([[0], [0], [0], [2]], [20, 3, 1, 12], (EOS,), batch_size=2, on_progress=lambda *x: seen.append(x))
    assert seen[-1] == (sum(len(r.tokens) for r in results), 4)
    assert [a for a, _ in seen] == sorted(a for a, _ in seen) and [b for _, b in seen] == sorted(b for _, b in seen)
    assert len(seen) == sum(max(len(r.rounds) for r in results[i : i + 2]) for i in (0, 2))
    assert seen[0] == (4 + 3, 2)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"prompts": [[1], []]}, "prompt 1 is empty"),
        ({"prompts": [[1, 11]]}, r"prompt 0 holds token ids 1..11; the target's table has rows 0..10"),
        ({"prompts": [[-1]]}, "prompt 0 holds token ids -1"),
        ({"prompts": [[1] * 64]}, "prompt 0 has 64 tokens; the target's context of 64 leaves no room"),
        ({"prompts": [[{"role": "user", "content": "hi"}]]}, "came without a tokenizer"),
        ({"max_new_tokens": [1, 2]}, "max_new_tokens has 2 entries for 1 prompts"),
        ({"temperature": [0.0, 1.0]}, "temperature has 2 entries for 1 prompts"),
        ({"top_k": [1, 2]}, "top_k has 2 entries for 1 prompts"),
        ({"seed": [1, 2]}, "seed has 2 entries for 1 prompts"),
        ({"max_new_tokens": -1}, "max_new_tokens is -1: expected a whole number of at least 0"),
        ({"temperature": -0.5}, "temperature is -0.5"),
        ({"top_p": 0.0, "temperature": 1.0}, "top_p is 0.0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"block_size": 0}, "block_size is 0"),
        ({"confidence_threshold": 1.5}, r"confidence_threshold is 1.5: expected a probability in \[0, 1\]"),
        ({"confidence_threshold": -0.1}, "confidence_threshold is -0.1"),
        ({"confidence_threshold": 0.5}, "drafter 'chain' has no confidence head"),
    ],
)
def test_arguments_that_are_refused(arguments, message):
    settings = {"prompts": [[1]], "max_new_tokens": 3, **arguments}
    with pytest.raises(ValueError, match=message):
        generate(*chain(5), settings.pop("prompts"), **settings)
