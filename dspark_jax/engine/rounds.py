"""The device programs of decoding: prefill of a prompt chunk, proposal, and verify-commit-extend.

All are pure functions of (parameters, state, inputs) with static shapes; the host only picks shapes and reads reports.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

from dspark_jax.config import DecoderConfig
from dspark_jax.draft.contract import DrafterFunctions
from dspark_jax.nn.attention import KVCache, make_plan
from dspark_jax.spec.calibration import accept_rates
from dspark_jax.spec.verify import commit_tokens, confidence_cut, is_stop, leading, verify_block
from dspark_jax.target.transformer import create_caches, forward_ragged
from dspark_jax.types import Params, Proposal, RaggedTokens, Sampling, TargetTables


@struct.dataclass
class Weights:
    """Parameters of both models: arguments of every program, never closures.

    Attributes:
        target: decoder parameters of the target.
        tables: its embedding and head.
        draft: drafter parameters; None for plain decoding.
    """

    target: Params
    tables: TargetTables
    draft: Params | None


@struct.dataclass
class Requests:
    """Settings of the requests in the slots, fixed while they run.

    Attributes:
        keys: one key a request.
        sampling: sampling settings.
        stop_ids: stop tokens, padded with -1.
        prompt_lengths: tokens of the prompts.
        budgets: `max_new_tokens`.
        threshold: confidence below which a block is cut; 0 keeps everything.
    """

    keys: Key[Array, "S"]
    sampling: Sampling
    stop_ids: Int[Array, "S E"]
    prompt_lengths: Int[Array, "S"]
    budgets: Int[Array, "S"]
    threshold: Float[Array, ""]


@struct.dataclass
class DecodeState:
    """Everything a round changes.

    Attributes:
        caches: the target's caches, one a layer.
        draft: the drafter's state; None for plain decoding.
        lengths: tokens run through the target and kept, which is the anchor's position, `[S]`.
        anchors: last committed token of each slot, not yet run.
        emitted: tokens emitted so far.
        done: the request has ended (or the slot is empty).
    """

    caches: tuple[KVCache, ...]
    draft: Any
    lengths: Int[Array, "S"]
    anchors: Int[Array, "S"]
    emitted: Int[Array, "S"]
    done: Bool[Array, "S"]


@struct.dataclass
class Report:
    """What the host reads after a program.

    Attributes:
        tokens: committed tokens, left-aligned, `[S, W]`.
        count: how many, `[S]`.
        done, reason: the request has ended, and why (`FinishReason`).
        proposed, accepted, accepted_raw, stopped: of the round's verification.
        top2_gap: smallest gap of the two largest target logits over the rows that decided a committed token.
        accept_rates: analytic accept rate of each verified position; None unless asked for.
    """

    tokens: Int[Array, "S W"]
    count: Int[Array, "S"]
    done: Bool[Array, "S"]
    reason: Int[Array, "S"]
    proposed: Int[Array, "S"]
    accepted: Int[Array, "S"]
    accepted_raw: Int[Array, "S"]
    stopped: Bool[Array, "S"]
    top2_gap: Float[Array, "S"]
    accept_rates: Float[Array, "S G"] | None = None


@dataclasses.dataclass(frozen=True)
class Rounds:
    """The programs of one target and drafter; hashable, so that compiled programs can be kept by it.

    Attributes:
        target: the target's shape.
        drafter: the drafter's functions; None for plain decoding.
        dtype: type of the target's products and caches.
        max_length: cache positions a slot.
        context: the target's largest context.
    """

    target: DecoderConfig
    drafter: DrafterFunctions | None
    dtype: Any
    max_length: int
    context: int

    def init(self, requests: Requests) -> DecodeState:
        """Empty slots."""
        slots = requests.budgets.shape[0]
        zeros = jnp.zeros((slots,), jnp.int32)
        return DecodeState(
            caches=create_caches(self.target, slots, self.max_length, self.dtype),
            draft=None if self.drafter is None else self.drafter.init(slots, self.max_length),
            lengths=zeros,
            anchors=zeros,
            emitted=zeros,
            done=requests.budgets < 1,
        )

    def prefill(
        self,
        weights: Weights,
        requests: Requests,
        state: DecodeState,
        tokens: Int[Array, "S Q1"],
        counts: Int[Array, "S"],
    ) -> tuple[DecodeState, Report]:
        """Run the next chunk of every prompt; a slot whose prompt ends here draws its first token.

        Args:
            weights, requests, state: as everywhere.
            tokens: next prompt tokens of each slot, left-aligned, and the one after them: a drafter may pair each
                token's features with the token that follows, also where the next chunk begins.
            counts: how many are run, at most Q; 0 leaves a slot alone.
        """
        slots, width = tokens.shape[0], tokens.shape[1] - 1
        q = jnp.arange(width, dtype=jnp.int32)
        inside = (q < counts[:, None]) & ~state.done[:, None]
        batch = _rectangle(tokens[:, :-1], state.lengths, inside)
        plan = make_plan(batch, slots, width)
        features, caches = self._target(weights, state.caches, plan)
        counts = jnp.sum(inside, axis=1)
        lengths = state.lengths + counts
        ends = (counts > 0) & (lengths == requests.prompt_lengths)
        last = jnp.maximum(counts - 1, 0)
        hidden = features.last_hidden.reshape(slots, width, -1)[jnp.arange(slots), last]
        logits = weights.tables.logits(hidden, self.dtype)
        # A block without drafts: the first token is drawn, and ends a request, by the same rules as any other.
        empty = no_drafts(slots)
        result = verify_block(
            logits[:, None],
            empty,
            empty.num_valid,
            lengths - 1,
            requests.keys,
            requests.sampling,
            requests.stop_ids,
            ends,
        )
        first = result.next_token
        following = jnp.where((q == last[:, None]) & ends[:, None], first[:, None], tokens[:, 1:])
        draft = self._extend(weights, state.draft, plan, features, following, lengths)
        room = self.context - lengths
        commit = commit_tokens(result, empty, requests.budgets, room, requests.stop_ids, ends)
        done = state.done | commit.done
        state = DecodeState(
            caches, draft, lengths, jnp.where(ends, first, state.anchors), state.emitted + commit.count, done
        )
        return state, Report(
            tokens=commit.tokens,
            count=commit.count,
            done=done,
            reason=commit.reason,
            proposed=empty.num_valid,
            accepted=result.num_accepted,
            accepted_raw=result.num_accepted_raw,
            stopped=result.stopped,
            top2_gap=top2_gap(logits),
        )

    def propose(
        self, weights: Weights, requests: Requests, state: DecodeState, *, block_size: int
    ) -> tuple[DecodeState, Proposal, Int[Array, "S"]]:
        """Draft a block in every running slot; returns the state, the proposal and how much of it to verify."""
        assert self.drafter is not None
        draft, proposal = self.drafter.propose(
            weights.draft,
            weights.tables,
            state.draft,
            state.anchors,
            state.lengths,
            ~state.done,
            requests.keys,
            requests.sampling,
            block_size,
        )
        keep = proposal.num_valid
        if self.drafter.stops_early:
            keep = jnp.minimum(keep, leading(~is_stop(proposal.tokens, requests.stop_ids)) + 1)
        if proposal.confidence_logits is not None:
            keep = jnp.minimum(keep, confidence_cut(proposal.confidence_logits, requests.threshold))
        keep = jnp.where(state.done, 0, keep).astype(jnp.int32)
        return dataclasses.replace(state, draft=draft), proposal, keep

    def verify(
        self,
        weights: Weights,
        requests: Requests,
        state: DecodeState,
        proposal: Proposal | None,
        keep: Int[Array, "S"] | None,
        *,
        width: int,
        diagnostics: bool = False,
    ) -> tuple[DecodeState, Report]:
        """Verify anchors and the kept drafts, commit, and extend the drafter's context with the committed rows.

        Args:
            weights, requests, state: as everywhere.
            proposal: drafted blocks; None for plain decoding.
            keep: drafts to verify of each slot, at most `width - 1`.
            width: rows a slot (static): only these run through the target.
            diagnostics: also report the analytic accept rates (static), one more pass over the vocabulary.
        """
        slots = state.anchors.shape[0]
        if proposal is None:
            proposal = no_drafts(slots)
        keep = proposal.num_valid if keep is None else keep
        proposal = Proposal(
            tokens=proposal.tokens[:, : width - 1],
            probs=None if proposal.probs is None else proposal.probs[:, : width - 1],
            confidence_logits=None,
            num_valid=jnp.minimum(keep, width - 1),
        )
        tokens = jnp.concatenate([state.anchors[:, None], proposal.tokens], axis=1)
        inside = (jnp.arange(width) <= proposal.num_valid[:, None]) & ~state.done[:, None]
        plan = make_plan(_rectangle(tokens, state.lengths, inside), slots, width)
        features, caches = self._target(weights, state.caches, plan)
        logits = weights.tables.logits(features.last_hidden, self.dtype).reshape(slots, width, -1)
        active = ~state.done
        result = verify_block(
            logits,
            proposal,
            proposal.num_valid,
            state.lengths,
            requests.keys,
            requests.sampling,
            requests.stop_ids,
            active,
        )
        lengths = jnp.where(active, state.lengths + 1 + result.num_accepted, state.lengths)
        # Room counts the tokens that may follow: the anchor sits at state.lengths, the last position is context - 1.
        room = self.context - 1 - state.lengths
        commit = commit_tokens(result, proposal, requests.budgets - state.emitted, room, requests.stop_ids, active)
        row = jnp.arange(width)
        drafts = jnp.pad(proposal.tokens, ((0, 0), (0, 1)))
        following = jnp.where(row < result.num_accepted[:, None], drafts, result.next_token[:, None])
        draft = self._extend(weights, state.draft, plan, features, following, lengths)
        done = state.done | commit.done
        gaps = jnp.where(row < commit.count[:, None], top2_gap(logits), jnp.inf)
        report = Report(
            tokens=commit.tokens,
            count=commit.count,
            done=done,
            reason=commit.reason,
            proposed=proposal.num_valid,
            accepted=result.num_accepted,
            accepted_raw=result.num_accepted_raw,
            stopped=result.stopped,
            top2_gap=jnp.min(gaps, axis=1),
            accept_rates=accept_rates(logits, proposal, requests.sampling) if diagnostics else None,
        )
        anchors = jnp.where(active, result.next_token, state.anchors)
        return DecodeState(caches, draft, lengths, anchors, state.emitted + commit.count, done), report

    def _target(self, weights: Weights, caches, plan):
        taps = () if self.drafter is None else self.drafter.tap_ids
        return forward_ragged(self.target, weights.target, weights.tables, caches, plan, taps, self.dtype)

    def _extend(self, weights: Weights, draft, plan, features, following: Int[Array, "S W"], lengths: Int[Array, "S"]):
        if self.drafter is None:
            return None
        return self.drafter.extend(weights.draft, weights.tables, draft, plan, features, following.reshape(-1), lengths)


def _rectangle(tokens: Int[Array, "S W"], start: Int[Array, "S"], inside: Bool[Array, "S W"]) -> RaggedTokens:
    """Ragged rows of a rectangle; rows outside carry the out-of-range slot and touch nothing."""
    slots, width = tokens.shape
    positions = start[:, None] + jnp.arange(width, dtype=jnp.int32)
    slot = jnp.where(inside, jnp.arange(slots, dtype=jnp.int32)[:, None], slots)
    return RaggedTokens(tokens.reshape(-1).astype(jnp.int32), slot.reshape(-1), positions.reshape(-1))


def no_drafts(slots: int) -> Proposal:
    """The empty block: plain decoding, and the first token after a prompt."""
    return Proposal(jnp.zeros((slots, 0), jnp.int32), None, None, jnp.zeros((slots,), jnp.int32))


def top2_gap(logits: Float[Array, "*rows V"]) -> Float[Array, "*rows"]:
    """Gap of the two largest logits."""
    best = jnp.max(logits, axis=-1)
    at = jnp.argmax(logits, axis=-1)
    rest = jnp.where(jnp.arange(logits.shape[-1]) == at[..., None], -jnp.inf, logits)
    return best - jnp.max(rest, axis=-1)
