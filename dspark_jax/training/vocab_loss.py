"""Losses over the vocabulary without ever holding logits for all anchors: `A*G*V` is 1.5 GB a row at pod scale.

A scan over the anchor axis computes a chunk's logits, its losses and its gradients in one pass (the gradient of a
softmax loss needs nothing that the forward has not got), keeps gradients of the small inputs, and lets the backward
pass only scale them: 3.2 products with the head instead of 5.3 with checkpointing.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.sharding import constrain, current_mesh, row_shards
from dspark_jax.training.columns import Columns
from dspark_jax.types import TargetTables, soft_capped


@struct.dataclass
class SlotWeights:
    """Weights of the three vocabulary losses at every slot, denominators already divided out; `[B, A, G]` or None.

    Attributes:
        cross_entropy: of -log p_d(label).
        total_variation: of ||p_d - p_t||_1 (no factor 1/2).
        soft_cross_entropy: of -sum_v p_t(v) log p_d(v) (EAGLE-3).
    """

    cross_entropy: Float[Array, "B A G"] | None = None
    total_variation: Float[Array, "B A G"] | None = None
    soft_cross_entropy: Float[Array, "B A G"] | None = None

    @property
    def needs_target(self) -> bool:
        """Whether any switched-on term reads the target's distribution."""
        return self.total_variation is not None or self.soft_cross_entropy is not None


class SlotLosses(NamedTuple):
    """Unweighted per-slot values, without gradient.

    Attributes:
        nll: -log p_d(label), nats.
        tv: ||p_d - p_t||_1, in 0..2; None without the target's distribution.
        soft_nll: -sum p_t log p_d, nats; None unless that term is on.
        correct: 1 where the draft's most likely token is the target's (the label, without the target's distribution).
    """

    nll: Float[Array, "B A G"]
    tv: Float[Array, "B A G"] | None
    soft_nll: Float[Array, "B A G"] | None
    correct: Float[Array, "B A G"]


def vocab_loss(
    hidden: Float[Array, "B A G D"],
    markov: Float[Array, "B A G R"] | None,
    w2: Float[Array, "V R"] | None,
    target_hidden: Float[Array, "B A #G D"] | None,
    labels: Int[Array, "B A G"],
    tables: TargetTables,
    weights: SlotWeights,
    *,
    columns: Columns | None = None,
    chunk: int = 8,
    dtype: Any = jnp.float32,
    skip_unweighted: bool = False,
) -> tuple[Float[Array, ""], SlotLosses]:
    """Weighted sum of the vocabulary losses (DSpark's L_ce and L_tv, EAGLE-3's soft cross entropy).

    Args:
        hidden: backbone states after the final norm.
        markov: what W2 multiplies at each slot; None without a sequential head.
        w2: output table of the sequential head.
        target_hidden: the target's last hidden state at the position that predicts each slot's label (one a slot, or
            one for all slots of an anchor); None when no switched-on term needs it.
        labels: label tokens (any valid id where the slot does not count).
        tables: the target's embedding and head; they get no gradient. A soft-cap holds for the target's logits and for
            the drafter's base logits, before the sequential head's bias.
        weights: loss weights a slot.
        columns: sampled vocabulary; None computes all of it.
        chunk: anchors computed at once.
        dtype: type of the products' operands; accumulation, softmaxes and losses are float32.
        skip_unweighted: chunks in which every weight is zero are not computed; their per-slot values are zeros.

    Returns:
        The scalar, differentiable in `hidden`, `markov` and `w2`; and per-slot values without gradient.

    Raises:
        ValueError: a switched-on term needs the target's distribution and `target_hidden` is None.
    """
    if weights.needs_target and target_hidden is None:
        raise ValueError("total variation and soft cross entropy need target_hidden; it is None")
    anchors = hidden.shape[1]
    chunk = min(chunk, anchors)
    pad = -anchors % chunk

    def split(x: Array) -> Array:
        """[B, A, ...] to [A/chunk, B, chunk, ...]; the batch axis stays whole so that its sharding does."""
        x = jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)

    def join(x: Array) -> Array:
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :anchors]

    target = None if target_hidden is None else jax.lax.stop_gradient(target_hidden.astype(dtype))
    w2 = None if w2 is None else w2[: tables.head.shape[0]]  # a padded draft vocabulary has rows the target lacks
    head, log_weight = jax.lax.stop_gradient(tables.head.astype(dtype)), None
    if columns is not None:
        head, labels, log_weight = head[columns.ids], columns.place[labels], columns.log_weight
        w2 = None if w2 is None else w2[columns.ids]
    inputs = jax.tree.map(split, (target, labels, weights))
    # Base logits and bias are one product: [h; m] with [head; W2] side by side.
    states = hidden.astype(dtype) if markov is None else jnp.concatenate([hidden, markov], -1).astype(dtype)
    with jax.named_scope("vocab_loss"):
        static = _Static(skip_unweighted, tables.soft_cap)
        loss, slots = _scan_loss(static, split(states), w2, (head, log_weight), inputs)
    return loss, jax.tree.map(join, slots)


class _Static(NamedTuple):
    """What a program is compiled for: see `vocab_loss` and `TargetTables`."""

    skip_unweighted: bool
    soft_cap: float | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan_loss(static, states, w2, columns, inputs):
    return _scan_forward(static, states, w2, columns, inputs)[0]


def _scan_forward(static, states, w2, columns, inputs):
    head, log_weight = columns
    width = head.shape[1]
    table = head if w2 is None else jnp.concatenate([head, w2.astype(head.dtype)], axis=1)
    mesh = current_mesh()
    shards = 1 if mesh is None else row_shards(mesh)
    if mesh is not None:
        table = constrain(table, "head")

    def compute(carry, slot):
        total, dw2 = carry
        state, (target, labels, weights) = slot
        logits, slope = _draft_logits(state, table, width, static.soft_cap)
        target_logits = None if target is None else soft_capped(_logits(target, head), static.soft_cap)
        if log_weight is not None:
            logits = logits + log_weight
            target_logits = None if target_logits is None else target_logits + log_weight
        loss, values, gradient = _chunk_losses(logits, target_logits, labels, weights)
        dstate = _state_gradient(gradient, slope, table, width)
        if w2 is not None:
            dw2 = dw2 + _table_gradient(gradient.astype(state.dtype), state[..., width:], shards)
        return (total + loss, dw2), (values, dstate)

    def body(carry, slot):
        *slot, weighted = slot
        if weighted is None:
            return compute(carry, slot)
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(compute, carry, slot)[1])
        return jax.lax.cond(weighted, compute, lambda carry, _: (carry, nothing), carry, slot)

    # Every row and every shard of the batch keeps its own sums: devices add them up once, not in every turn.
    total = jnp.zeros(states.shape[1], jnp.float32)
    dw2 = None if w2 is None else jnp.zeros((shards, *w2.shape), jnp.float32)
    if mesh is not None:
        total = constrain(total, "rows")
        dw2 = None if dw2 is None else constrain(dw2, "partial_tables")
    weighted = _weighted_chunks(inputs[2]) if static.skip_unweighted else None
    (total, dw2), (values, dstates) = jax.lax.scan(body, (total, dw2), (states, inputs, weighted))
    dw2 = None if dw2 is None else jnp.sum(dw2, axis=0)
    return (jnp.sum(total), values), (dstates, dw2, states, w2, columns, inputs)


def _scan_backward(static, residuals, cotangents):
    del static
    dstates, dw2, states, w2, columns, (target, _, weights) = residuals
    scale, _ = cotangents  # per-slot values carry no gradient
    dw2 = None if w2 is None else (dw2 * scale).astype(w2.dtype)
    # The head, the target and the weights get none; integer labels have the float0 cotangent that None stands for.
    dcolumns, dtarget, dweights = jax.tree.map(jnp.zeros_like, (columns, target, weights))
    return (dstates * scale).astype(states.dtype), dw2, dcolumns, (dtarget, None, dweights)


_scan_loss.defvjp(_scan_forward, _scan_backward)


def _logits(states: Float[Array, "... D"], table: Float[Array, "V D"]) -> Float[Array, "... V"]:
    return jnp.einsum("...d,vd->...v", states, table, preferred_element_type=jnp.float32)


def _draft_logits(
    states: Float[Array, "... DR"], table: Float[Array, "V DR"], width: int, soft_cap: float | None
) -> tuple[Float[Array, "... V"], Float[Array, "... V"] | None]:
    """Draft logits of `[h; m]`, and the slope of the soft-cap at the base logits.

    Without a cap (slope None) base logits and bias are one product; the cap lies between the two.
    """
    if soft_cap is None:
        return _logits(states, table), None
    bounded = jnp.tanh(_logits(states[..., :width], table[:, :width]) / soft_cap)
    return soft_cap * bounded + _logits(states[..., width:], table[:, width:]), 1 - bounded**2


def _state_gradient(
    gradient: Float[Array, "... V"], slope: Float[Array, "... V"] | None, table: Float[Array, "V DR"], width: int
) -> Float[Array, "... DR"]:
    """Gradient by `[h; m]` of what has this gradient by the draft logits; the products run in the table's type."""

    def by_states(gradient: Array, table: Array) -> Array:
        return jnp.einsum("...v,vd->...d", gradient.astype(table.dtype), table, preferred_element_type=jnp.float32)

    if slope is None:
        return by_states(gradient, table)
    parts = by_states(gradient * slope, table[:, :width]), by_states(gradient, table[:, width:])
    return jnp.concatenate(parts, axis=-1)


def _table_gradient(dlogits: Array, states: Array, shards: int) -> Float[Array, "S V R"]:
    """Gradient of W2 by the rows of every shard apart, `[shards, V, R]`."""
    dlogits, states = (x.reshape(shards, -1, *x.shape[1:]) for x in (dlogits, states))
    return jnp.einsum("sbcgv,sbcgr->svr", dlogits, states, preferred_element_type=jnp.float32)


def _weighted_chunks(weights: SlotWeights) -> Bool[Array, "chunks"]:
    """Chunks in which any slot of any device counts: known before the loop, where devices need not wait to agree."""
    used = [jnp.any(w != 0, axis=(1, 2, 3)) for w in jax.tree.leaves(weights)]
    return functools.reduce(jnp.logical_or, used)


def _chunk_losses(logits, target_logits, labels, weights):
    """Losses of a chunk by row, their per-slot values, and the gradient by the draft logits (float32).

    Written as passes over `[slots, V]` that a compiler fuses: no argmax (which CPUs and TPUs run far slower than max),
    and exponentials recomputed rather than stored.
    """
    peak = jnp.max(logits, axis=-1)
    log_mass = peak + jnp.log(jnp.sum(jnp.exp(logits - peak[..., None]), axis=-1))
    draft = jnp.exp(logits - log_mass[..., None])
    label_logit = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    nll = log_mass - label_logit
    loss, gradient = jnp.zeros(labels.shape[0], jnp.float32), jnp.zeros_like(draft)
    tv = soft_nll = None
    chosen = label_logit
    if target_logits is not None:
        target_peak = jnp.max(target_logits, axis=-1, keepdims=True)
        target_mass = jnp.sum(jnp.exp(target_logits - target_peak), axis=-1, keepdims=True)
        teacher = jnp.exp(target_logits - target_peak - jnp.log(target_mass))
        difference = draft - teacher
        tv = jnp.sum(jnp.abs(difference), axis=-1)
        chosen = jnp.max(jnp.where(target_logits == target_peak, logits, -jnp.inf), axis=-1)
        if weights.total_variation is not None:
            w = weights.total_variation
            sign = jnp.sign(difference)
            mean_sign = jnp.sum(sign * draft, axis=-1, keepdims=True)
            loss = loss + jnp.sum(w * tv, axis=(1, 2))
            gradient = gradient + w[..., None] * draft * (sign - mean_sign)
        if weights.soft_cross_entropy is not None:
            w = weights.soft_cross_entropy
            soft_nll = log_mass - jnp.sum(teacher * logits, axis=-1)
            loss = loss + jnp.sum(w * soft_nll, axis=(1, 2))
            gradient = gradient + w[..., None] * difference
    if weights.cross_entropy is not None:
        w = weights.cross_entropy
        hit = labels[..., None] == jnp.arange(logits.shape[-1])
        loss = loss + jnp.sum(w * nll, axis=(1, 2))
        gradient = gradient + w[..., None] * (draft - hit)
    values = SlotLosses(nll=nll, tv=tv, soft_nll=soft_nll, correct=(chosen >= peak).astype(jnp.float32))
    return loss, values, gradient
