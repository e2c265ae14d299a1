"""A sampled vocabulary for the training losses: exact columns where the mass is, an unbiased sample of the rest.

The products with the head are most of a drafter's training time where the vocabulary is large and the model small.
Text uses little of the vocabulary, so a step may compute the columns of the most frequent tokens and of every token
in its own batch exactly, and let a uniform sample of the others stand for all others: each sampled column enters the
softmax with weight (number of others / number sampled), so that the normaliser is unbiased. Drafts,
verification, validation and the checkpoint know nothing of this; without it (the default) the losses are exact.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

_COLUMNS = 0x636F6C  # keeps these draws apart from the anchors' of the same seed and step


@struct.dataclass
class Columns:
    """The columns of one step.

    Attributes:
        ids: token ids, each at most once, `[C]`.
        log_weight: log of how many tokens a column stands for, `[C]`; 0 for exact columns.
        place: column of every token of the batch, `[V]`; other entries are meaningless.
    """

    ids: Int[Array, "C"]
    log_weight: Float[Array, "C"]
    place: Int[Array, "V"]


def frequent_tokens(counts: Int[np.ndarray, "V"], count: int) -> tuple[int, ...]:
    """The `count` most frequent ids, ties to the lower id; fewer where fewer occur at all."""
    order = np.argsort(-counts, kind="stable")[:count]
    return tuple(int(i) for i in order if counts[i])


def draw_columns(
    key: jax.Array, tokens: Int[Array, "..."], frequent: tuple[int, ...], vocab_size: int, count: int
) -> Columns:
    """Choose a step's columns: all of `frequent`, all of `tokens`, and a uniform sample of the others.

    Args:
        key: names the draw.
        tokens: every token that may be a label.
        frequent: ids that are always exact.
        vocab_size: V.
        count: C; must exceed `len(frequent)` plus the distinct tokens of a batch, or exact columns would be missing.

    Returns:
        Columns in no particular order.
    """
    priority = jax.random.uniform(key, (vocab_size,))
    priority = priority.at[jnp.asarray(frequent, jnp.int32)].set(2.0).at[tokens.reshape(-1)].set(2.0)
    top, ids = jax.lax.top_k(priority, count)
    exact = top >= 2.0
    kept = jnp.sum(exact)
    ratio = (vocab_size - kept) / jnp.maximum(count - kept, 1)
    return Columns(
        ids=ids.astype(jnp.int32),
        log_weight=jnp.where(exact, 0.0, jnp.log(ratio)).astype(jnp.float32),
        place=jnp.zeros((vocab_size,), jnp.int32).at[ids].set(jnp.arange(count, dtype=jnp.int32)),
    )


@dataclasses.dataclass(frozen=True)
class SampledVocabulary:
    """How a run samples its vocabulary.

    Attributes:
        count: columns a step.
        frequent: ids that are always exact.
        seed: names the draws.
    """

    count: int
    frequent: tuple[int, ...]
    seed: int

    def draw(self, step: Int[Array, ""], tokens: Int[Array, "..."], vocab_size: int) -> Columns:
        """Draw a step's columns: a function of (seed, step) and the step's tokens."""
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self.seed), _COLUMNS), step)
        return draw_columns(key, tokens, self.frequent, vocab_size, self.count)
