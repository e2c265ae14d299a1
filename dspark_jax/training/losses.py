"""The training objective of parallel drafters: cross entropy, total variation and confidence (SPEC §5)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.draft.backbone import gather_rows
from dspark_jax.draft.dspark import BlockOutputs
from dspark_jax.draft.eagle3 import shift_left
from dspark_jax.training.anchors import Anchors, BlockLabels, slot_decay
from dspark_jax.training.columns import Columns
from dspark_jax.training.vocab_loss import SlotWeights, vocab_loss
from dspark_jax.types import Params, TargetTables


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Weights of the objective; the defaults are DSpark's, `LossConfig(ce=1, tv=0, confidence=0)` is DFlash's.

    Attributes:
        ce, tv, confidence: factors of L_ce, L_tv and L_conf.
        loss_decay: slot k weighs exp(-k / loss_decay); None weighs all slots alike.
    """

    ce: float = 0.1
    tv: float = 0.9
    confidence: float = 1.0
    loss_decay: float | None = 4.0


@struct.dataclass
class LossTerms:
    """Sums over a batch's slots; dividing them by the sums of the whole step gives means that regrouping cannot change.

    Attributes:
        ce, tv, confidence: weighted sums of the unscaled terms.
        weight: sum of the slot weights, their denominator.
        accept_rate: per slot position, sum of accept rates over valid slots, `[G]`; zeros without the target.
        correct: per slot position, sum of top-1 agreement, `[G]`.
        valid: per slot position, number of valid slots, `[G]`.
        survival: sum over blocks of sum_k prod_{i<=k} accept rate, the drafted part of the probabilistic tau.
        accepted_run: sum over blocks of the leading run of correct slots.
        blocks: number of valid blocks.
        measured: number of valid blocks whose target distribution was there: those that accept rates are of.
        confidence_error, confidence_bias: weighted sums of |c - c*| and c - c*.
        confidence_cumprod_bias: weighted sum of prod c - prod c*.
    """

    ce: Float[Array, ""]
    tv: Float[Array, ""]
    confidence: Float[Array, ""]
    weight: Float[Array, ""]
    accept_rate: Float[Array, "G"]
    correct: Float[Array, "G"]
    valid: Float[Array, "G"]
    survival: Float[Array, ""]
    accepted_run: Float[Array, ""]
    blocks: Float[Array, ""]
    measured: Float[Array, ""]
    confidence_error: Float[Array, ""]
    confidence_bias: Float[Array, ""]
    confidence_cumprod_bias: Float[Array, ""]


def slot_weights(labels: BlockLabels, loss_decay: float | None) -> Float[Array, "B A G"]:
    """Positional weights of the valid slots, zero elsewhere."""
    return labels.valid * slot_decay(labels.valid.shape[-1], loss_decay)


def block_loss(
    outputs: BlockOutputs,
    params: Params,
    tables: TargetTables,
    last_hidden: Float[Array, "B L D"] | None,
    anchors: Anchors,
    labels: BlockLabels,
    config: LossConfig,
    denominator: Float[Array, ""],
    *,
    columns: Columns | None = None,
    chunk: int = 8,
    dtype: Any = jnp.float32,
) -> tuple[Float[Array, ""], LossTerms]:
    """The objective of one batch, as its share of the global mean.

    Args:
        outputs: the drafter's block outputs.
        params: drafter parameters (W2 is read here).
        tables: the target's embedding and head.
        last_hidden: the target's last hidden states; None allows only `ce` to be switched on.
        anchors: drawn anchors.
        labels: what the slots predict.
        config: weights.
        denominator: sum of slot weights over the **global** batch, all devices and accumulation steps.
        columns: sampled vocabulary; None computes all of it.
        chunk: anchors a step of the vocabulary loss.
        dtype: type of the vocabulary products.

    Returns:
        `ce * L_ce + tv * L_tv + confidence * L_conf` (sums over this batch over the global denominator) and the terms.

    Raises:
        ValueError: a term needs the target's distribution or the confidence head and it is absent.
    """
    weights = slot_weights(labels, config.loss_decay)
    scaled = weights / denominator
    w2 = params["markov_head"]["markov_w2"]["weight"] if outputs.markov is not None else None
    # Slot k is predicted by the target at anchor + k, one before its label.
    target_hidden = None if last_hidden is None else gather_rows(last_hidden, labels.index - 1)
    loss, slots = vocab_loss(
        outputs.hidden,
        outputs.markov,
        w2,
        target_hidden,
        labels.tokens,
        tables,
        SlotWeights(
            cross_entropy=config.ce * scaled if config.ce else None,
            total_variation=config.tv * scaled if config.tv else None,
        ),
        columns=columns,
        chunk=chunk,
        dtype=dtype,
    )
    accept = jnp.zeros_like(weights) if slots.tv is None else jax.lax.stop_gradient(1 - slots.tv / 2)
    accept = jnp.clip(accept, 0, 1)
    logits, bce = outputs.confidence_logits, jnp.zeros_like(weights)
    if config.confidence:
        if logits is None or slots.tv is None:
            raise ValueError(
                "confidence loss is on, but the drafter has no confidence head or there is no target_hidden"
            )
        # Dummy slots may hold anything; `where` keeps them out of value and gradient alike.
        bce = optax.sigmoid_binary_cross_entropy(jnp.where(labels.valid, logits, 0), accept)
        loss = loss + config.confidence * jnp.sum(scaled * bce)
    return loss, _terms(slots, accept, bce, logits, weights, labels)


def _terms(slots, accept, bce, logits, weights, labels: BlockLabels) -> LossTerms:
    valid = labels.valid.astype(jnp.float32)
    predicted = accept if logits is None else jax.lax.stop_gradient(jax.nn.sigmoid(logits))
    survival = jnp.cumprod(jnp.where(labels.valid, accept, 0), axis=-1)
    run = jnp.cumprod(slots.correct * valid, axis=-1)
    gap = jnp.cumprod(jnp.where(labels.valid, predicted, 0), axis=-1) - survival
    per_slot = lambda x: jnp.sum(jnp.where(labels.valid, x, 0), axis=(0, 1))  # noqa: E731
    total = lambda x: jnp.sum(jnp.where(labels.valid, weights * x, 0))  # noqa: E731
    return LossTerms(
        ce=total(slots.nll),
        tv=total(jnp.zeros_like(weights) if slots.tv is None else slots.tv),
        confidence=total(bce),
        weight=jnp.sum(weights),
        accept_rate=per_slot(accept),
        correct=per_slot(slots.correct),
        valid=jnp.sum(valid, axis=(0, 1)),
        survival=jnp.sum(survival),
        accepted_run=jnp.sum(run),
        blocks=jnp.sum(valid[..., 0]),
        measured=jnp.sum(valid[..., 0]) * (slots.tv is not None),
        confidence_error=total(jnp.abs(predicted - accept)),
        confidence_bias=total(predicted - accept),
        confidence_cumprod_bias=total(gap),
    )


def eagle3_loss(
    states: Float[Array, "B L G D"],
    tables: TargetTables,
    last_hidden: Float[Array, "B L D"],
    loss_mask: Bool[Array, "B L"],
    segments: Int[Array, "B L"],
    step_loss_decay: float,
    denominator: Float[Array, ""],
    *,
    columns: Columns | None = None,
    chunk: int = 64,
    dtype: Any = jnp.float32,
) -> tuple[Float[Array, ""], LossTerms]:
    """EAGLE-3's objective: `sum_t decay^t * (sum of soft cross entropy over masked positions) / (B * L)` (SPEC §6).

    Step t at position i predicts token i+2+t, so its target is the distribution at i+1+t. The mask is the loss mask
    without each segment's last position, shifted by t like the tokens: the release's rule, kept for parity (for block
    drafters the mask is read at the label).

    Args:
        states: normed states of all steps.
        tables: the target's embedding and head.
        last_hidden: the target's last hidden states.
        loss_mask, segments: of the rows.
        step_loss_decay: factor between steps.
        denominator: B * L of the global batch.
        columns: sampled vocabulary; None computes all of it.
        chunk: positions a step of the vocabulary loss.
        dtype: type of the vocabulary products.
    """
    steps = states.shape[2]
    last = jnp.pad(segments, [(0, 0), (0, 1)])[:, 1:] != segments
    mask = loss_mask & ~last
    valid = jnp.stack([shift_left(mask, segments, t) for t in range(steps)], axis=2)
    weights = valid * step_loss_decay ** jnp.arange(steps, dtype=jnp.float32)
    order, to_teachers, to_positions = _teacher_order(weights)
    labels = jnp.zeros(valid.shape, jnp.int32)  # only the soft term is on
    loss, slots = vocab_loss(
        to_teachers(states),
        None,
        None,
        jnp.take_along_axis(last_hidden, order[..., None], axis=1)[:, :, None],
        labels,
        tables,
        SlotWeights(soft_cross_entropy=to_teachers(weights / denominator)),
        columns=columns,
        chunk=chunk,
        dtype=dtype,
        skip_unweighted=True,
    )
    slots = jax.tree.map(to_positions, slots)
    block = BlockLabels(index=labels, tokens=labels, valid=valid)
    assert slots.tv is not None and slots.soft_nll is not None  # both are there with a target and the soft term on
    accept = jnp.clip(1 - slots.tv / 2, 0, 1)
    terms = _terms(slots._replace(nll=slots.soft_nll), accept, jnp.zeros_like(weights), None, weights, block)
    return loss, terms


def _teacher_order(
    weights: Float[Array, "B L G"],
) -> tuple[Int[Array, "B L"], Callable[[Array], Array], Callable[[Array], Array]]:
    """Order of the teaching positions, rearrangement of EAGLE-3's slots by the position that teaches them, and back.

    Position p teaches step t of position p - 1 - t: side by side, its logits are computed once instead of G times.
    Positions that teach nobody (prompts, padding) come last, where whole chunks of them can be skipped.
    """
    steps = weights.shape[2]

    def roll(x: Array, by: int) -> Array:
        # What wraps around would be taught from outside its row: its weight is zero.
        return jnp.stack([jnp.roll(x[:, :, t], by * (t + 1), axis=1) for t in range(steps)], axis=2)

    order = jnp.argsort(~jnp.any(roll(weights, 1) > 0, axis=2), axis=1, stable=True)
    back = jnp.argsort(order, axis=1)

    def pick(x: Array, index: Int[Array, "B L"]) -> Array:
        return jnp.take_along_axis(x, jnp.expand_dims(index, tuple(range(2, x.ndim))), axis=1)

    def to_teachers(x: Array) -> Array:
        return pick(roll(x, 1), order)

    return order, to_teachers, lambda x: roll(pick(x, back), -1)
