"""The target's decoder stack, run over whole rows or over ragged batches with the same layer code."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from dspark_jax.config import DecoderConfig
from dspark_jax.nn import run
from dspark_jax.nn.attention import DENSE, Attend, AttentionBackend, RaggedPlan
from dspark_jax.nn.decoder import DecoderLayer
from dspark_jax.nn.intervals import DENSE_INTERVALS, IntervalAttention, rows_attend
from dspark_jax.nn.linear import RMSNorm
from dspark_jax.types import Params, TargetFeatures, TargetTables


class Transformer(nn.Module):
    """Decoder layers and final norm; embedding and head live in `TargetTables`."""

    config: DecoderConfig
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "... D"],
        positions: Int[Array, "..."],
        attend: Attend,
        caches: tuple[Any, ...] | None = None,
        tap_ids: tuple[int, ...] = (),
    ) -> tuple[TargetFeatures, tuple[Any, ...]]:
        """Run all layers.

        Args:
            x: embedded tokens.
            positions: absolute position of each row.
            attend: bound attention.
            caches: one entry a layer, or None without caches.
            tap_ids: layers whose raw output (residual stream) is returned, in this order; -1 is the embedding output.

        Returns:
            Features (taps concatenated on the last axis) and the updated caches.
        """
        caches = caches if caches is not None else (None,) * self.config.num_layers
        raw, new_caches = {-1: x}, []
        # Unrolled on purpose: a scan that carries the caches copies them every step.
        for i in range(self.config.num_layers):
            x, cache = DecoderLayer(self.config, i, self.dtype, name=f"layers_{i}")(x, positions, attend, caches[i])
            new_caches.append(cache)
            if i in tap_ids:
                raw[i] = x
        taps = jnp.concatenate([raw[i] for i in tap_ids], axis=-1) if tap_ids else None
        last = RMSNorm(self.config.rms_norm_eps, self.dtype, name="norm")(x)
        return TargetFeatures(taps=taps, last_hidden=last), tuple(new_caches)


def check_tap_ids(config: DecoderConfig, tap_ids: tuple[int, ...]) -> None:
    """Refuse taps that do not exist, and the last layer (raw and normed conventions disagree there).

    Raises:
        ValueError: names the layer and the allowed range.
    """
    for i in tap_ids:
        if not -1 <= i < config.num_layers - 1:
            raise ValueError(
                f"cannot tap layer {i} of a target with {config.num_layers} layers: allowed are -1 (embedding output) "
                f"to {config.num_layers - 2}; the last layer's stored value is ambiguous between raw and normed"
            )


def forward_rows(
    config: DecoderConfig,
    params: Params,
    tables: TargetTables,
    tokens: Int[Array, "B L"],
    segments: Int[Array, "B L"],
    positions: Int[Array, "B L"],
    tap_ids: tuple[int, ...] = (),
    dtype: Any = jnp.float32,
    attention: IntervalAttention = DENSE_INTERVALS,
) -> TargetFeatures:
    """Run whole rows, causal inside each segment.

    Args:
        config: shape of the target.
        params: decoder parameters.
        tables: embedding and head.
        tokens: token ids.
        segments: document number of each token, from 1; 0 is padding.
        positions: position of each token inside its document.
        tap_ids: layers to tap.
        dtype: type of products and residual stream.
        attention: how the rows attend.

    Returns:
        Taps `[B, L, F*D]` and last hidden `[B, L, D]`.
    """
    features, _ = run(
        Transformer(config, dtype),
        params,
        tables.embed_tokens(tokens, dtype),
        positions,
        rows_attend(segments, attention),
        None,
        tap_ids,
    )
    return features


def forward_ragged(
    config: DecoderConfig,
    params: Params,
    tables: TargetTables,
    caches: tuple[Any, ...],
    plan: RaggedPlan,
    tap_ids: tuple[int, ...] = (),
    dtype: Any = jnp.float32,
    attention: AttentionBackend = DENSE,
) -> tuple[TargetFeatures, tuple[Any, ...]]:
    """Run a ragged batch over the slot caches: prompt chunks, decoding and verification alike.

    Args:
        config: shape of the target.
        params: decoder parameters.
        tables: embedding and head.
        caches: of `create_caches` with the same `attention`.
        plan: the batch.
        tap_ids: layers to tap.
        dtype: type of products and residual stream.
        attention: what works on the caches.

    Returns:
        Features with one row a token (`[T, F*D]`, `[T, D]`) and the caches with the batch's rows written.
    """
    batch = plan.batch
    return run(
        Transformer(config, dtype),
        params,
        tables.embed_tokens(batch.tokens, dtype),
        batch.positions,
        attention.attend(plan),
        caches,
        tap_ids,
    )


def create_caches(
    config: DecoderConfig, slots: int, length: int, dtype: Any = jnp.float32, attention: AttentionBackend = DENSE
) -> tuple[Any, ...]:
    """Empty caches, one a layer; heads and their width may differ between layers."""
    shapes = [config.attention(i) for i in range(config.num_layers)]
    return tuple(attention.create_cache(slots, length, s.num_kv_heads, s.head_dim, dtype) for s in shapes)
