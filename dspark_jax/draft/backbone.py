"""The parallel backbone of DSpark and DFlash: decoder layers whose keys and values also come from the target's context.

One module serves training (whole rows, many anchors each) and decoding (one block per slot over a cached context).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.config import DrafterConfig
from dspark_jax.draft.heads import ConfidenceHead, MarkovHead
from dspark_jax.nn.attention import Attend, AttentionSpec, masked_exponentials
from dspark_jax.nn.decoder import DecoderLayer
from dspark_jax.nn.linear import Linear, RMSNorm


class ParallelDrafter(nn.Module):
    """Parameters of DSpark and DFlash (DFlash has Markov rank 0 and no confidence head)."""

    config: DrafterConfig
    dtype: Any = jnp.float32

    def setup(self) -> None:
        """Declare sublayers and parameters."""
        c = self.config
        self.fc = Linear(c.decoder.hidden_size, dtype=self.dtype, stddev=c.decoder.initializer_range)
        self.hidden_norm = RMSNorm(c.decoder.rms_norm_eps, self.dtype)
        self.layers = [DecoderLayer(c.decoder, i, self.dtype) for i in range(c.decoder.num_layers)]
        self.norm = RMSNorm(c.decoder.rms_norm_eps, self.dtype)
        if c.markov_rank:
            self.markov_head = MarkovHead(c, self.dtype)
        if c.confidence_head:
            self.confidence_head = ConfidenceHead(c)

    def context(
        self, taps: Float[Array, "... FD"], positions: Int[Array, "..."]
    ) -> list[tuple[Float[Array, "... K H"], Float[Array, "... K H"]]]:
        """Context keys and values of every layer from tapped states: `RMSNorm(fc(taps))` through each layer's k and v.

        The input norm of a layer applies to the block only, not to the context.
        """
        features = self.hidden_norm(self.fc(taps.astype(self.dtype)))
        return [layer.self_attn.key_value(features, positions) for layer in self.layers]

    def blocks(
        self, x: Float[Array, "... D"], positions: Int[Array, "..."], attend: Attend, caches: Any
    ) -> tuple[Float[Array, "... D"], list[Any]]:
        """Run the layers over embedded block inputs; returns `h = norm(x)` and the caches."""
        new = []
        for layer, cache in zip(self.layers, caches, strict=True):
            x, cache = layer(x, positions, attend, cache)
            new.append(cache)
        return self.norm(x), new

    def markov_inputs(self, previous: Int[Array, "... G"], hidden: Float[Array, "... G D"]) -> Float[Array, "... G R"]:
        """What W2 multiplies at every slot, with the true previous tokens (teacher forcing)."""
        return self.markov_head.teacher_forced(previous, hidden)

    def confidence(self, hidden: Float[Array, "... G D"], previous: Int[Array, "... G"]) -> Float[Array, "... G"]:
        """Confidence logits of every slot (before the sigmoid)."""
        table = self.markov_head.embed(previous) if self.config.confidence_features else None
        return self.confidence_head(hidden, table)

    def __call__(self, taps: Array, tokens: Array, positions: Array, attend: Attend) -> None:
        """Touch every parameter once; used for initialisation only."""
        caches = self.context(taps, positions)
        x = jnp.zeros((*tokens.shape, self.config.decoder.hidden_size))
        hidden, _ = self.blocks(x, positions, attend, caches)
        if self.config.markov_rank:
            self.markov_head.initialise(tokens, hidden)
        if self.config.confidence_head:
            self.confidence(hidden, tokens)


def context_mask(
    anchors: Int[Array, "B A"],
    keep: Bool[Array, "B A"],
    positions: Int[Array, "B L"],
    segments: Int[Array, "B L"],
    block_size: int,
    window: int | None,
) -> Bool[Array, "B A #G L"]:
    """What the queries of each block see of the context: positions strictly before the anchor, in its segment.

    Args:
        anchors: index of each block's anchor in the row.
        keep: False for dummy slots, which see nothing.
        positions, segments: of the row.
        block_size: G.
        window: a sliding layer also hides positions at or before `query position - window`.

    Example, one row of two segments [1, 1, 1, 2, 2] and anchors 2, 4 (no window):
        1 1 . . .
        . . . 1 .
    """
    index = jnp.arange(positions.shape[1])
    own = jnp.take_along_axis(segments, anchors, axis=1)
    mask = (index[None, None, :] < anchors[..., None]) & (segments[:, None, :] == own[..., None]) & keep[..., None]
    mask = mask[:, :, None, :]
    if window is None:
        return mask
    query = jnp.take_along_axis(positions, anchors, axis=1)[..., None] + jnp.arange(block_size)
    return mask & (positions[:, None, None, :] > query[..., None] - window)


def training_attend(
    anchors: Int[Array, "B A"],
    keep: Bool[Array, "B A"],
    positions: Int[Array, "B L"],
    segments: Int[Array, "B L"],
    block_size: int,
) -> Attend:
    """Attention of all blocks of whole rows: the context before each anchor plus the own block, nothing else.

    The layer's cache argument holds the context keys and values `([B, L, K, H], [B, L, K, H])`. Context and block
    scores stay apart (one softmax over both), so that no `[A*G, A*G]` product between blocks is ever computed.
    """

    def attend(spec: AttentionSpec, q, k, v, cache):
        mask = context_mask(anchors, keep, positions, segments, block_size, spec.window)
        own = jnp.ones((block_size, block_size), bool)
        if spec.window is not None:
            step = jnp.arange(block_size)
            own = step[None, :] > step[:, None] - spec.window
        return _two_part_attention(q, (k, v), cache, mask, own, spec.scale), cache

    return attend


def _two_part_attention(
    q: Float[Array, "B A G N H"],
    block: tuple[Float[Array, "B A G K H"], Float[Array, "B A G K H"]],
    context: tuple[Float[Array, "B L K H"], Float[Array, "B L K H"]],
    context_visible: Bool[Array, "B A #G L"],
    own_visible: Bool[Array, "G G"],
    scale: float,
) -> Float[Array, "B A G N H"]:
    rows, anchors, size, heads, width = q.shape
    (k, v), (context_k, context_v) = block, context
    kv_heads, length = k.shape[-2], context_k.shape[1]
    group = heads // kv_heads
    # [B, K, n, A, G, H]: heads first, so that both products are plain batched matrix products.
    grouped = q.reshape(rows, anchors, size, kv_heads, group, width).transpose(0, 3, 4, 1, 2, 5)
    flat = grouped.reshape(rows * kv_heads, group * anchors * size, width)
    context_k = context_k.transpose(0, 2, 1, 3).reshape(rows * kv_heads, length, width)
    context_v = context_v.transpose(0, 2, 1, 3).reshape(rows * kv_heads, length, width)
    scores = jnp.einsum("bqh,blh->bql", flat, context_k, preferred_element_type=jnp.float32) * scale
    scores = scores.reshape(rows, kv_heads, group, anchors, size, length)
    own = jnp.einsum("bknagh,bamkh->bknagm", grouped, k, preferred_element_type=jnp.float32) * scale
    joint = jnp.concatenate([scores, own], axis=-1)
    visible = jnp.concatenate(
        [
            jnp.broadcast_to(context_visible, (rows, anchors, size, length)),
            jnp.broadcast_to(own_visible, (rows, anchors, size, size)),
        ],
        axis=-1,
    )
    weights, total = masked_exponentials(joint, visible[:, None, None])
    weights = weights.astype(v.dtype)
    out = jnp.einsum(
        "bql,blh->bqh",
        weights[..., :length].reshape(rows * kv_heads, -1, length),
        context_v,
        preferred_element_type=jnp.float32,
    ).reshape(*grouped.shape)
    out = out + jnp.einsum("bknagm,bamkh->bknagh", weights[..., length:], v, preferred_element_type=jnp.float32)
    return (out / total).transpose(0, 3, 4, 1, 2, 5).reshape(q.shape).astype(q.dtype)


def gather_rows(values: Float[Array, "B L D"], index: Int[Array, "B ..."]) -> Float[Array, "B ... D"]:
    """Pick rows by index inside each batch row; out-of-range indices give zeros."""
    flat = index.reshape(index.shape[0], -1)
    picked = jax.vmap(lambda row, at: row.at[at].get(mode="fill", fill_value=0))(values, flat)
    return picked.reshape(*index.shape, values.shape[-1])
