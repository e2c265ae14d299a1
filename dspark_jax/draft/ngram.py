"""Prompt lookup: draft what followed the last tokens the last time they occurred. No parameters, no model.

Good where answers repeat their prompt (summaries, edits, code). Drafting costs next to nothing; where nothing matches,
nothing is proposed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from dspark_jax.config import DrafterConfig
from dspark_jax.draft.contract import Drafter
from dspark_jax.nn.attention import RaggedPlan
from dspark_jax.types import Params, Proposal, Sampling, TargetFeatures, TargetTables


@struct.dataclass
class NgramState:
    """The text of every slot by position; entries at or past the committed length are junk."""

    tokens: Int[Array, "S C"]


@dataclasses.dataclass(frozen=True)
class NgramFunctions:
    """The drafter contract for prompt lookup.

    Attributes:
        min_ngram: tokens that must match at least.
        max_ngram: longer matches count as this long.
    """

    min_ngram: int = 2
    max_ngram: int = 4

    @property
    def tap_ids(self) -> tuple[int, ...]:
        """It reads tokens, no states."""
        return ()

    @property
    def stops_early(self) -> bool:
        """What follows a stop token belongs to another turn."""
        return True

    @property
    def fills_blocks(self) -> bool:
        """Mostly nothing has occurred before, and nothing is drafted."""
        return False

    def init(self, slots: int, max_length: int) -> NgramState:
        """No text; there is room for the anchor after the longest one."""
        return NgramState(jnp.zeros((slots, max_length + 1), jnp.int32))

    def extend(
        self,
        params: Params | None,
        tables: TargetTables,
        state: NgramState,
        plan: RaggedPlan,
        features: TargetFeatures,
        next_tokens: Int[Array, "T"],
        lengths: Int[Array, "S"],
    ) -> NgramState:
        """Write the rows' tokens down."""
        del params, tables, features, next_tokens, lengths  # rejected rows are overwritten before anyone reads them
        batch = plan.batch
        return NgramState(state.tokens.at[batch.slots, batch.positions].set(batch.tokens, mode="drop"))

    def propose(
        self,
        params: Params | None,
        tables: TargetTables,
        state: NgramState,
        anchors: Int[Array, "S"],
        lengths: Int[Array, "S"],
        active: Bool[Array, "S"],
        keys: jax.Array,
        sampling: Sampling,
        block_size: int,
    ) -> tuple[NgramState, Proposal]:
        """Draft the tokens after the best match; fewer than a block where the text ends first, none without a match."""
        del params, tables, active, keys, sampling  # deterministic
        text = state.tokens.at[jnp.arange(anchors.shape[0]), lengths].set(anchors, mode="drop")
        end, found = find_match(text, lengths, self.min_ngram, self.max_ngram)
        num_valid = jnp.where(found, jnp.minimum(lengths - end, block_size), 0)
        steps = jnp.arange(block_size, dtype=jnp.int32)
        tokens = jnp.take_along_axis(text, end[:, None] + 1 + steps, axis=1, mode="clip")
        tokens = jnp.where(steps < num_valid[:, None], tokens, 0)
        return state, Proposal(tokens, None, None, num_valid)


def find_match(
    text: Int[Array, "S C"], last: Int[Array, "S"], min_ngram: int, max_ngram: int
) -> tuple[Int[Array, "S"], Bool[Array, "S"]]:
    """Where the tokens up to `last` occurred before: the longest match, of equally long ones the most recent.

    Args:
        text: tokens by position.
        last: position of the last token of each text.
        min_ngram, max_ngram: shortest and longest match that counts.

    Returns:
        Position of the match's last token, and whether there is one.

    Example: in `7 8 9 5 8 9 6 8 9` the last two tokens occurred at 4, 5 and at 1, 2: the match ends at 5.
    """
    index = jnp.arange(text.shape[1], dtype=jnp.int32)
    equal, matched = jnp.ones(text.shape, bool), jnp.zeros(text.shape, jnp.int32)
    for back in range(max_ngram):
        token = jnp.take_along_axis(text, last[:, None] - back, axis=1, mode="clip")
        equal &= (jnp.roll(text, back, axis=1) == token) & (index >= back)
        matched += equal
    candidate = (index < last[:, None]) & (matched >= min_ngram)
    score = jnp.where(candidate, matched * text.shape[1] + index, -1)
    return jnp.argmax(score, axis=1).astype(jnp.int32), jnp.any(candidate, axis=1)


def ngram_drafter(target: Any, *, block_size: int = 7, min_ngram: int = 2, max_ngram: int = 4) -> Drafter:
    """Prompt lookup for a target.

    Args:
        target: the `Target` it drafts for.
        block_size: most tokens of a draft.
        min_ngram: tokens that must match before anything is drafted.
        max_ngram: matches longer than this are not told apart.

    Raises:
        ValueError: lengths that leave nothing to match.
    """
    if not 1 <= min_ngram <= max_ngram:
        raise ValueError(f"min_ngram is {min_ngram}, max_ngram is {max_ngram}: expected 1 <= min_ngram <= max_ngram")
    config = DrafterConfig(
        kind="ngram",
        decoder=target.config,
        target_layers=target.config.num_layers,
        target_layer_ids=(),
        block_size=block_size,
    )
    return Drafter("ngram", config, {}, NgramFunctions(min_ngram, max_ngram), target.tables)
