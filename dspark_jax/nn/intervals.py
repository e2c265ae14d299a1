"""Attention over whole rows where each query sees one run of keys: causal rows, packed documents, anchored blocks.

All masks of training are of this kind: a token sees its document up to itself, a block sees its document up to its
anchor. What a query sees besides (the slots of its own block, its own later steps) is few keys, merged afterwards:
attention over a run of keys acts like one more key, whose score is the run's log mass and whose value is its output.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.nn.attention import NOTHING, Attend, AttentionSpec, masked_exponentials


@struct.dataclass
class Intervals:
    """Which keys each query of a row sees: those from `begin` up to and not including `end`.

    Example, causal attention in segments [1, 1, 2, 0]: begin [0, 0, 2, 0], end [1, 2, 3, 0].
    """

    begin: Int[Array, "B Q"]
    end: Int[Array, "B Q"]

    def mask(self, length: int) -> Bool[Array, "B Q L"]:
        """The same as a matrix over `length` keys."""
        key = jnp.arange(length, dtype=jnp.int32)
        return (key >= self.begin[..., None]) & (key < self.end[..., None])


@runtime_checkable
class IntervalAttention(Protocol):
    """How whole rows attend; hashable."""

    def __call__(
        self,
        q: Float[Array, "B Q N H"],
        k: Float[Array, "B L K H"],
        v: Float[Array, "B L K H"],
        intervals: Intervals,
        scale: float,
    ) -> tuple[Float[Array, "B Q N H"], Float[Array, "B Q N"]]:
        """Attend; differentiable in `q`, `k` and `v`.

        Args:
            q: queries; the N heads are K groups of N/K neighbours.
            k, v: keys and values.
            intervals: what each query sees, the same for all heads.
            scale: factor on the scores.

        Returns:
            float32 means of the visible values (0 where there are none) and the log of the sum of exponentiated scores
            (a large negative number where there are none).
        """


@dataclasses.dataclass(frozen=True)
class DenseIntervals:
    """All scores at once: any device; `Q x L` a head."""

    def __call__(self, q, k, v, intervals, scale):
        """See `IntervalAttention`."""
        rows, queries, heads, width = q.shape
        length, kv_heads = k.shape[1:3]
        # Heads before positions: plain matrix products, two to three times faster on CPUs than leaving the layout to
        # the compiler. Rows and heads stay two axes, each with its own sharding.
        grouped = q.reshape(rows, queries, kv_heads, -1, width).transpose(0, 2, 3, 1, 4)
        flat = grouped.reshape(rows, kv_heads, -1, width)
        k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
        scores = jnp.einsum("bkqh,bklh->bkql", flat, k, preferred_element_type=jnp.float32) * scale
        scores = scores.reshape(rows, kv_heads, -1, queries, length)
        weights, mass, peak = masked_exponentials(scores, intervals.mask(length)[:, None, None])
        weights = weights.astype(v.dtype).reshape(rows, kv_heads, -1, length)
        out = jnp.einsum("bkql,bklh->bkqh", weights, v, preferred_element_type=jnp.float32)
        out = out.reshape(grouped.shape) / mass
        log_mass = (peak + jnp.log(mass))[..., 0]
        return (
            out.transpose(0, 3, 1, 2, 4).reshape(q.shape),
            log_mass.transpose(0, 3, 1, 2).reshape(rows, queries, heads),
        )


DENSE_INTERVALS = DenseIntervals()


def merge(
    out: Float[Array, "*lead H"],
    log_mass: Float[Array, "*lead"],
    scores: Float[Array, "*lead M"],
    visible: Bool[Array, "*#lead #M"],
) -> tuple[Float[Array, "*lead H"], Float[Array, "*lead M"]]:
    """Widen attention over a run of keys by a few more keys.

    Args:
        out, log_mass: of the run.
        scores: of the further keys, scaled.
        visible: those that count.

    Returns:
        The run's part of the output, and the weights of the further keys: their weighted values are the other part.
    """
    joint = jnp.concatenate([log_mass[..., None], jnp.where(visible, scores, NOTHING)], axis=-1)
    weights, mass, _ = masked_exponentials(joint, jnp.ones((1,), bool))
    weights = weights / mass
    return out * weights[..., :1], weights[..., 1:]


def segment_starts(segments: Int[Array, "B L"]) -> Int[Array, "B L"]:
    """Index of the first token of each token's segment.

    Example: [1, 1, 2, 2, 0] gives [0, 0, 2, 2, 4].
    """
    index = jnp.arange(segments.shape[1], dtype=jnp.int32)
    first = jnp.pad(segments[:, 1:] != segments[:, :-1], [(0, 0), (1, 0)], constant_values=True)
    return jax.lax.cummax(jnp.where(first, index, 0), axis=1)


def causal_intervals(segments: Int[Array, "B L"], window: int | None = None) -> Intervals:
    """Each token sees its segment up to itself; segment 0 is padding and sees nothing.

    Args:
        segments: document of each token; the tokens of a document lie side by side.
        window: a token sees itself and the `window - 1` before it; None sees all.

    Example, segments [1, 1, 2, 2, 0]:
        1 . . . .
        1 1 . . .
        . . 1 . .
        . . 1 1 .
        . . . . .
    """
    index = jnp.broadcast_to(jnp.arange(segments.shape[1], dtype=jnp.int32), segments.shape)
    begin = segment_starts(segments)
    if window is not None:
        begin = jnp.maximum(begin, index - window + 1)
    return Intervals(begin=begin, end=jnp.where(segments > 0, index + 1, begin))


def anchor_intervals(
    anchors: Int[Array, "B A"],
    keep: Bool[Array, "B A"],
    segments: Int[Array, "B L"],
    block_size: int,
    window: int | None = None,
) -> Intervals:
    """What the queries of each block see of the context: their segment before the anchor.

    Args:
        anchors: index of each block's anchor in the row.
        keep: False for dummies, which see nothing.
        segments: of the row.
        block_size: G; the queries are those of block 0, then of block 1, ...
        window: query k of a block sits at position anchor + k and sees nothing at or before `anchor + k - window`.

    Example, one row of two segments [1, 1, 1, 2, 2] and anchors 2, 4 (no window), the rows of each block alike:
        1 1 . . .
        . . . 1 .
    """
    first = jnp.take_along_axis(segment_starts(segments), anchors, axis=1)[..., None]
    query = anchors[..., None] + jnp.arange(block_size, dtype=jnp.int32)
    begin = jnp.broadcast_to(first, query.shape) if window is None else jnp.maximum(first, query - window + 1)
    end = jnp.maximum(begin, jnp.where(keep, anchors, 0)[..., None])
    flat = lambda x: x.reshape(x.shape[0], -1)  # noqa: E731
    return Intervals(begin=flat(begin), end=flat(jnp.where(keep[..., None], end, begin)))


def rows_attend(segments: Int[Array, "B L"], attention: IntervalAttention) -> Attend:
    """Attention over whole rows `[B, L]`: causal, inside segments; no cache."""

    def attend(spec: AttentionSpec, q, k, v, cache):
        out, _ = attention(q, k, v, causal_intervals(segments, spec.window), spec.scale)
        return out.astype(q.dtype), cache

    return attend
