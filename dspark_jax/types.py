"""Values that cross package borders, and the dimension letters of every shape annotation.

Dimension letters: B rows or requests, L context length, A anchors per row, G block size (gamma), D model width,
N/K query/KV heads, H head width, F tapped layers, R Markov rank, V vocabulary, Vd what of it a drafter drafts, S cache
slots, C cache length, T ragged rows (tokens of a batch), Q ragged rows per slot.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.products import float32_product

Params = dict[str, Any]
"""Nested dict of parameters; the path `layers_0/self_attn/q_proj/weight` is the checkpoint name with dots."""


@struct.dataclass
class TargetTables:
    """The target's own embedding and output head, handed to drafters as arguments and never copied.

    Attributes:
        embed: token embeddings, `[V, D]`.
        head: output head, `[V, D]`; the same array as `embed` where the target ties them.
        embed_scale: factor on looked-up embeddings (1 except in Gemma).
        soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`; None in most families.
    """

    embed: Float[Array, "V D"]
    head: Float[Array, "V D"]
    embed_scale: float = struct.field(pytree_node=False, default=1.0)
    soft_cap: float | None = struct.field(pytree_node=False, default=None)

    def embed_tokens(self, tokens: Int[Array, "..."], dtype: Any = jnp.float32) -> Float[Array, "... D"]:
        """Look up embeddings. Ids outside the table give NaN rather than a wrong row (checked on the host before)."""
        rows = jnp.take(self.embed, tokens, axis=0, mode="fill", fill_value=jnp.nan).astype(dtype)
        return rows if self.embed_scale == 1.0 else rows * jnp.asarray(self.embed_scale, dtype)

    def logits(self, hidden: Float[Array, "... D"], dtype: Any = jnp.float32) -> Float[Array, "... V"]:
        """Post-norm hidden states to float32 logits, soft-cap included; the product runs in `dtype`."""
        return soft_capped(float32_product(hidden.astype(dtype), self.head.astype(dtype)), self.soft_cap)


def soft_capped(logits: Float[Array, "..."], soft_cap: float | None) -> Float[Array, "..."]:
    """Return `soft_cap * tanh(logits / soft_cap)`; without a cap the logits."""
    return logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)


@struct.dataclass
class TargetFeatures:
    """What drafters see of the target, for the same leading axes as the tokens it was computed from.

    Attributes:
        taps: raw outputs of the tapped layers concatenated on the feature axis, `[..., F*D]`.
        last_hidden: output of the final norm, `[..., D]`.
    """

    taps: Float[Array, "... FD"] | None = None
    last_hidden: Float[Array, "... D"] | None = None


@struct.dataclass
class RaggedTokens:
    """Tokens of many cache slots in one flat batch: decoding, verification and prompt chunks are all this.

    Rows of a slot are contiguous and their positions consecutive. Padding rows come last, carry `slots == S`
    (out of range) and neither write nor read anything.

    Example, two slots (S = 2), slot 1 verifying two draft tokens, one padding row:
        tokens    = [11, 40, 41, 42, 0]
        slots     = [ 0,  1,  1,  1, 2]
        positions = [ 7,  3,  4,  5, 0]
    """

    tokens: Int[Array, "T"]
    slots: Int[Array, "T"]
    positions: Int[Array, "T"]


@struct.dataclass
class Proposal:
    """One drafted block per slot.

    Attributes:
        tokens: draft tokens x_1..x_G, `[S, G]`.
        probs: the distribution each token was drawn from (after every sampling transform), `[S, G, V]`;
            None means the tokens are deterministic (one-hot q).
        confidence_logits: `[S, G]` logit of the predicted accept rate; None for drafters without the head.
        num_valid: number of leading tokens that may be verified, `[S]` (a drafter that met a stop token stops early).
    """

    tokens: Int[Array, "S G"]
    probs: Float[Array, "S G V"] | None
    confidence_logits: Float[Array, "S G"] | None
    num_valid: Int[Array, "S"]


@struct.dataclass
class Sampling:
    """Per-request sampling settings; absent filters are neutral values (`top_k = V`, `top_p = 1`, `min_p = 0`).

    Attributes:
        temperature: `[S]`; below 1e-5 means greedy.
        top_k, top_p, min_p: `[S]` filters, applied after the temperature in this order.
        mode: static: "greedy" (every row greedy), "plain" (temperatures only) or "filtered" (any filter active).
    """

    temperature: Float[Array, "S"]
    top_k: Int[Array, "S"]
    top_p: Float[Array, "S"]
    min_p: Float[Array, "S"]
    mode: str = struct.field(pytree_node=False, default="greedy")


@struct.dataclass
class Verification:
    """Outcome of one verified block per slot.

    Attributes:
        num_accepted: accepted draft tokens, cut at the first accepted stop token, `[S]`.
        num_accepted_raw: the same before that cut, `[S]`.
        next_token: the target's own token (correction or bonus), `[S]`; meaningless where `stopped`.
        stopped: a stop token was accepted inside the draft prefix, `[S]`.
    """

    num_accepted: Int[Array, "S"]
    num_accepted_raw: Int[Array, "S"]
    next_token: Int[Array, "S"]
    stopped: Bool[Array, "S"]


def tree_bytes(tree: Any) -> int:
    """Bytes held by the arrays of a pytree (shared arrays counted once)."""
    leaves = {id(x): x for x in jax.tree.leaves(tree) if hasattr(x, "nbytes")}
    return sum(int(x.nbytes) for x in leaves.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """How conversations become text, the same for training and evaluation.

    Attributes:
        system_prompt: put in front of conversations that bring no system message; None leaves it to the template.
        supervise_trailing_newline: whether the whitespace that a template puts after the end-of-turn token counts.
        supervise_template_additions: whether what the template puts between the assistant header and the answer (an
            empty think block) counts as answer.
        assistant_prefix: put in front of assistant texts that lack it, never supervised (Gemma's empty thought
            channel); evaluation prompts get it too.
        template_kwargs: further variables for the template, such as `enable_thinking False`.
    """

    system_prompt: str | None = None
    supervise_trailing_newline: bool = False
    supervise_template_additions: bool = False
    assistant_prefix: str | None = None
    template_kwargs: Mapping[str, bool | int | str] = dataclasses.field(default_factory=dict)
