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
from dspark_jax.nn.attention import Attend, AttentionSpec
from dspark_jax.nn.decoder import DecoderLayer
from dspark_jax.nn.intervals import IntervalAttention, anchor_intervals, merge
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


def training_attend(
    anchors: Int[Array, "B A"],
    keep: Bool[Array, "B A"],
    segments: Int[Array, "B L"],
    block_size: int,
    attention: IntervalAttention,
) -> Attend:
    """Attention of all blocks of whole rows: the context before each anchor plus the own block, nothing else.

    The layer's cache argument holds the context keys and values `([B, L, K, H], [B, L, K, H])`. Blocks are merged into
    their context's attention afterwards, so that no `[A*G, A*G]` product between blocks is ever computed.
    """
    step = jnp.arange(block_size)

    def attend(spec: AttentionSpec, q, k, v, cache):
        rows, anchored, size, heads, width = q.shape
        intervals = anchor_intervals(anchors, keep, segments, block_size, spec.window)
        keys, values = cache
        out, log_mass = attention(q.reshape(rows, anchored * size, heads, width), keys, values, intervals, spec.scale)
        by_block = lambda x: x.reshape(rows, anchored, size, k.shape[-2], -1, *x.shape[3:])  # noqa: E731
        out, log_mass, grouped = by_block(out), by_block(log_mass), by_block(q.reshape(rows, -1, heads, width))
        own = jnp.einsum("bagknh,bamkh->bagknm", grouped, k, preferred_element_type=jnp.float32) * spec.scale
        sees = jnp.ones((block_size, block_size), bool)
        if spec.window is not None:
            sees = step[None, :] > step[:, None] - spec.window
        out, weights = merge(out, log_mass, own, sees[:, None, None, :])
        weights = weights.astype(v.dtype)
        out = out + jnp.einsum("bagknm,bamkh->bagknh", weights, v, preferred_element_type=jnp.float32)
        return out.reshape(q.shape).astype(q.dtype), cache

    return attend


def gather_rows(values: Float[Array, "B L D"], index: Int[Array, "B ..."]) -> Float[Array, "B ... D"]:
    """Pick rows by index inside each batch row; out-of-range indices give zeros."""
    flat = index.reshape(index.shape[0], -1)
    picked = jax.vmap(lambda row, at: row.at[at].get(mode="fill", fill_value=0))(values, flat)
    return picked.reshape(*index.shape, values.shape[-1])
