"""Another language model as drafter: it writes the block itself, token after token, over its own cache.

The model is handed in as functions (`LanguageModel`), so this package knows nothing about targets.

Drafting runs the anchor and all drafts but the last through the model. When the target accepts them, their keys are in
the cache already; when it accepts the whole block, one row is missing. `propose` therefore begins with the last *two*
tokens, and `extend` has nothing to run in a round that drafted: it runs the model for prompts, and for what was
committed without drafting.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.draft.contract import chooser
from dspark_jax.nn.attention import RaggedPlan, make_plan
from dspark_jax.types import Params, Proposal, RaggedTokens, Sampling, TargetFeatures, TargetTables


class LanguageModel(Protocol):
    """What drafting needs of a model; hashable, as it is part of a compiled program's identity."""

    def create_caches(self, slots: int, length: int) -> Any:
        """Empty caches."""

    def forward(self, params: Params, caches: Any, plan: RaggedPlan) -> tuple[Float[Array, "T D"], Any]:
        """Run ragged rows; returns what the head multiplies, and the caches with the rows written."""

    def logits(self, params: Params, hidden: Float[Array, "S D"]) -> Float[Array, "S V"]:
        """Float32 logits over the model's own table."""


@struct.dataclass
class LanguageModelState:
    """The model's caches and what is in them.

    Attributes:
        caches: of the model.
        tokens: token of every position, `[S, C]`; junk from the committed length on, like the caches.
        cached: so many leading positions of the caches belong to these tokens, `[S]`; at least the committed length
            minus one.
    """

    caches: Any
    tokens: Int[Array, "S C"]
    cached: Int[Array, "S"]


@dataclasses.dataclass(frozen=True)
class LanguageModelFunctions:
    """The drafter contract for a language model with the target's vocabulary; its parameters are its own affair.

    Attributes:
        model: the model's functions.
        block_size: draft tokens a round there is room for beyond the text.
        vocab_size: ids of the target; the model's further ones (padding of its table) are never drafted.
    """

    model: LanguageModel
    block_size: int
    vocab_size: int

    @property
    def tap_ids(self) -> tuple[int, ...]:
        """It reads tokens, no states of the target."""
        return ()

    @property
    def stops_early(self) -> bool:
        """Autoregressive drafting ends at a stop token."""
        return True

    @property
    def fills_blocks(self) -> bool:
        """There is always a next token to draft."""
        return True

    def init(self, slots: int, max_length: int) -> LanguageModelState:
        """Empty caches, with room for a block beyond the text."""
        length = max_length + self.block_size
        return LanguageModelState(
            caches=self.model.create_caches(slots, length),
            tokens=jnp.zeros((slots, length), jnp.int32),
            cached=jnp.zeros((slots,), jnp.int32),
        )

    def extend(
        self,
        params: Params | None,
        tables: TargetTables,
        state: LanguageModelState,
        plan: RaggedPlan,
        features: TargetFeatures,
        next_tokens: Int[Array, "T"],
        lengths: Int[Array, "S"],
    ) -> LanguageModelState:
        """Take in the rows' tokens, and run the model unless drafting has run them already."""
        del tables, features, next_tokens
        assert params is not None
        batch, slots = plan.batch, state.cached.shape[0]
        at = (batch.slots, batch.positions)
        counts = batch.positions < jnp.take(lengths, batch.slots, mode="fill", fill_value=0)
        known = state.tokens.at[at].get(mode="fill", fill_value=-1) == batch.tokens
        first = _first_position(batch, counts, slots)
        touched = jnp.zeros((slots,), bool).at[batch.slots].set(True, mode="drop")
        cached = jnp.minimum(jnp.minimum(state.cached, _first_position(batch, counts & ~known, slots)), lengths)
        cached = jnp.where(touched, cached, state.cached)
        tokens = state.tokens.at[at].set(batch.tokens, mode="drop")

        def run_rows(caches):
            # After a whole accepted block that no proposal followed, the row before these is missing too.
            last = jnp.take_along_axis(tokens, cached[:, None], axis=1, mode="clip")[:, 0]
            lacking = jnp.where(touched & (cached < first), jnp.arange(slots), slots)
            before = make_plan(RaggedTokens(last, lacking, cached), slots, 1)
            _, caches = self.model.forward(params, caches, before)
            _, caches = self.model.forward(params, caches, plan)
            return caches, jnp.where(touched, lengths, cached)

        # The row at `lengths - 1` may be missing: `propose` runs it.
        behind = jnp.any(touched & (cached < lengths - 1))
        caches, cached = jax.lax.cond(behind, run_rows, lambda caches: (caches, cached), state.caches)
        return LanguageModelState(caches, tokens, cached)

    def propose(
        self,
        params: Params | None,
        tables: TargetTables,
        state: LanguageModelState,
        anchors: Int[Array, "S"],
        lengths: Int[Array, "S"],
        active: Bool[Array, "S"],
        keys: jax.Array,
        sampling: Sampling,
        block_size: int,
    ) -> tuple[LanguageModelState, Proposal]:
        """Draft autoregressively: token k comes from the row of token k-1 at position `lengths + k - 1`."""
        del tables
        assert params is not None
        slots = anchors.shape[0]
        choose = chooser(sampling, keys, lengths)
        slot_ids = jnp.where(active, jnp.arange(slots), slots)

        def draft(tokens, slot_of, positions, caches, k):
            """Run rows `[S, Q]` and draw token k after each slot's last one."""
            batch = RaggedTokens(tokens.reshape(-1), slot_of.reshape(-1), positions.reshape(-1))
            plan = make_plan(batch, slots, tokens.shape[1])
            hidden, caches = self.model.forward(params, caches, plan)
            logits = self.model.logits(params, hidden.reshape(*tokens.shape, -1)[:, -1])
            return choose(logits[:, : self.vocab_size], k), caches

        def body(carry, k):
            token, caches = carry
            (token, probs), caches = draft(token[:, None], slot_ids[:, None], (lengths + k)[:, None], caches, k)
            return (token, caches), (token, probs)

        previous = jnp.take_along_axis(state.tokens, lengths[:, None] - 1, axis=1, mode="clip")[:, 0]
        (token, probs), caches = draft(
            jnp.stack([previous, anchors], axis=1),
            jnp.stack([jnp.where(lengths > 0, slot_ids, slots), slot_ids], axis=1),
            jnp.stack([lengths - 1, lengths], axis=1),
            state.caches,
            jnp.int32(0),
        )
        (_, caches), rest = jax.lax.scan(body, (token, caches), jnp.arange(1, block_size, dtype=jnp.int32))
        drafts, all_probs = jax.tree.map(
            lambda one, more: jnp.concatenate([one[:, None], more.swapaxes(0, 1)], axis=1), (token, probs), rest
        )
        ran = jnp.concatenate([anchors[:, None], drafts[:, :-1]], axis=1)
        positions = lengths[:, None] + jnp.arange(block_size, dtype=jnp.int32)
        state = LanguageModelState(
            caches=caches,
            tokens=state.tokens.at[slot_ids[:, None], positions].set(ran, mode="drop"),
            cached=jnp.where(active, lengths + block_size, state.cached),
        )
        return state, Proposal(drafts, all_probs, None, jnp.full((slots,), block_size, jnp.int32))


def _first_position(batch: RaggedTokens, chosen: Bool[Array, "T"], slots: int) -> Int[Array, "S"]:
    """Smallest position of the chosen rows of every slot; a huge one where there are none."""
    none = jnp.full((slots,), jnp.iinfo(jnp.int32).max, jnp.int32)
    return none.at[jnp.where(chosen, batch.slots, slots)].min(batch.positions, mode="drop")
