"""The sequential (Markov) head in its three forms, its sampling scan, and the confidence head.

All three forms add `W2 @ m_k` to the base logits of slot k; they differ in how m_k [R] arises from the previous token's
table row, the backbone state and (RNN) a carried state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from dspark_jax.config import DrafterConfig
from dspark_jax.nn import run
from dspark_jax.nn.linear import Linear
from dspark_jax.products import product
from dspark_jax.types import Params


class Table(nn.Module):
    """A `[V, R]` table under the checkpoint's name `weight`."""

    rows: int
    width: int
    zero_init: bool = False

    @nn.compact
    def __call__(self) -> Float[Array, "V R"]:
        """Return the table."""
        init = nn.initializers.zeros if self.zero_init else nn.initializers.normal(0.02)
        return self.param("weight", init, (self.rows, self.width), jnp.float32)


class MarkovHead(nn.Module):
    """Vanilla, gated or RNN head (DSpark's sequential head)."""

    config: DrafterConfig
    dtype: Any = jnp.float32

    def setup(self) -> None:
        """Declare sublayers and parameters."""
        vocab, rank = self.config.decoder.vocab_size, self.config.markov_rank
        self.markov_w1 = Table(vocab, rank)
        self.markov_w2 = Table(self.config.draft_vocab_size or vocab, rank, zero_init=True)
        if self.config.markov_head == "gated":
            self.gate_proj = Linear(rank, use_bias=True, dtype=self.dtype)
        elif self.config.markov_head == "rnn":
            self.joint_proj = Linear(3 * rank, use_bias=True, dtype=self.dtype)

    def embed(self, previous: Int[Array, "..."]) -> Float[Array, "... R"]:
        """Rows of W1."""
        return jnp.take(self.markov_w1(), previous, axis=0, mode="fill", fill_value=jnp.nan).astype(self.dtype)

    def step(
        self, previous: Int[Array, "..."], hidden: Float[Array, "... D"], state: Float[Array, "... R"]
    ) -> tuple[Float[Array, "... R"], Float[Array, "... R"]]:
        """One slot: returns (m_k, next state). The state is used by the RNN form only."""
        row = self.embed(previous)
        if self.config.markov_head == "vanilla":
            return row, state
        if self.config.markov_head == "gated":
            gate = jax.nn.sigmoid(self.gate_proj(jnp.concatenate([hidden.astype(self.dtype), row], axis=-1)))
            return gate * row, state
        joint = self.joint_proj(jnp.concatenate([state.astype(self.dtype), row, hidden.astype(self.dtype)], axis=-1))
        gate, candidate, output = jnp.split(joint, 3, axis=-1)
        gate = jax.nn.sigmoid(gate)
        state = gate * state + (1 - gate) * jnp.tanh(candidate)
        return jnp.tanh(output), state.astype(self.dtype)

    def teacher_forced(self, previous: Int[Array, "... G"], hidden: Float[Array, "... G D"]) -> Float[Array, "... G R"]:
        """All slots with known previous tokens `[anchor, labels[:-1]]`; parallel except for the RNN form."""
        if self.config.markov_head != "rnn":
            return self.step(previous, hidden, jnp.zeros((*previous.shape, self.config.markov_rank), self.dtype))[0]
        state, out = jnp.zeros((*previous.shape[:-1], self.config.markov_rank), self.dtype), []
        for k in range(previous.shape[-1]):
            m, state = self.step(previous[..., k], hidden[..., k, :], state)
            out.append(m)
        return jnp.stack(out, axis=-2)

    def initialise(self, previous: Int[Array, "..."], hidden: Float[Array, "... D"]) -> None:
        """Touch every parameter once."""
        self.step(previous, hidden, jnp.zeros((*previous.shape, self.config.markov_rank), self.dtype))
        self.markov_w2()


class ConfidenceHead(nn.Module):
    """Logit of the predicted accept rate from the backbone state and, where configured, the raw W1 row."""

    config: DrafterConfig

    def setup(self) -> None:
        """Declare sublayers and parameters."""
        # Its single output is computed in float32: calibration reads small differences of it.
        self.proj = Linear(1, use_bias=True, dtype=jnp.float32)

    def __call__(self, hidden: Float[Array, "... D"], table_row: Float[Array, "... R"] | None) -> Float[Array, "..."]:
        """Return the confidence logit of every slot."""
        parts = [hidden] if table_row is None else [hidden, table_row]
        return self.proj(jnp.concatenate([p.astype(jnp.float32) for p in parts], axis=-1))[..., 0]


Choose = Callable[[Float[Array, "S Vd"], Int[Array, ""]], tuple[Int[Array, "S"], Float[Array, "S V"] | None]]
"""`choose(logits, k) -> (tokens, probs or None)`: how slot k's token is drawn from its logits."""


def sample_block(
    config: DrafterConfig,
    params: Params | None,
    base_logits: Float[Array, "S G Vd"],
    hidden: Float[Array, "S G D"],
    anchors: Int[Array, "S"],
    choose: Choose,
    dtype: Any = jnp.float32,
) -> tuple[Int[Array, "S G"], Int[Array, "S G"], Float[Array, "S G V"] | None]:
    """Sample a block left to right: `x_k ~ softmax(U_k + B_k(x_{k-1}))`, with `x_0` the anchor.

    A `jax.lax.scan` over the block that carries the previous token (and the RNN state); everything heavy, the backbone
    and the base logits, has been computed for all slots at once before it.

    Args:
        config: drafter.
        params: drafter parameters; only `markov_head` is read.
        base_logits: U, soft-cap included.
        hidden: backbone states h.
        anchors: anchor tokens.
        choose: draws tokens from logits.
        dtype: type of the head's products.

    Returns:
        Tokens, the previous token of every slot (`[anchor, tokens[:-1]]`), and the distributions drawn from (None when
        `choose` is deterministic).
    """
    steps = jnp.arange(base_logits.shape[1])
    if not config.markov_rank:
        tokens, probs = jax.vmap(choose, in_axes=(1, 0), out_axes=1)(base_logits, steps)
        return tokens, jnp.concatenate([anchors[:, None], tokens[:, :-1]], axis=1), probs
    assert params is not None
    head, weights = MarkovHead(config, dtype), params["markov_head"]
    # A padded draft vocabulary has rows the target never emits.
    table = weights["markov_w2"]["weight"][: base_logits.shape[-1]]

    def body(carry, slot):
        previous, state = carry
        logits, h, k = slot
        m, state = run(head, weights, previous, h, state, method="step")
        tokens, probs = choose(logits + product(m, table, dtype).astype(jnp.float32), k)
        return (tokens, state), (tokens, previous, probs)

    state = jnp.zeros((anchors.shape[0], config.markov_rank), dtype)
    slots = (base_logits.swapaxes(0, 1), hidden.swapaxes(0, 1), steps)
    _, (tokens, previous, probs) = jax.lax.scan(body, (anchors, state), slots)
    return tokens.T, previous.T, None if probs is None else probs.swapaxes(0, 1)
