"""The chunked vocabulary loss against a dense one: values, gradients, memory; numbers of FAULTS BR-14 and BR-07."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.training.vocab_loss import SlotWeights, vocab_loss
from dspark_jax.types import TargetTables

B, A, G, D, R, V = 2, 7, 3, 5, 3, 17
TERMS = ("cross_entropy", "total_variation", "soft_cross_entropy")


def dense_losses(hidden, markov, w2, target_hidden, head, labels, cap=None):
    """(nll, tv, soft nll) of every slot from all logits at once; a cap bounds the base logits alone."""
    capped = (lambda x: x) if cap is None else (lambda x: cap * jnp.tanh(x / cap))
    logits = capped(hidden @ head.T)
    log_draft = jax.nn.log_softmax(logits if markov is None else logits + markov @ w2.T)
    nll = -jnp.take_along_axis(log_draft, labels[..., None], axis=-1)[..., 0]
    teacher = jax.nn.softmax(capped(target_hidden @ head.T))
    return nll, jnp.abs(jnp.exp(log_draft) - teacher).sum(-1), -(teacher * log_draft).sum(-1)


@functools.lru_cache
def case(seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    inputs = (draw(B, A, G, D), draw(B, A, G, R), draw(V, R), draw(B, A, G, D))
    weights = {name: jnp.asarray(rng.random((B, A, G)), jnp.float32) for name in TERMS}
    return inputs, draw(V, D), jnp.asarray(rng.integers(0, V, (B, A, G)), jnp.int32), weights


@functools.lru_cache
def reference(cap=None):
    """Dense value, per-slot losses and gradients by hidden, markov state and W2, with all three terms on."""
    (hidden, markov, w2, target), head, labels, weights = case()

    @jax.jit
    def run(hidden, markov, w2):
        def loss(*args):
            slots = dense_losses(*args, target, head, labels, cap)
            return sum(jnp.sum(w * x) for w, x in zip(weights.values(), slots, strict=True)), slots

        return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(hidden, markov, w2)

    return run(hidden, markov, w2)


def chunked(chunk, dtype=jnp.float32, cap=None):
    (hidden, markov, w2, target), head, labels, weights = case()

    @jax.jit
    def run(hidden, markov, w2):
        def loss(*args):
            tables = TargetTables(embed=head, head=head, soft_cap=cap)
            return vocab_loss(*args, target, labels, tables, SlotWeights(**weights), chunk=chunk, dtype=dtype)

        return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(hidden, markov, w2)

    return run(hidden, markov, w2)


@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("chunk", [1, 3, 7, 16])
def test_equals_the_dense_loss(chunk, cap):
    """Chunks that divide the seven anchors, that do not, and that are larger than them; logits reach beyond the cap."""
    (value, slots), gradients = chunked(chunk, cap=cap)
    (expected, (nll, tv, soft)), expected_gradients = reference(cap)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for ours, theirs in ((slots.nll, nll), (slots.tv, tv), (slots.soft_nll, soft)):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    for name, ours, theirs in zip(("hidden", "markov", "w2"), gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("cap", [None, 1.5])
def test_bfloat16_products(cap):
    (value, slots), gradients = chunked(3, jnp.bfloat16, cap)
    (expected, (nll, _, _)), expected_gradients = reference(cap)
    assert slots.nll.dtype == jnp.float32
    np.testing.assert_allclose(value, expected, rtol=1e-2)
    np.testing.assert_allclose(slots.nll, nll, atol=0.1)
    for name, ours, theirs in zip(("hidden", "markov", "w2"), gradients, expected_gradients, strict=True):
        assert ours.dtype == jnp.float32
        np.testing.assert_allclose(ours, theirs, atol=0.05 * np.abs(theirs).max(), err_msg=name)


@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("term", TERMS)
def test_each_term_alone_without_a_sequential_head(term, cap):
    (hidden, _, _, target), head, labels, weights = case()
    tables = TargetTables(embed=head, head=head, soft_cap=cap)

    @jax.jit
    def run(hidden):
        one = SlotWeights(**{term: weights[term]})
        loss = lambda h: vocab_loss(h, None, None, target, labels, tables, one, chunk=4)[0]
        slots = lambda h: dense_losses(h, None, None, target, head, labels, cap)[TERMS.index(term)]
        dense = lambda h: jnp.sum(weights[term] * slots(h))
        return jax.value_and_grad(loss)(hidden), jax.value_and_grad(dense)(hidden)

    (value, gradient), (expected, expected_gradient) = run(hidden)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-4, atol=1e-5)


def test_the_program_never_holds_all_logits():
    """Scratch memory of loss and gradient at 8 times the anchors grows by the small arrays only, not by A*G*V."""
    vocab, width = 2003, 4

    def temporaries(anchors):
        shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
        hidden, head = shape(1, anchors, G, width), shape(vocab, width)
        labels = jax.ShapeDtypeStruct((1, anchors, G), jnp.int32)

        def loss(hidden, target, head, labels):
            ones = jnp.ones(labels.shape)
            weights = SlotWeights(cross_entropy=ones, total_variation=ones)
            tables = TargetTables(embed=head, head=head)
            return vocab_loss(hidden, None, None, target, labels, tables, weights, chunk=8)[0]

        compiled = jax.jit(jax.grad(loss)).lower(hidden, hidden, head, labels).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    small, large = temporaries(16), temporaries(128)
    logits_of_the_difference = (128 - 16) * G * vocab * 4
    assert large - small < logits_of_the_difference / 20, (small, large)


def two_token_loss(draft, target, **kwargs):
    """Loss of one slot over a vocabulary of two with the identity as head, so that states are logits."""
    identity = TargetTables(embed=jnp.eye(2), head=jnp.eye(2))
    weights = SlotWeights(total_variation=jnp.ones((1, 1, 1)))
    at = lambda x: jnp.asarray(x, jnp.float32).reshape(1, 1, 1, 2)
    label = jnp.zeros((1, 1, 1), jnp.int32)
    return vocab_loss(at(draft), None, None, at(target), label, identity, weights, **kwargs)


@pytest.mark.parametrize(
    "p, q, l1", [((1.0, 0.0), (0.0, 1.0), 2.0), ((0.5, 0.5), (0.75, 0.25), 0.5), ((0.2, 0.8), (0.2, 0.8), 0.0)]
)
def test_br14_l1_is_the_whole_sum(p, q, l1):
    """The accept rate is 1 - L1/2: 0, .75 and 1."""
    logits = lambda x: np.log(np.maximum(x, 1e-30))
    value, slots = two_token_loss(logits(q), logits(p))
    assert value == pytest.approx(l1, abs=1e-6) and slots.tv.item() == pytest.approx(l1, abs=1e-6)


def test_br14_no_gradient_into_the_teacher():
    """Neither through the target's states nor through a head that is shared with the draft, for all three terms."""
    (hidden, markov, w2, target), head, labels, weights = case()

    @jax.jit
    def gradients(target, head, hidden):
        def loss(target, head, hidden):
            tables = TargetTables(embed=head, head=head)
            return vocab_loss(hidden, markov, w2, target, labels, tables, SlotWeights(**weights), chunk=3)[0]

        return jax.grad(loss, argnums=(0, 1, 2))(target, head, hidden)

    by_target, by_head, by_hidden = gradients(target, head, hidden)
    assert not np.any(np.asarray(by_target)) and not np.any(np.asarray(by_head))
    assert np.any(np.asarray(by_hidden))


def test_br14_cross_entropy_alone_needs_no_teacher():
    (hidden, markov, w2, _), head, labels, weights = case()
    tables = TargetTables(embed=head, head=head)
    on = SlotWeights(cross_entropy=weights["cross_entropy"])
    value, slots = jax.jit(lambda: vocab_loss(hidden, markov, w2, None, labels, tables, on, chunk=3))()
    assert np.isfinite(value) and slots.tv is None and slots.soft_nll is None
    nll = reference()[0][1][0]
    np.testing.assert_allclose(value, jnp.sum(weights["cross_entropy"] * nll), rtol=1e-5)
    with pytest.raises(ValueError, match="need target_hidden; it is None"):
        vocab_loss(hidden, markov, w2, None, labels, tables, SlotWeights(total_variation=on.cross_entropy))


def test_br07_cross_entropy_of_the_right_and_of_the_repeated_anchor():
    """Base logits 0, bias 10 at (p, p+1 mod 4): previous tokens [2, 3, 0] predict [3, 0, 1], [2, 2, 3] do not."""
    w2 = 10 * jnp.roll(jnp.eye(4), 1, axis=0)
    tables = TargetTables(embed=jnp.zeros((4, 2)), head=jnp.zeros((4, 2)))
    labels, ones = jnp.asarray([[[3, 0, 1]]]), SlotWeights(cross_entropy=jnp.full((1, 1, 3), 1 / 3))
    run = jax.jit(
        lambda previous: vocab_loss(jnp.zeros((1, 1, 3, 2)), jnp.eye(4)[previous], w2, None, labels, tables, ones)
    )
    value, slots = run(jnp.asarray([[[2, 3, 0]]]))
    np.testing.assert_allclose(slots.nll[0, 0], [0.000136] * 3, atol=1e-6)
    assert slots.correct.sum() == 3 and value == pytest.approx(0.000136, abs=1e-6)
    value, slots = run(jnp.asarray([[[2, 2, 3]]]))
    assert slots.correct.sum() == 1 and value == pytest.approx(6.6668, abs=1e-4)


def test_top_1_agreement_is_with_the_target():
    """`correct` compares with the target's most likely token, not with the label."""
    for draft, target, expected in (((2.0, 1.0), (0.0, 5.0), 0), ((1.0, 2.0), (0.0, 5.0), 1)):
        _, slots = two_token_loss(draft, target)
        assert slots.correct.item() == expected


def test_a_cap_bounds_base_logits_and_not_the_bias():
    """Cap 1, base logits (3, 0), bias (0, 2): tanh 3 against 2, not tanh 3 against tanh 2 and not tanh of the sum."""
    tables = TargetTables(embed=jnp.eye(2), head=jnp.eye(2), soft_cap=1.0)
    at = lambda *x: jnp.asarray(x, jnp.float32).reshape(1, 1, 1, -1)
    one = SlotWeights(cross_entropy=jnp.ones((1, 1, 1)))
    label = jnp.zeros((1, 1, 1), jnp.int32)
    value, _ = vocab_loss(at(3, 0), at(1), jnp.asarray([[0.0], [2.0]]), None, label, tables, one)
    assert value == pytest.approx(np.log1p(np.exp(2 - np.tanh(3))), rel=1e-5)
