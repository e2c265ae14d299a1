"""DSpark and DFlash: a parallel backbone over the target's context, a sequential head, a confidence head."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.config import DrafterConfig
from dspark_jax.draft.backbone import ParallelDrafter, training_attend
from dspark_jax.draft.contract import chooser
from dspark_jax.draft.heads import sample_block
from dspark_jax.draft.vocabulary import draft_head, draft_ids
from dspark_jax.nn import run
from dspark_jax.nn.attention import KVCache, RaggedPlan, cache_attend, make_plan
from dspark_jax.nn.intervals import DENSE_INTERVALS, IntervalAttention
from dspark_jax.sharding import constrain
from dspark_jax.types import Params, Proposal, RaggedTokens, Sampling, TargetFeatures, TargetTables


@struct.dataclass
class DSparkState:
    """Context keys and values of every draft layer; entries at or past the committed length are junk."""

    caches: tuple[KVCache, ...]


@struct.dataclass
class BlockOutputs:
    """Training-time outputs of all blocks.

    Attributes:
        hidden: h after the final norm.
        markov: what W2 multiplies; None for DFlash.
        confidence_logits: None without the head.
    """

    hidden: Float[Array, "B A G D"]
    markov: Float[Array, "B A G R"] | None
    confidence_logits: Float[Array, "B A G"] | None


@dataclasses.dataclass(frozen=True)
class DSparkFunctions:
    """The drafter contract for DSpark and DFlash.

    Attributes:
        config: drafter.
        dtype: type of products and caches.
        gather_logits: drafting on a mesh gathers the base logits once, before the sequential head's scan, whose tables
            are whole on every device (`sharding.REPLICATED_MARKOV`); otherwise tables and logits stay split.
    """

    config: DrafterConfig
    dtype: Any = jnp.float32
    gather_logits: bool = False

    @property
    def tap_ids(self) -> tuple[int, ...]:
        """Target layers whose states `extend` reads."""
        return self.config.target_layer_ids

    @property
    def stops_early(self) -> bool:
        """The block is drafted at once, stop tokens or not."""
        return False

    @property
    def fills_blocks(self) -> bool:
        """The block is drafted at once."""
        return True

    @property
    def mask_token_id(self) -> int:
        """Fills the block after its anchor."""
        assert self.config.mask_token_id is not None  # the config refuses a parallel drafter without one
        return self.config.mask_token_id

    @property
    def module(self) -> ParallelDrafter:
        """The Linen module."""
        return ParallelDrafter(self.config, self.dtype)

    def init(self, slots: int, max_length: int) -> DSparkState:
        """Empty context. The block itself is attended to in the cache, so there is room for one beyond the text."""
        length = max_length + self.config.block_size
        shapes = [self.config.decoder.attention(i) for i in range(self.config.decoder.num_layers)]
        return DSparkState(tuple(KVCache.create(slots, length, s.num_kv_heads, s.head_dim, self.dtype) for s in shapes))

    def extend(
        self,
        params: Params | None,
        tables: TargetTables,
        state: DSparkState,
        plan: RaggedPlan,
        features: TargetFeatures,
        next_tokens: Int[Array, "T"],
        lengths: Int[Array, "S"],
    ) -> DSparkState:
        """Write the rows' context keys and values; see the contract."""
        del tables, next_tokens, lengths  # rows past the committed length are overwritten before they become visible
        slots, positions = plan.batch.slots, plan.batch.positions
        pairs = run(self.module, params, features.taps, positions, method="context")
        return DSparkState(
            tuple(cache.write(slots, positions, k, v) for cache, (k, v) in zip(state.caches, pairs, strict=True))
        )

    def propose(
        self,
        params: Params | None,
        tables: TargetTables,
        state: DSparkState,
        anchors: Int[Array, "S"],
        lengths: Int[Array, "S"],
        active: Bool[Array, "S"],
        keys: jax.Array,
        sampling: Sampling,
        block_size: int,
    ) -> tuple[DSparkState, Proposal]:
        """Draft a block: backbone and base logits for all slots at once, then the sequential head's scan."""
        slots = anchors.shape[0]
        steps = jnp.arange(block_size, dtype=jnp.int32)
        inputs = jnp.where(steps[None, :] == 0, anchors[:, None], self.mask_token_id)
        batch = RaggedTokens(
            tokens=inputs.reshape(-1),
            slots=jnp.repeat(jnp.where(active, jnp.arange(slots), slots), block_size),
            positions=(lengths[:, None] + steps).reshape(-1),
        )
        # The block's keys go into the cache at their own positions: context before the anchor and the whole block
        # become visible as one range, and the next `extend` overwrites them.
        plan = make_plan(batch, slots, block_size, visible=jnp.repeat(lengths + block_size, block_size))
        hidden, caches = run(
            self.module,
            params,
            tables.embed_tokens(batch.tokens, self.dtype),
            batch.positions,
            cache_attend(plan),
            state.caches,
            method="blocks",
        )
        hidden = hidden.reshape(slots, block_size, -1)
        base_logits = draft_head(params, tables).logits(hidden, self.dtype)
        if self.gather_logits:
            # In two steps: else the head is gathered, not what it gives.
            base_logits = constrain(constrain(base_logits, "block_logits"), "whole")
        tokens, previous, probs = sample_block(
            self.config,
            params,
            base_logits,
            hidden,
            anchors,
            chooser(sampling, keys, lengths, draft_ids(params), tables.embed.shape[0]),
            self.dtype,
        )
        confidence = None
        if self.config.confidence_head:
            confidence = self._calibrated(run(self.module, params, hidden, previous, method="confidence"))
        num_valid = jnp.full((slots,), block_size, jnp.int32)
        return DSparkState(tuple(caches)), Proposal(tokens, probs, confidence, num_valid)

    def _calibrated(self, logits: Float[Array, "S G"]) -> Float[Array, "S G"]:
        """Divide each position's logit by its fitted temperature: the only place where calibration is applied."""
        temperatures = self.config.confidence_temperatures
        if temperatures is None:
            return logits
        if logits.shape[1] > len(temperatures):
            raise ValueError(
                f"block_size is {logits.shape[1]}, but the drafter's confidences are calibrated for "
                f"{len(temperatures)} positions: ask for no more, or take the temperatures out of its config.json"
            )
        return logits / jnp.asarray(temperatures[: logits.shape[1]], logits.dtype)

    def initialise(self, key: jax.Array, tap_width: int) -> Params:
        """Random parameters; the sequential head starts as no bias at all (W2 = 0)."""

        def attend(spec, q, k, v, cache):
            return q, cache

        taps, token = jnp.zeros((1, tap_width)), jnp.zeros((1,), jnp.int32)
        return self.module.init(key, taps, token, token, attend)["params"]

    def train_blocks(
        self,
        params: Params | None,
        tables: TargetTables,
        taps: Float[Array, "B L FD"],
        tokens: Int[Array, "B L"],
        positions: Int[Array, "B L"],
        segments: Int[Array, "B L"],
        anchors: Int[Array, "B A"],
        keep: Bool[Array, "B A"],
        labels: Int[Array, "B A G"],
        attention: IntervalAttention = DENSE_INTERVALS,
    ) -> BlockOutputs:
        """Run every block of whole rows with teacher forcing (DSpark §3; SPEC §3-4).

        Args:
            params: drafter parameters.
            tables: the target's embedding and head.
            taps: tapped states of the rows.
            tokens, positions, segments: the rows.
            anchors, keep: drawn anchors; dummies see no context.
            labels: true tokens of each slot; slot k's previous token is the anchor or label k-1.
            attention: how the rows attend.
        """
        at = lambda values: jnp.take_along_axis(values, anchors, axis=1)  # noqa: E731
        size = self.config.block_size
        anchor_tokens = at(tokens)
        steps = jnp.arange(size, dtype=jnp.int32)
        inputs = jnp.where(steps == 0, anchor_tokens[..., None], self.mask_token_id)
        module = self.module
        hidden, _ = run(
            module,
            params,
            tables.embed_tokens(inputs, self.dtype),
            at(positions)[..., None] + steps,
            training_attend(anchors, keep, segments, size, attention),
            run(module, params, taps, positions, method="context"),
            method="blocks",
        )
        previous = jnp.concatenate([anchor_tokens[..., None], labels[..., :-1]], axis=-1)
        markov = confidence = None
        if self.config.markov_rank:
            markov = run(module, params, previous, hidden, method="markov_inputs")
        if self.config.confidence_head:
            confidence = run(module, params, hidden, previous, method="confidence")
        return BlockOutputs(hidden, markov, confidence)
