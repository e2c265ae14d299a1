"""EAGLE-3: one autoregressive layer over the target's fused features, with its training-time test (SPEC §6).

MTP is the same drafter over the target's last hidden state, usually trained for one step and drafting one token.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.config import DrafterConfig
from dspark_jax.draft.contract import chooser
from dspark_jax.draft.vocabulary import draft_head, draft_ids
from dspark_jax.nn import run
from dspark_jax.nn.attention import (
    Attend,
    AttentionSpec,
    KVCache,
    RaggedPlan,
    cache_attend,
    make_plan,
)
from dspark_jax.nn.decoder import DecoderLayer
from dspark_jax.nn.intervals import DENSE_INTERVALS, IntervalAttention, causal_intervals, merge
from dspark_jax.nn.linear import Linear, RMSNorm
from dspark_jax.types import Params, Proposal, RaggedTokens, Sampling, TargetFeatures, TargetTables


class Eagle3Layer(DecoderLayer):
    """The draft layer: queries, keys and values read `[input norm(embedding); hidden norm(g)]`; the residual is g."""

    def setup(self) -> None:
        """Declare sublayers and parameters."""
        super().setup()
        self.hidden_norm = RMSNorm(self.config.rms_norm_eps, self.dtype)

    def step(self, embedded: Array, g: Array, positions: Array, attend: Attend, cache: Any):
        """Run the layer; returns the new state and the cache."""
        x = jnp.concatenate([self.input_layernorm(embedded), self.hidden_norm(g)], axis=-1)
        out, cache = self.self_attn(x, positions, attend, cache)
        return self.add(g, out), cache


class Eagle3Module(nn.Module):
    """Parameters of EAGLE-3 and MTP."""

    config: DrafterConfig
    dtype: Any = jnp.float32

    def setup(self) -> None:
        """Declare sublayers and parameters."""
        c = self.config.decoder
        self.fc = Linear(c.hidden_size, dtype=self.dtype, stddev=c.initializer_range)
        self.layers = [Eagle3Layer(c, 0, self.dtype)]
        self.norm = RMSNorm(c.rms_norm_eps, self.dtype)

    def fuse(self, features: Float[Array, "... FD"]) -> Float[Array, "... D"]:
        """G = fc(tapped states), for MTP fc(last hidden state): no bias, no norm."""
        return self.fc(features.astype(self.dtype))

    def step(self, embedded: Array, g: Array, positions: Array, attend: Attend, cache: Any):
        """One layer step; returns the new state (which feeds the next step in place of g) and the cache."""
        return self.layers[0].step(embedded.astype(self.dtype), g, positions, attend, cache)

    def head(self, state: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """What the target's lm_head multiplies: the normed state."""
        return self.norm(state)

    def __call__(self, features: Array, embedded: Array, positions: Array, attend: Attend) -> Array:
        """Touch every parameter once; used for initialisation only."""
        return self.head(self.step(embedded, self.fuse(features), positions, attend, None)[0])


@struct.dataclass
class Eagle3State:
    """Draft cache and the state drafting starts from.

    Attributes:
        cache: keys and values at the positions of the features; entries past the committed ones are junk.
        hidden: state of the last committed row of every slot, from which its first draft token is read.
    """

    cache: KVCache
    hidden: Float[Array, "S D"]


@dataclasses.dataclass(frozen=True)
class Eagle3Functions:
    """The drafter contract for EAGLE-3 and MTP; the feature at position i is paired with token i+1, rotated at i."""

    config: DrafterConfig
    dtype: Any = jnp.float32

    @property
    def tap_ids(self) -> tuple[int, ...]:
        """Target layers whose states `extend` reads."""
        return self.config.target_layer_ids

    @property
    def stops_early(self) -> bool:
        """Autoregressive drafting ends at a stop token."""
        return True

    @property
    def fills_blocks(self) -> bool:
        """There is always a next token to draft."""
        return True

    @property
    def module(self) -> Eagle3Module:
        """The Linen module."""
        return Eagle3Module(self.config, self.dtype)

    def inputs(self, features: TargetFeatures) -> Float[Array, "... FD"]:
        """What `fc` reads: the tapped states, or for MTP the last hidden state."""
        read = features.last_hidden if self.config.kind == "mtp" else features.taps
        assert read is not None  # the engine and the training step hand over what the drafter's config asks for
        return read

    def init(self, slots: int, max_length: int) -> Eagle3State:
        """Empty draft cache, with room for a block beyond the text."""
        shape = self.config.decoder.attention(0)
        length = max_length + self.config.block_size
        return Eagle3State(
            cache=KVCache.create(slots, length, shape.num_kv_heads, shape.head_dim, self.dtype),
            hidden=jnp.zeros((slots, self.config.decoder.hidden_size), self.dtype),
        )

    def extend(
        self,
        params: Params | None,
        tables: TargetTables,
        state: Eagle3State,
        plan: RaggedPlan,
        features: TargetFeatures,
        next_tokens: Int[Array, "T"],
        lengths: Int[Array, "S"],
    ) -> Eagle3State:
        """Run the layer over (feature i, token i+1) of the rows and keep the last committed row's state."""
        batch, slots = plan.batch, state.hidden.shape[0]
        g = run(self.module, params, self.inputs(features), method="fuse")
        hidden, cache = run(
            self.module,
            params,
            tables.embed_tokens(next_tokens, self.dtype),
            g,
            batch.positions,
            cache_attend(plan),
            state.cache,
            method="step",
        )
        limit = jnp.take(lengths, batch.slots, mode="fill", fill_value=0)
        last = jnp.where(batch.positions == limit - 1, batch.slots, slots)
        return Eagle3State(cache=cache, hidden=state.hidden.at[last].set(hidden, mode="drop"))

    def propose(
        self,
        params: Params | None,
        tables: TargetTables,
        state: Eagle3State,
        anchors: Int[Array, "S"],
        lengths: Int[Array, "S"],
        active: Bool[Array, "S"],
        keys: jax.Array,
        sampling: Sampling,
        block_size: int,
    ) -> tuple[Eagle3State, Proposal]:
        """Draft autoregressively: token k comes from step k-1's state and then runs as row `lengths - 1 + k`."""
        slots = anchors.shape[0]
        head = draft_head(params, tables)
        choose = chooser(sampling, keys, lengths, draft_ids(params), tables.embed.shape[0])
        slot_ids = jnp.where(active, jnp.arange(slots), slots)

        def draft(hidden, k):
            normed = run(self.module, params, hidden, method="head")
            return choose(head.logits(normed, self.dtype), k)

        def body(carry, k):
            hidden, cache, token = carry
            positions = lengths - 1 + k
            plan = make_plan(RaggedTokens(token, slot_ids, positions), slots, 1)
            embedded = tables.embed_tokens(token, self.dtype)
            hidden, cache = run(
                self.module, params, embedded, hidden, positions, cache_attend(plan), cache, method="step"
            )
            token, probs = draft(hidden, k)
            return (hidden, cache, token), (token, probs)

        token, probs = draft(state.hidden, jnp.int32(0))
        carry = (state.hidden, state.cache, token)
        (_, cache, _), rest = jax.lax.scan(body, carry, jnp.arange(1, block_size, dtype=jnp.int32))
        tokens, all_probs = jax.tree.map(
            lambda first, more: jnp.concatenate([first[:, None], more.swapaxes(0, 1)], axis=1), (token, probs), rest
        )
        num_valid = jnp.full((slots,), block_size, jnp.int32)
        return Eagle3State(cache, state.hidden), Proposal(tokens, all_probs, None, num_valid)

    def initialise(self, key: jax.Array, feature_width: int) -> Params:
        """Random parameters."""

        def attend(spec, q, k, v, cache):
            return q, cache

        features, x = jnp.zeros((1, feature_width)), jnp.zeros((1, self.config.decoder.hidden_size))
        return self.module.init(key, features, x, jnp.zeros((1,), jnp.int32), attend)["params"]

    def train_states(
        self,
        params: Params | None,
        tables: TargetTables,
        inputs: Float[Array, "B L FD"],
        tokens: Int[Array, "B L"],
        positions: Int[Array, "B L"],
        segments: Int[Array, "B L"],
        attention: IntervalAttention = DENSE_INTERVALS,
    ) -> Float[Array, "B L G D"]:
        """Training-time test: normed states of all G steps at every position (SPEC §6).

        Step t reads tokens shifted t+1 to the left and the state of step t-1, rotates at i+t, and sees the step-0 keys
        causally plus its own diagonal of each later step's keys.
        """
        g = run(self.module, params, inputs, method="fuse")
        out, keys = [], (None, ())
        for t in range(self.config.block_size):
            shifted = shift_left(tokens, segments, t + 1)
            attend = _test_time_attend(segments, t, attention)
            embedded = tables.embed_tokens(shifted, self.dtype)
            g, keys = run(self.module, params, embedded, g, positions + t, attend, keys, method="step")
            out.append(run(self.module, params, g, method="head"))
        return jnp.stack(out, axis=2)


def shift_left(values: Array, segments: Int[Array, "B L"], by: int) -> Array:
    """Shift rows to the left by `by`, zero where the source lies outside the row or the segment.

    Example: [5, 6, 7, 8] in segments [1, 1, 2, 2], shifted by 1: [6, 0, 8, 0].
    """
    if by == 0:
        return values
    pad = [(0, 0), (0, by)]
    moved = jnp.pad(values, pad)[:, by:]
    same = jnp.pad(segments, pad)[:, by:] == segments
    return jnp.where(same, moved, jnp.zeros((), values.dtype))


def _test_time_attend(segments: Int[Array, "B L"], step: int, attention: IntervalAttention) -> Attend:
    """Attention of training-time-test step `step`; the cache is `(step-0 keys and values, those of later steps)`.

    A row sees the step-0 keys up to its own position, and of each later step the key at its own position.
    """
    # Rows within `step` of their segment's end would predict past it: they see nothing.
    alive = shift_left(segments, segments, step) > 0

    def attend(spec: AttentionSpec, q, k, v, cache):
        first, later = cache
        if step == 0:
            first = (k, v)
        else:
            later = (*later, (k, v))
        intervals = causal_intervals(segments, spec.window)
        intervals = dataclasses.replace(intervals, end=jnp.where(alive, intervals.end, intervals.begin))
        keys, values = first
        out, log_mass = attention(q, keys, values, intervals, spec.scale)
        if later:
            by_head = lambda x: x.reshape(*x.shape[:2], k.shape[2], -1, *x.shape[3:])  # noqa: E731  [B, L, K, n, ...]
            out, log_mass, grouped = by_head(out), by_head(log_mass), by_head(q).astype(jnp.float32)
            dot = lambda key: jnp.sum(grouped * key.astype(jnp.float32)[:, :, :, None], axis=-1)  # noqa: E731
            own = jnp.stack([dot(key) * spec.scale for key, _ in later], axis=-1)
            out, weights = merge(out, log_mass, own, alive[:, :, None, None, None])
            for i, (_, value) in enumerate(later):
                out = out + weights[..., i, None] * value.astype(jnp.float32)[:, :, :, None]
        return out.reshape(q.shape).astype(q.dtype), (first, later)

    return attend
