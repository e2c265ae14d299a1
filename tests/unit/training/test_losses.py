"""The training objective: its sums, the alignment of labels and target, and where gradients must not flow."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.draft.dspark import BlockOutputs
from dspark_jax.training.anchors import Anchors, BlockLabels, block_labels
from dspark_jax.training.losses import LossConfig, block_loss, eagle3_loss, slot_weights
from dspark_jax.types import TargetTables

L, A, G, D, V = 9, 3, 4, 5, 7


def case(seed=0, keep=(True, True, True)):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    head = draw(V, D)
    tokens = jnp.asarray(rng.integers(0, V, (1, L)), jnp.int32)
    anchors = Anchors(index=jnp.asarray([[0, 3, 6]], jnp.int32), keep=jnp.asarray([keep]))
    labels = block_labels(anchors, tokens, jnp.ones((1, L), bool), jnp.ones((1, L), jnp.int32), G)
    outputs = BlockOutputs(hidden=draw(1, A, G, D), markov=None, confidence_logits=draw(1, A, G))
    return outputs, TargetTables(embed=head, head=head), draw(1, L, D), anchors, labels


@jax.jit
def loss_and_terms(outputs, tables, last_hidden, anchors, labels):
    config = LossConfig()
    denominator = jnp.sum(slot_weights(labels, config.loss_decay))
    return block_loss(outputs, {}, tables, last_hidden, anchors, labels, config, denominator, chunk=2)


def test_the_objective_term_by_term():
    outputs, tables, last_hidden, anchors, labels = case()
    loss, terms = loss_and_terms(outputs, tables, last_hidden, anchors, labels)
    softmax = lambda x: np.exp(x) / np.exp(x).sum(-1, keepdims=True)
    draft = softmax(np.asarray(outputs.hidden[0]) @ np.asarray(tables.head).T)
    target = softmax(np.asarray(last_hidden[0]) @ np.asarray(tables.head).T)
    ce = tv = bce = weight = survival = 0.0
    for a, anchor in enumerate((0, 3, 6)):
        chain = 1.0
        for k in range(min(G, L - 1 - anchor)):
            w, q, p = np.exp(-k / 4), draft[a, k], target[anchor + k]
            accept = 1 - np.abs(q - p).sum() / 2
            confidence = 1 / (1 + np.exp(-float(outputs.confidence_logits[0, a, k])))
            ce -= w * np.log(q[int(labels.tokens[0, a, k])])
            tv += w * np.abs(q - p).sum()
            bce -= w * (accept * np.log(confidence) + (1 - accept) * np.log(1 - confidence))
            weight, chain = weight + w, chain * accept
            survival += chain
    for name, ours, expected in (
        ("ce", terms.ce, ce), ("tv", terms.tv, tv), ("confidence", terms.confidence, bce),
        ("weight", terms.weight, weight), ("survival", terms.survival, survival),
        ("loss", loss, (0.1 * ce + 0.9 * tv + bce) / weight),
    ):  # fmt: skip
        np.testing.assert_allclose(ours, expected, rtol=1e-4, err_msg=name)
    np.testing.assert_array_equal(terms.valid, [3, 3, 2, 2])
    assert terms.blocks == terms.measured == 3


def test_br15_a_draft_that_equals_the_target_is_always_accepted():
    """States copied from the target at anchor + k give total variation 0: label, slot and target row are aligned."""
    outputs, tables, last_hidden, anchors, labels = case()
    rows = jnp.minimum(anchors.index[..., None] + jnp.arange(G), L - 1)
    outputs = outputs.replace(hidden=last_hidden[0][rows])
    _, terms = loss_and_terms(outputs, tables, last_hidden, anchors, labels)
    np.testing.assert_allclose(terms.accept_rate, terms.valid, rtol=1e-6)
    np.testing.assert_array_equal(terms.correct, terms.valid)
    shifted = outputs.replace(hidden=last_hidden[0][jnp.minimum(rows + 1, L - 1)])
    _, terms = loss_and_terms(shifted, tables, last_hidden, anchors, labels)
    assert terms.accept_rate.sum() < 0.9 * terms.valid.sum()


def test_br14_no_gradient_into_the_target_of_any_term():
    """Confidence reaches the backbone through its own input, not through the accept rate it is trained on."""
    outputs, tables, last_hidden, anchors, labels = case()

    def gradients(config):
        def loss(last_hidden, head, hidden, logits):
            shared = TargetTables(embed=head, head=head)
            changed = outputs.replace(hidden=hidden, confidence_logits=logits)
            return block_loss(changed, {}, shared, last_hidden, anchors, labels, config, jnp.float32(1), chunk=2)[0]

        run = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))
        return run(last_hidden, tables.head, outputs.hidden, outputs.confidence_logits)

    by_target, by_head, by_hidden, by_logits = gradients(LossConfig())
    assert not np.any(np.asarray(by_target)) and not np.any(np.asarray(by_head))
    assert np.any(np.asarray(by_hidden)) and np.any(np.asarray(by_logits))
    by_target, by_head, by_hidden, by_logits = gradients(LossConfig(ce=0, tv=0, confidence=1))
    assert not np.any(np.asarray(by_hidden)), "the BCE's label carries no gradient"
    assert np.any(np.asarray(by_logits)) and not np.any(np.asarray(by_target))


def test_br14_cross_entropy_alone_runs_without_target_states():
    outputs, tables, _, anchors, labels = case()
    config = LossConfig(ce=1, tv=0, confidence=0)
    loss, terms = block_loss(outputs, {}, tables, None, anchors, labels, config, jnp.float32(1), chunk=2)
    assert np.isfinite(loss) and terms.ce == pytest.approx(float(loss), rel=1e-6)
    assert terms.measured == 0 and not np.any(np.asarray(terms.accept_rate))
    with pytest.raises(ValueError, match="no confidence head or there is no target_hidden"):
        block_loss(
            outputs.replace(confidence_logits=None), {}, tables, jnp.zeros((1, L, D)), anchors, labels, LossConfig(),
            jnp.float32(1),
        )  # fmt: skip


def test_br04_nothing_to_teach_is_exactly_zero():
    """Dummy blocks may hold anything, NaN included: loss, sums and gradients are exactly 0."""
    outputs, tables, last_hidden, anchors, labels = case(keep=(False, False, False))
    assert not np.any(np.asarray(labels.valid))

    @jax.jit
    def run(hidden, logits):
        def loss(hidden, logits):
            changed = outputs.replace(hidden=hidden, confidence_logits=logits)
            return block_loss(changed, {}, tables, last_hidden, anchors, labels, LossConfig(), jnp.float32(1))

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(hidden, logits)

    (loss, terms), gradients = run(outputs.hidden, jnp.full((1, A, G), jnp.inf))
    assert loss == 0
    assert all(not np.any(np.asarray(x)) for x in jax.tree.leaves((terms, gradients)))


def test_sums_do_not_depend_on_grouping():
    """Numerators and weights of single blocks add up to those of the batch (FAULTS BR-27's regrouping)."""
    outputs, tables, last_hidden, anchors, labels = case()
    _, whole = loss_and_terms(outputs, tables, last_hidden, anchors, labels)
    total = None
    for a in range(A):
        keep = jnp.arange(A) == a
        part = BlockLabels(labels.index, labels.tokens, labels.valid & keep[None, :, None])
        _, terms = loss_and_terms(outputs, tables, last_hidden, anchors, part)
        total = terms if total is None else jax.tree.map(jnp.add, total, terms)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), whole, total)


def test_br27_accepted_run_keeps_the_correlation_inside_a_block():
    """Runs of 3, 2, 1, 0 correct slots: mean drafted 1.5, however the blocks are batched."""
    runs = (3, 2, 1, 0)
    head = jnp.eye(2)
    state = lambda right: jnp.asarray([5.0, 0.0]) if right else jnp.asarray([0.0, 5.0])
    hidden = jnp.stack([jnp.stack([state(k < run) for k in range(3)]) for run in runs])[None]
    outputs = BlockOutputs(hidden=hidden, markov=None, confidence_logits=None)
    anchors = Anchors(index=jnp.asarray([[0, 4, 8, 12]], jnp.int32), keep=jnp.ones((1, 4), bool))
    labels = block_labels(anchors, jnp.zeros((1, 16), jnp.int32), jnp.ones((1, 16), bool), jnp.ones((1, 16), int), 3)
    config = LossConfig(ce=1, tv=0, confidence=0)
    last_hidden = jnp.broadcast_to(state(True), (1, 16, 2))
    tables = TargetTables(embed=head, head=head)
    _, terms = block_loss(outputs, {}, tables, last_hidden, anchors, labels, config, jnp.float32(1))
    assert terms.accepted_run / terms.blocks == 1.5
    np.testing.assert_array_equal(terms.correct, [3, 2, 1])


def test_eagle3_is_a_plain_mean_of_the_soft_cross_entropy():
    """Sum over steps of decay^t times the masked soft cross entropy over B*L; the mask moves with the tokens."""
    rng = np.random.default_rng(3)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    length, steps = 6, 3
    states, last_hidden, head = draw(1, length, steps, D), draw(1, length, D), draw(V, D)
    mask = jnp.asarray([[0, 1, 1, 0, 1, 1]], bool)
    segments = jnp.ones((1, length), jnp.int32)
    loss, terms = jax.jit(eagle3_loss, static_argnames=("step_loss_decay", "chunk"))(
        states, TargetTables(embed=head, head=head), last_hidden, mask, segments, step_loss_decay=0.8,
        denominator=jnp.float32(length), chunk=4,
    )  # fmt: skip
    log_softmax = lambda x: x - np.log(np.exp(x).sum(-1, keepdims=True))
    draft = log_softmax(np.asarray(states[0]) @ np.asarray(head).T)
    target = np.exp(log_softmax(np.asarray(last_hidden[0]) @ np.asarray(head).T))
    base = [0, 1, 1, 0, 1, 0]  # the last position is cleared
    expected, counts = 0.0, []
    for t in range(steps):
        on = [i for i in range(length - t) if base[i + t]]
        counts.append(len(on))
        expected -= 0.8**t * sum((target[i + 1 + t] * draft[i, t]).sum() for i in on) / length
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_array_equal(terms.valid, counts)
