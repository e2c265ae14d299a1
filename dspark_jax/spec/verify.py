"""Verification: which draft tokens the target keeps, the token it adds, and what of that is committed.

Speculative sampling (SPEC §7). A draft token x drawn from q is accepted with probability min(1, p(x)/q(x)); the first
rejected one is replaced by a draw from norm(max(p - q, 0)) and ends the block; a block accepted whole is followed by a
bonus draw from the target's next row. The tokens so committed have exactly the target's distribution, whatever q is.
Nothing here knows a network: logits and proposals come in, tokens and counts go out.
"""

from __future__ import annotations

import enum
import math

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

from dspark_jax import sampling as sampling_rules
from dspark_jax.sampling import Purpose
from dspark_jax.types import Proposal, Sampling, Verification

RATIO_FLOOR = 1e-8
"""Draft probabilities below this count as this in the accept ratio, so that it never divides by zero."""


class FinishReason(enum.IntEnum):
    """Why a request ended; UNFINISHED while it runs."""

    UNFINISHED = 0
    STOP = 1
    LENGTH = 2
    CONTEXT = 3


@struct.dataclass
class Commit:
    """Tokens that one round adds to the output of each slot.

    Attributes:
        tokens: committed tokens, left-aligned, zeros after `count`, `[S, G+1]`.
        count: number of committed tokens, `[S]`; 0 for inactive slots.
        done: the request has ended with this round, `[S]`; false for inactive slots.
        reason: `FinishReason` codes, `[S]`.
    """

    tokens: Int[Array, "S G1"]
    count: Int[Array, "S"]
    done: Bool[Array, "S"]
    reason: Int[Array, "S"]


def accept_prefix(
    p: Float[Array, "*rows G"],
    q: Float[Array, "*rows G"],
    uniforms: Float[Array, "*rows G"],
    lengths: Int[Array, "*rows"],
) -> Int[Array, "*rows"]:
    """Count the draft tokens accepted before the first rejection.

    Args:
        p: target probability of each draft token.
        q: draft probability of each draft token; 1 for deterministic drafts.
        uniforms: in [0, 1); slot k is accepted iff u < min(1, p/q), strictly, so p = 0 never is. NaN rejects.
        lengths: number of leading slots that are verified at all.

    Returns:
        Accepted count, 0 to `lengths`.

    Example:
        p = [.5, .1, .9], q = [.5, .4, .3], u = [.9, .3, .0], lengths = 3: slot 0 has ratio 1 (kept), slot 1 has .25
        (rejected), slot 2 would pass but comes after it. The count is 1.
    """
    accepted = uniforms < jnp.minimum(1.0, p / jnp.maximum(q, RATIO_FLOOR))
    return leading(accepted & (jnp.arange(p.shape[-1]) < lengths[..., None]))


def leading(flags: Bool[Array, "*rows G"]) -> Int[Array, "*rows"]:
    """Count the true entries before the first false one: [True, True, False, True] gives 2."""
    return jnp.sum(jnp.cumprod(flags.astype(jnp.int32), axis=-1), axis=-1)


def is_stop(tokens: Int[Array, "S G"], stop_ids: Int[Array, "S E"]) -> Bool[Array, "S G"]:
    """Mark tokens that end their request. Unused entries of `stop_ids` hold an id no token has (-1)."""
    return jnp.any(tokens[:, :, None] == stop_ids[:, None, :], axis=-1)


def verify_block(
    target_logits: Float[Array, "S G1 V"],
    proposal: Proposal,
    lengths: Int[Array, "S"],
    anchor_positions: Int[Array, "S"],
    request_keys: Key[Array, "S"],
    sampling: Sampling,
    stop_ids: Int[Array, "S E"],
    active: Bool[Array, "S"],
) -> Verification:
    """Verify one block per slot; greedy and sampled slots may share the batch.

    Each slot's outcome depends on its own row alone. A greedy slot needs no case of its own in a mixed batch: its p is
    one-hot, so the ratio is at least 1 on the argmax and 0 elsewhere, and residual and bonus can only be the argmax.

    Args:
        target_logits: row k follows the anchor and the first k draft tokens; row 0 judges x_1, row l gives the bonus.
        proposal: the drafted block; `probs` None means deterministic drafts. Ignored by mode "greedy", which compares
            argmax and builds nothing over V.
        lengths: draft tokens verified this round, l_r in 0..G; cut to the proposal's `num_valid`.
        anchor_positions: position of each slot's anchor token; names the round's random draws.
        request_keys: from `sampling.request_keys`.
        sampling: settings per slot; they must be those the proposal was drawn with.
        stop_ids: tokens that end the request, padded with -1.
        active: slots that take part; the others return zeros.

    Returns:
        Counts and the target's own next token.
    """
    slots, width, vocab = target_logits.shape
    rows = jnp.arange(slots * width, dtype=jnp.int32).reshape(slots, width)
    return verify_rows(
        target_logits.reshape(slots * width, vocab),
        rows,
        jnp.repeat(jnp.arange(slots), width),
        proposal,
        lengths,
        anchor_positions,
        request_keys,
        sampling,
        stop_ids,
        active,
    )


def verify_rows(
    target_logits: Float[Array, "T V"],
    row_of: Int[Array, "S G1"],
    row_slots: Int[Array, "T"],
    proposal: Proposal,
    lengths: Int[Array, "S"],
    anchor_positions: Int[Array, "S"],
    request_keys: Key[Array, "S"],
    sampling: Sampling,
    stop_ids: Int[Array, "S E"],
    active: Bool[Array, "S"],
) -> Verification:
    """Verify blocks of different lengths whose target rows lie side by side, none of them padding inside a block.

    Args:
        target_logits: one row a token that ran through the target.
        row_of: row of the anchor and of each draft token of a slot; only the first `lengths + 1` are read.
        row_slots: slot of each row; out of range for padding.
        proposal, lengths, anchor_positions, request_keys, sampling, stop_ids, active: as in `verify_block`.

    Returns:
        As `verify_block`.
    """
    lengths = jnp.clip(jnp.minimum(lengths, proposal.num_valid), 0, proposal.tokens.shape[1])
    if sampling.mode == "greedy":
        best = jnp.argmax(target_logits, axis=-1).astype(jnp.int32)
        best = jnp.take(best, row_of, mode="fill", fill_value=0)
        matches = proposal.tokens == best[:, :-1]
        accepted = leading(matches & (jnp.arange(matches.shape[1]) < lengths[:, None]))
        next_token = jnp.take_along_axis(best, accepted[:, None], axis=1)[:, 0]
    else:
        by_row = jax.tree.map(lambda x: jnp.take(x, row_slots, mode="clip"), sampling)
        accepted, next_token = _verify_sampled(
            sampling_rules.probabilities(target_logits, by_row),
            row_of,
            proposal,
            lengths,
            anchor_positions,
            request_keys,
        )
    stops = is_stop(proposal.tokens, stop_ids) & (jnp.arange(proposal.tokens.shape[1]) < accepted[:, None])
    stopped = jnp.any(stops, axis=-1)
    until_stop = jnp.where(stopped, leading(~stops) + 1, accepted)
    return Verification(
        num_accepted=jnp.where(active, until_stop, 0).astype(jnp.int32),
        num_accepted_raw=jnp.where(active, accepted, 0).astype(jnp.int32),
        next_token=jnp.where(active, next_token, 0).astype(jnp.int32),
        stopped=stopped & active,
    )


def _verify_sampled(
    p: Float[Array, "T V"],
    row_of: Int[Array, "S G1"],
    proposal: Proposal,
    lengths: Int[Array, "S"],
    anchor_positions: Int[Array, "S"],
    request_keys: Key[Array, "S"],
) -> tuple[Int[Array, "S"], Int[Array, "S"]]:
    """Accept by the ratio, then draw the correction or the bonus token. Returns (accepted, next token)."""
    tokens = proposal.tokens
    p_token = p.at[row_of[:, :-1], tokens].get(mode="fill", fill_value=0)
    q_token = jnp.ones_like(p_token) if proposal.probs is None else _at(proposal.probs, tokens)
    slots = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    draws = sampling_rules.uniforms(request_keys, anchor_positions, Purpose.ACCEPT, slots)
    accepted = accept_prefix(p_token, q_token, draws, lengths)

    rejected = accepted < lengths
    p_next = jnp.take(p, jnp.take_along_axis(row_of, accepted[:, None], axis=1)[:, 0], axis=0, mode="clip")
    # Nothing was drawn against the bonus row: q = 0 leaves p.
    law = sampling_rules.residual(p_next, jnp.where(rejected[:, None], _draft_row(proposal, accepted, p_next), 0.0))
    purpose = jnp.where(rejected, Purpose.RESIDUAL, Purpose.BONUS)
    draw = sampling_rules.uniforms(request_keys, anchor_positions, purpose, accepted[:, None])[:, 0]
    return accepted, sampling_rules.sample(law, draw)


def next_token_rows(
    p: Float[Array, "S G1 V"], proposal: Proposal, accepted: Int[Array, "S"]
) -> tuple[Float[Array, "S V"], Float[Array, "S V"]]:
    """Pick target and draft distribution at the first slot that was not accepted.

    Args:
        p: target distributions.
        proposal: gives q, one-hot at the draft token where `probs` is None.
        accepted: row to pick; after a whole block the draft row is meaningless (the last one is returned).

    Returns:
        (p, q) rows over V.
    """
    p_row = jnp.take_along_axis(p, accepted[:, None, None], axis=1)[:, 0]
    return p_row, _draft_row(proposal, accepted, p_row)


def _draft_row(proposal: Proposal, accepted: Int[Array, "S"], p_row: Float[Array, "S V"]) -> Float[Array, "S V"]:
    """Draft distribution at the first slot that was not accepted, in the shape of the target's."""
    if proposal.tokens.shape[1] == 0:  # plain decoding: a block without drafts
        return jnp.zeros_like(p_row)
    slot = jnp.minimum(accepted, proposal.tokens.shape[1] - 1)[:, None]
    if proposal.probs is None:
        token = jnp.take_along_axis(proposal.tokens, slot, axis=1)
        return (token == jnp.arange(p_row.shape[-1])).astype(p_row.dtype)
    return jnp.take_along_axis(proposal.probs, slot[..., None], axis=1)[:, 0]


def _at(probs: Float[Array, "S G V"], tokens: Int[Array, "S G"]) -> Float[Array, "S G"]:
    """Probability of each token."""
    return jnp.take_along_axis(probs, tokens[..., None], axis=-1)[..., 0]


def confidence_cut(confidence_logits: Float[Array, "S G"], threshold: float | Float[Array, ""]) -> Int[Array, "S"]:
    """Verify only the prefix before the first doubtful draft token (SPEC §8, threshold mode).

    The offline diagnostic of the paper: no load, no cost model. Slot k is doubtful where not (sigmoid(logit_k) >=
    threshold), so a NaN cuts too and leaves the other rows alone.

    Args:
        confidence_logits: logits of the conditional accept rates c_k (not of their product).
        threshold: in [0, 1]; 0 keeps everything, c = 0 included. A traced value has been checked by its owner.

    Returns:
        Draft tokens to verify, 0..G.

    Raises:
        ValueError: threshold outside [0, 1], which would mean "keep nothing" or "keep all" without a word.

    Example:
        c = (.9, .8, .5) with threshold .6 keeps 2; c = (.9, 0, .8) with threshold .5 keeps 1.
    """
    if isinstance(threshold, (int, float)) and not (math.isfinite(threshold) and 0.0 <= threshold <= 1.0):
        raise ValueError(
            f"confidence threshold is {threshold}: expected a probability in [0, 1] (0 keeps every token)."
        )
    return leading(jax.nn.sigmoid(confidence_logits) >= threshold)


def commit_tokens(
    verification: Verification,
    proposal: Proposal,
    remaining: Int[Array, "S"],
    context_room: Int[Array, "S"],
    stop_ids: Int[Array, "S E"],
    active: Bool[Array, "S"],
) -> Commit:
    """Turn a verification into output tokens: cut at the first stop token and at the budgets.

    A stop token goes before the budget (FAULTS BR-26): if it is the last token the budget allows, the reason is STOP;
    if it lies beyond, it was never emitted and the reason is LENGTH. LENGTH goes before CONTEXT.

    Args:
        verification: outcome of `verify_block`.
        proposal: the block it verified.
        remaining: tokens the request may still emit (`max_new_tokens` minus those emitted).
        context_room: tokens that still fit into the context, the token after the last one not counted.
        stop_ids: as in `verify_block`.
        active: slots that take part.

    Returns:
        Left-aligned tokens, their count, and whether and why the request has ended.

    Example:
        drafts (4, 7, 9, 1, 2) all accepted, stop id 9, remaining 19: tokens (4, 7, 9, 0, 0, 0), count 3, STOP.
    """
    block_size = proposal.tokens.shape[1]
    accepted, index = verification.num_accepted[:, None], jnp.arange(block_size + 1)
    drafts = jnp.pad(proposal.tokens, ((0, 0), (0, 1)))
    tokens = jnp.where(index < accepted, drafts, verification.next_token[:, None])
    available = verification.num_accepted + jnp.where(verification.stopped, 0, 1)

    budget = jnp.maximum(jnp.minimum(remaining, context_room), 0)
    stops = is_stop(tokens, stop_ids) & (index < jnp.minimum(available, budget)[:, None])
    stopped = jnp.any(stops, axis=-1)
    count = jnp.where(stopped, leading(~stops) + 1, jnp.minimum(available, budget))
    reason = jnp.where(
        stopped,
        FinishReason.STOP,
        jnp.where(
            count >= remaining,
            FinishReason.LENGTH,
            jnp.where(count >= context_room, FinishReason.CONTEXT, FinishReason.UNFINISHED),
        ),
    )
    count, reason = jnp.where(active, count, 0), jnp.where(active, reason, FinishReason.UNFINISHED)
    return Commit(
        tokens=jnp.where(index < count[:, None], tokens, 0),
        count=count.astype(jnp.int32),
        done=reason != FinishReason.UNFINISHED,
        reason=reason.astype(jnp.int32),
    )
