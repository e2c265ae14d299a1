"""The drafter contract: three pure functions over a state, which is all that verifier, engine and evaluation know."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from dspark_jax.config import DrafterConfig
from dspark_jax.nn.attention import RaggedPlan
from dspark_jax.sampling import Purpose, probabilities, sample, uniforms
from dspark_jax.types import Params, Proposal, Sampling, TargetFeatures, TargetTables

State = Any


@runtime_checkable
class DrafterFunctions(Protocol):
    """What a drafter does. All functions are pure and jittable."""

    @property
    def tap_ids(self) -> tuple[int, ...]:
        """Target layers whose states `extend` reads."""

    @property
    def stops_early(self) -> bool:
        """Whether drafting ends at a drafted stop token (autoregressive drafters) or always fills the block."""

    @property
    def fills_blocks(self) -> bool:
        """Whether every block has its full length (`num_valid`), so that the host need not look how long it became."""

    def init(self, slots: int, max_length: int) -> State:
        """Empty state for `slots` requests of up to `max_length` committed tokens."""

    def extend(
        self,
        params: Params | None,
        tables: TargetTables,
        state: State,
        plan: RaggedPlan,
        features: TargetFeatures,
        next_tokens: Int[Array, "T"],
        lengths: Int[Array, "S"],
    ) -> State:
        """Take in the target's features of rows it has just run.

        A row counts iff its position is below its slot's committed length; other rows (rejected drafts) stay as junk
        that later rows overwrite and nobody reads.

        Args:
            params: drafter parameters.
            tables: the target's embedding and head.
            state: state to extend.
            plan: the rows and where they sit, the same plan the target ran with.
            features: the target's features of each row.
            next_tokens: the token that follows each counting row in the committed text.
            lengths: committed tokens of every slot that have been run through the target (the anchor's position).
        """

    def propose(
        self,
        params: Params | None,
        tables: TargetTables,
        state: State,
        anchors: Int[Array, "S"],
        lengths: Int[Array, "S"],
        active: Bool[Array, "S"],
        keys: jax.Array,
        sampling: Sampling,
        block_size: int,
    ) -> tuple[State, Proposal]:
        """Draft a block after each slot's anchor.

        Args:
            params: drafter parameters.
            tables: the target's embedding and head.
            state: state that has seen the features of all positions below `lengths`.
            anchors: the last committed token of each slot, not yet run through the target.
            lengths: its position.
            active: slots that draft; the others write nothing and their proposal is meaningless.
            keys: one key a request.
            sampling: the requests' settings, the same the verifier uses.
            block_size: tokens to draft.
        """


@dataclasses.dataclass(frozen=True)
class Drafter:
    """A loaded drafter.

    Attributes:
        name: name or path it was loaded from.
        config: what it is.
        params: its parameters.
        functions: the contract's three functions.
        tables: the target's embedding and head, shared with it; None where the drafter stands alone.
    """

    name: str
    config: DrafterConfig
    params: Params
    functions: DrafterFunctions
    tables: TargetTables | None = None


def chooser(
    sampling: Sampling,
    keys: jax.Array,
    positions: Int[Array, "S"],
    ids: Int[Array, "Vd"] | None = None,
    vocab_size: int | None = None,
):
    """Return `choose(logits [S, Vd], k) -> (tokens [S], probs [S, V] | None)` for slot k of blocks at `positions`.

    In greedy mode tokens are deterministic and no distribution over the vocabulary is built.

    Args:
        sampling, keys: of the requests.
        positions: of their anchors.
        ids: target ids of a reduced draft vocabulary; None where logits are over the target's own.
        vocab_size: V, with `ids`.
    """

    def choose(logits, k):
        if sampling.mode == "greedy":
            tokens, probs = jnp.argmax(logits, axis=-1).astype(jnp.int32), None
        else:
            probs = probabilities(logits, sampling)
            slot = jnp.broadcast_to(k, (positions.shape[0], 1))
            tokens = sample(probs, uniforms(keys, positions, Purpose.PROPOSE, slot)[:, 0])
        if ids is None:
            return tokens, probs
        if probs is not None:
            # What cannot be drafted has probability 0: rejection sampling makes up for it.
            probs = jnp.zeros((probs.shape[0], vocab_size)).at[:, ids].set(probs)
        return jnp.take(ids, tokens), probs

    return choose
