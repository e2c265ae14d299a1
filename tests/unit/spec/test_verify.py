"""Verification and commitment against literal matrices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.sampling import make_sampling, request_keys
from dspark_jax.spec import verify as rules
from dspark_jax.spec.verify import FinishReason, accept_prefix, confidence_cut, leading
from dspark_jax.types import Proposal, Verification

NO_STOP = -1
verify_block = jax.jit(rules.verify_block)
commit_tokens = jax.jit(rules.commit_tokens)


def proposal(tokens, probs=None, num_valid=None) -> Proposal:
    tokens = jnp.asarray(tokens, jnp.int32)
    valid = jnp.full(tokens.shape[0], tokens.shape[1]) if num_valid is None else jnp.asarray(num_valid)
    return Proposal(tokens=tokens, probs=probs, confidence_logits=None, num_valid=valid)


def favour(tokens, vocab=10):
    """Logits whose argmax in each row is the given token."""
    return 5.0 * jax.nn.one_hot(jnp.asarray(tokens), vocab)


def verify(logits, drafts, *, lengths=None, temperature=0.0, mode=None, stop=None, active=None, positions=None):
    slots, block = drafts.tokens.shape
    settings = make_sampling(slots, vocab_size=logits.shape[-1], temperature=temperature)
    return verify_block(
        logits,
        drafts,
        jnp.full(slots, block) if lengths is None else jnp.asarray(lengths),
        jnp.arange(slots) if positions is None else positions,
        request_keys(jnp.arange(slots)),
        settings if mode is None else settings.replace(mode=mode),
        jnp.full((slots, 1), NO_STOP) if stop is None else jnp.asarray(stop),
        jnp.ones(slots, bool) if active is None else jnp.asarray(active),
    )


def test_accept_prefix_by_hand():
    p = jnp.array([[0.5, 0.1, 0.9], [0.2, 0.2, 0.2], [0.0, 0.5, 0.5], [0.3, 0.3, jnp.nan]])
    q = jnp.array([[0.5, 0.4, 0.3], [0.4, 0.4, 0.4], [0.0, 0.5, 0.5], [0.3, 0.3, 0.3]])
    u = jnp.array([[0.9, 0.3, 0.0], [0.49, 0.5, 0.0], [0.0, 0.0, 0.0], [0.9, 0.9, 0.0]])
    # Row 1: the ratio is .5 and u = .5 is not below it. Row 2: p = q = 0 is never accepted. Row 3: NaN rejects.
    np.testing.assert_array_equal(accept_prefix(p, q, u, jnp.array([3, 3, 3, 3])), [1, 1, 0, 2])
    np.testing.assert_array_equal(accept_prefix(p, q, u, jnp.array([0, 1, 3, 1])), [0, 1, 0, 1])


def test_leading():
    flags = jnp.array([[True, True, False, True], [False, True, True, True], [True] * 4])
    np.testing.assert_array_equal(leading(flags), [2, 0, 4])


@pytest.mark.parametrize("mode", ["greedy", "plain", "filtered"])
@pytest.mark.parametrize("one_hot", [False, True])
def test_greedy_by_hand_in_every_mode(mode, one_hot):
    """Target's own choices 1 2 3 4; drafts that agree for 3, 2, 1 and 0 tokens, and one that is verified in part."""
    tokens = [[1, 2, 3], [1, 2, 9], [1, 9, 3], [9, 2, 3], [1, 2, 3]]
    drafts = proposal(tokens, jax.nn.one_hot(jnp.array(tokens), 10) if one_hot else None)
    out = verify(favour([[1, 2, 3, 4]] * 5), drafts, lengths=[3, 3, 3, 3, 1], mode=mode)
    np.testing.assert_array_equal(out.num_accepted, [3, 2, 1, 0, 1])
    np.testing.assert_array_equal(out.next_token, [4, 3, 2, 1, 2])
    assert not np.any(out.stopped)


@pytest.mark.parametrize("mode", ["greedy", "plain"])
def test_no_draft_token_verified_is_plain_decoding(mode):
    out = verify(favour([[7, 2, 3, 4]]), proposal([[7, 2, 3]]), lengths=[0], mode=mode)
    assert (int(out.num_accepted[0]), int(out.next_token[0])) == (0, 7)


@pytest.mark.parametrize("mode", ["greedy", "plain", "filtered"])
def test_a_block_without_drafts_is_plain_decoding(mode):
    empty = proposal(np.zeros((2, 0)))
    stop, active = jnp.full((2, 1), 7), jnp.array([True, True])
    out = verify(favour([[7], [3]]), empty, mode=mode, stop=stop)
    commit = commit_tokens(out, empty, jnp.array([9, 1]), jnp.array([9, 9]), stop, active)
    np.testing.assert_array_equal(commit.tokens, [[7], [3]])
    np.testing.assert_array_equal(commit.reason, [FinishReason.STOP, FinishReason.LENGTH])


def test_tokens_beyond_num_valid_are_never_accepted():
    out = verify(favour([[1, 2, 3, 4]] * 2), proposal([[1, 2, 3]] * 2, num_valid=[2, 0]))
    np.testing.assert_array_equal(out.num_accepted, [2, 0])
    np.testing.assert_array_equal(out.next_token, [3, 1])


@pytest.mark.parametrize("mode", ["greedy", "plain"])
def test_an_accepted_stop_token_cuts_the_count(mode):
    drafts = proposal([[1, 2, 3]] * 4)
    stops = [[2, NO_STOP], [9, 3], [4, NO_STOP], [9, NO_STOP]]
    out = verify(favour([[1, 2, 3, 4]] * 4), drafts, lengths=[3, 3, 3, 0], stop=stops, mode=mode)
    np.testing.assert_array_equal(out.num_accepted, [2, 3, 3, 0])
    np.testing.assert_array_equal(out.num_accepted_raw, [3, 3, 3, 0])
    np.testing.assert_array_equal(out.stopped, [True, True, False, False])


def test_a_rejected_stop_token_does_not_stop():
    out = verify(favour([[1, 2, 3, 4]]), proposal([[1, 9, 3]]), stop=[[9]])
    assert (int(out.num_accepted[0]), bool(out.stopped[0])) == (1, False)


@pytest.mark.parametrize("mode", ["greedy", "plain", "filtered"])
def test_inactive_slots_return_zeros_and_their_rubbish_stays_theirs(mode):
    logits = favour([[1, 2, 3, 4]] * 3)
    expected = verify(logits, proposal([[1, 2, 9]] * 3), mode=mode)
    logits = logits.at[1].set(jnp.nan)
    out = verify(logits, proposal([[1, 2, 9]] * 3), mode=mode, active=[True, False, True])
    for name in ("num_accepted", "num_accepted_raw", "next_token", "stopped"):
        assert int(getattr(out, name)[1]) == 0
        np.testing.assert_array_equal(getattr(out, name)[::2], getattr(expected, name)[::2])


def test_br21_verification_at_tiny_temperature():
    logits = jnp.tile(jnp.array([1.0, 1.001, 0.5]), (3, 3, 1))
    drafts = proposal([[1, 1]] * 3, jnp.tile(jnp.array([0.0, 1.0, 0.0]), (3, 2, 1)))
    out = verify(logits, drafts, temperature=[0.0, 1e-6, 9.9e-6], mode="plain")
    np.testing.assert_array_equal(out.num_accepted, [2, 2, 2])
    np.testing.assert_array_equal(out.next_token, [1, 1, 1])


def test_br13_row_order_and_batch_size_do_not_matter():
    generator = np.random.default_rng(0)
    logits = generator.normal(0, 2, (16, 4, 11)).astype(np.float32)
    tokens = generator.integers(0, 11, (16, 3)).astype(np.int32)
    # Drafts that the target likes well enough for every count to occur.
    np.put_along_axis(logits[:, :3], tokens[..., None], np.float32(3.0), axis=2)
    probs = generator.dirichlet(np.ones(11), (16, 3)).astype(np.float32)
    settings = make_sampling(16, vocab_size=11, temperature=[0.0, 0.7, 1.0, 1.4] * 4, top_k=[None, None, 5, None] * 4)
    settings = jax.tree.map(np.asarray, settings)

    @jax.jit
    def verify_rows(logits, drafts, lengths, positions, seeds, settings, stop, active):
        return rules.verify_block(logits, drafts, lengths, positions, request_keys(seeds), settings, stop, active)

    def run(rows):
        rows = np.asarray(rows)
        drafts = Proposal(
            tokens=tokens[rows], probs=probs[rows], confidence_logits=None, num_valid=np.full(len(rows), 3)
        )
        own = jax.tree.map(lambda x: x[rows], settings)
        stop, active = np.full((len(rows), 1), 4), np.ones(len(rows), bool)
        out = verify_rows(logits[rows], drafts, 3 - rows % 4 // 3, rows * 3, rows + 40, own, stop, active)
        return {name: np.asarray(value) for name, value in vars(out).items()}

    whole = run(np.arange(16))
    assert len(set(whole["num_accepted_raw"].tolist())) == 4
    for rows in ([3], [7, 2], [15, 0, 8, 4], generator.permutation(16)):
        for name, value in run(rows).items():
            np.testing.assert_array_equal(value, whole[name][np.asarray(rows)], err_msg=name)


def test_confidence_cut_by_hand():
    def logits(*c):
        return jnp.log(jnp.array([c])) - jnp.log1p(-jnp.array([c]))

    assert confidence_cut(logits(0.9, 0.8, 0.5), 0.6)[0] == 2
    assert confidence_cut(logits(0.9, 0.0, 0.8), 0.5)[0] == 1
    assert confidence_cut(logits(0.9, 0.0, 0.8), 0.0)[0] == 3
    assert confidence_cut(logits(1.0, 1.0, 1.0), 1.0)[0] == 3


def test_br32_nan_cuts_its_own_row_only():
    logits = jnp.array([[3.0, jnp.nan, 3.0], [jnp.nan] * 3, [3.0, 3.0, 3.0]])
    np.testing.assert_array_equal(confidence_cut(logits, 0.5), [1, 0, 3])


@pytest.mark.parametrize("threshold", [-0.1, 1.5, float("nan")])
def test_br32_thresholds_outside_the_unit_interval_are_refused(threshold):
    with pytest.raises(ValueError, match="expected a probability in"):
        confidence_cut(jnp.zeros((1, 3)), threshold)


def commit(accepted, next_token, drafts, *, remaining, room=100, stop=(9,), stopped=False, active=True):
    out = commit_tokens(
        Verification(
            num_accepted=jnp.array([accepted]),
            num_accepted_raw=jnp.array([accepted]),
            next_token=jnp.array([next_token]),
            stopped=jnp.array([stopped]),
        ),
        proposal([drafts]),
        jnp.array([remaining]),
        jnp.array([room]),
        jnp.array([stop]),
        jnp.array([active]),
    )
    assert bool(out.done[0]) == (int(out.reason[0]) != FinishReason.UNFINISHED)
    assert not np.any(out.tokens[0, int(out.count[0]) :])
    return np.asarray(out.tokens[0, : int(out.count[0])]).tolist(), FinishReason(int(out.reason[0])).name


@pytest.mark.parametrize(
    "arguments, expected",
    [
        # Prefill gave 3; a perfect drafter proposes 4 7 9=EOS 1 2, the target would add 6. remaining = max_new - 1.
        (dict(remaining=19, accepted=3, stopped=True), ([4, 7, 9], "STOP")),
        (dict(remaining=3, accepted=3, stopped=True), ([4, 7, 9], "STOP")),
        (dict(remaining=2, accepted=3, stopped=True), ([4, 7], "LENGTH")),
        (dict(remaining=0, accepted=3, stopped=True), ([], "LENGTH")),
        # Without an EOS: whole block and bonus, cut at the budget.
        (dict(remaining=7, accepted=5, stop=(8,)), ([4, 7, 9, 1, 2, 6], "UNFINISHED")),
        (dict(remaining=6, accepted=5, stop=(8,)), ([4, 7, 9, 1, 2, 6], "LENGTH")),
        (dict(remaining=4, accepted=5, stop=(8,)), ([4, 7, 9, 1], "LENGTH")),
        # The target's own token is the stop token, from a list of them.
        (dict(remaining=19, accepted=2, stop=(8, 6)), ([4, 7, 6], "STOP")),
        (dict(remaining=3, accepted=2, stop=(8, 6)), ([4, 7, 6], "STOP")),
        (dict(remaining=2, accepted=2, stop=(8, 6)), ([4, 7], "LENGTH")),
        # A stop token among the drafts that were rejected is nobody's business.
        (dict(remaining=19, accepted=1), ([4, 6], "UNFINISHED")),
        (dict(remaining=19, accepted=0), ([6], "UNFINISHED")),
        # The context ends first; at the same token the budget is named.
        (dict(remaining=19, accepted=5, stop=(8,), room=3), ([4, 7, 9], "CONTEXT")),
        (dict(remaining=3, accepted=5, stop=(8,), room=3), ([4, 7, 9], "LENGTH")),
        (dict(remaining=19, accepted=3, stopped=True, room=3), ([4, 7, 9], "STOP")),
        (dict(remaining=19, accepted=5, active=False), ([], "UNFINISHED")),
    ],
)
def test_br26_stop_before_length_before_context(arguments, expected):
    assert commit(next_token=6, drafts=[4, 7, 9, 1, 2], **arguments) == expected
