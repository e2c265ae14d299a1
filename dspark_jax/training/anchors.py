"""Anchors and the labels of their blocks (SPEC §5)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int


@struct.dataclass
class Anchors:
    """Drawn anchors; dummy slots have `index` 0 and `keep` False and touch no loss, metric or gradient."""

    index: Int[Array, "B A"]
    keep: Bool[Array, "B A"]


@struct.dataclass
class BlockLabels:
    """What each block slot predicts.

    Attributes:
        index: row position of the label, anchor + 1 + k (clipped into the row), `[B, A, G]`.
        tokens: label tokens.
        valid: the slot counts: inside the row and segment, supervised contiguously from slot 0, anchor not a dummy.
    """

    index: Int[Array, "B A G"]
    tokens: Int[Array, "B A G"]
    valid: Bool[Array, "B A G"]


def candidate_mask(loss_mask: Bool[Array, "B L"], segments: Int[Array, "B L"]) -> Bool[Array, "B M"]:
    """Allowed anchors `[B, L-1]`: position and its successor are supervised and in one segment.

    Example, all supervised, segments [1, 1, 1, 2, 2]: [1, 1, 0, 1].
    """
    return loss_mask[:, :-1] & loss_mask[:, 1:] & (segments[:, :-1] == segments[:, 1:])


def choose_anchors(candidates: Bool[Array, "B M"], uniforms: Float[Array, "B M"], num_anchors: int) -> Anchors:
    """Up to `num_anchors` candidates with the smallest uniforms, sorted by position: a draw without replacement.

    Example: candidates [1, 0, 1, 1], uniforms [.5, .1, .2, .9], 2 anchors give index [0, 2], keep [1, 1].
    """
    length = candidates.shape[1]
    if length == 0:
        empty = jnp.zeros((candidates.shape[0], num_anchors), jnp.int32)
        return Anchors(index=empty, keep=empty.astype(bool))
    take = min(num_anchors, length)
    scores, index = jax.lax.top_k(jnp.where(candidates, -uniforms, -jnp.inf), take)
    index = jnp.sort(jnp.where(jnp.isfinite(scores), index, length), axis=1)
    index = jnp.pad(index, [(0, 0), (0, num_anchors - take)], constant_values=length)
    keep = index < length
    return Anchors(index=jnp.where(keep, index, 0).astype(jnp.int32), keep=keep)


def document_shares(
    candidates: Bool[Array, "B M"], segments: Int[Array, "B M"], uniforms: Float[Array, "B M"]
) -> Float[Array, "B M"]:
    """Values whose smallest ones give every document of a packed row its share of anchors, in proportion to its length.

    A candidate's value is its place among its own document's uniforms, relative to their number: below any bound lie as
    large a part of one document's candidates as of another's, up to one. Within a document the order is that of the
    uniforms, so a row of one document draws its smallest uniforms.

    Example, candidates all, segments [1, 1, 1, 1, 2, 2], uniforms [.1, .2, .3, .4, .8, .9] give
    [.025, .3, .575, .85, .4, .95]: the three smallest are two of document 1 and one of document 2.
    """
    last = jnp.iinfo(jnp.int32).max
    document = jnp.where(candidates, segments, last)
    # Sorted by document and then by uniform, each document's candidates have consecutive places from its first on.
    order = jnp.lexsort((uniforms, document), axis=-1)
    place = jnp.argsort(order, axis=-1)
    ordered = jnp.take_along_axis(document, order, axis=-1)
    first = jax.vmap(lambda x, at: jnp.searchsorted(x, at, side="left"))(ordered, document)
    end = jax.vmap(lambda x, at: jnp.searchsorted(x, at, side="right"))(ordered, document)
    return (place - first + uniforms) / (end - first)


def draw_anchors(
    loss_mask: Bool[Array, "B L"],
    segments: Int[Array, "B L"],
    row_keys: jax.Array,
    num_anchors: int,
) -> Anchors:
    """Draw anchors of every row from its own key: a function of (seed, step, row) only, the same on any mesh.

    Packed documents have their share each (`document_shares`).
    """
    candidates = candidate_mask(loss_mask, segments)
    uniforms = jax.vmap(lambda key: jax.random.uniform(key, (candidates.shape[1],)))(row_keys)
    return choose_anchors(candidates, document_shares(candidates, segments[:, :-1], uniforms), num_anchors)


def row_keys(seed: int, step: Int[Array, ""], rows: Int[Array, "B"]) -> jax.Array:
    """Keys `fold(seed, step, row)`; `rows` number the global batch of the step."""
    key = jax.random.fold_in(jax.random.key(seed), step)
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(rows)


def block_labels(
    anchors: Anchors,
    tokens: Int[Array, "B L"],
    loss_mask: Bool[Array, "B L"],
    segments: Int[Array, "B L"],
    block_size: int,
) -> BlockLabels:
    """Labels of slots 0..G-1: the tokens at anchor+1+k, counted until the first that is not supervised.

    Example, loss_mask set on 8..39, G = 4: anchor 36 counts [1, 1, 1, 0], 38 counts [1, 0, 0, 0].
    """
    length = tokens.shape[1]
    index = anchors.index[..., None] + 1 + jnp.arange(block_size)
    inside = index < length
    index = jnp.minimum(index, length - 1)

    def at(values: Array) -> Array:
        return jnp.take_along_axis(values, index.reshape(index.shape[0], -1), axis=1).reshape(index.shape)

    same = at(segments) == jnp.take_along_axis(segments, anchors.index, axis=1)[..., None]
    counts = inside & at(loss_mask) & same & anchors.keep[..., None]
    valid = jnp.cumprod(counts.astype(jnp.int32), axis=-1).astype(bool)
    return BlockLabels(index=index.astype(jnp.int32), tokens=at(tokens), valid=valid)


def slot_decay(block_size: int, loss_decay: float | None) -> Float[Array, "G"]:
    """Positional weight `exp(-k / loss_decay)`; all ones for None. `loss_decay` is not the block size."""
    steps = jnp.arange(block_size, dtype=jnp.float32)
    return jnp.ones_like(steps) if loss_decay is None else jnp.exp(-steps / loss_decay)
