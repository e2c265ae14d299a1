"""A target that follows a given chain of tokens, and a drafter that knows it: rounds with known accepted counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dspark_jax.config import DecoderConfig, DrafterConfig, RopeConfig
from dspark_jax.draft.contract import Drafter
from dspark_jax.target.loading import Target, parameter_shapes
from dspark_jax.types import Proposal, TargetTables


def chain_target(following: Sequence[int], *, max_position: int = 64, stops: Sequence[int] = ()) -> Target:
    """A target whose greedy token after t is `following[t]`: one-hot states, idle layers, a shifting head."""
    vocab = len(following)
    config = DecoderConfig(
        family="llama", vocab_size=vocab, hidden_size=vocab, intermediate_size=2, num_layers=1, num_heads=1,
        num_kv_heads=1, head_dim=2, rms_norm_eps=1e-6, rope=RopeConfig(), max_position=max_position,
    )  # fmt: skip
    params = jax.tree.map(
        lambda leaf: jnp.ones(leaf.shape) if len(leaf.shape) == 1 else jnp.zeros(leaf.shape), parameter_shapes(config)
    )
    head = jnp.zeros((vocab, vocab)).at[jnp.asarray(following), jnp.arange(vocab)].set(5.0)
    tables = TargetTables(embed=jnp.eye(vocab), head=head)
    return Target("chain", config, params, tables, None, tuple(stops), jnp.float32)


@dataclasses.dataclass(frozen=True)
class ChainFunctions:
    """The drafter contract: follow the chain, being right for the first `right` tokens of every block.

    Attributes:
        right: number of leading draft tokens that are right.
    """

    right: int = 1_000_000
    tap_ids: tuple[int, ...] = ()
    stops_early: bool = False
    fills_blocks: bool = True

    def init(self, slots: int, max_length: int) -> Any:
        """Nothing to remember but how often it was extended."""
        return jnp.zeros((slots,), jnp.int32)

    def extend(self, params, tables, state, plan, features, next_tokens, lengths) -> Any:
        """Count the rows of every slot."""
        return state.at[plan.batch.slots].add(1, mode="drop")

    def propose(self, params, tables, state, anchors, lengths, active, keys, sampling, block_size):
        """Draft the chain after each anchor."""

        def step(token, _):
            token = params["following"][token]
            return token, token

        _, tokens = jax.lax.scan(step, anchors, None, length=block_size)
        tokens, vocab = tokens.T, params["following"].shape[0]
        tokens = jnp.where(jnp.arange(block_size) < self.right, tokens, (tokens + 1) % vocab)
        return state, Proposal(tokens, None, None, jnp.full(anchors.shape, block_size, jnp.int32))


def chain_drafter(target: Target, block_size: int, *, right: int = 1_000_000) -> Drafter:
    """The drafter that knows the chain of `chain_target`."""
    following = jnp.argmax(target.tables.head, axis=0).astype(jnp.int32)
    config = DrafterConfig(
        kind="dspark", decoder=target.config, target_layers=target.config.num_layers, target_layer_ids=(-1,),
        block_size=block_size, mask_token_id=0,
    )  # fmt: skip
    return Drafter("chain", config, {"following": following}, ChainFunctions(right))
