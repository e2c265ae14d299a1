"""The device programs of decoding: admission, proposal, and steps over anchors, drafts and prompts.

All are pure functions of (parameters, state, inputs) with static shapes. The host picks shapes and reads reports; what
a request's text depends on (seed, settings, budget, stop tokens, lengths) lives on the device.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.config import DecoderConfig
from dspark_jax.draft.contract import DrafterFunctions
from dspark_jax.engine.state import Admission, Chunk, Draft, Limits, Memory, Report, Slots, Weights
from dspark_jax.nn.attention import DENSE, AttentionBackend, RaggedPlan, make_plan
from dspark_jax.sampling import request_keys
from dspark_jax.spec.calibration import accept_rates
from dspark_jax.spec.schedule import fill_capacity, greedy_lengths, survival
from dspark_jax.spec.verify import commit_tokens, confidence_cut, is_stop, leading, verify_rows
from dspark_jax.target.transformer import create_caches, forward_ragged
from dspark_jax.types import Proposal, RaggedTokens, Sampling, TargetFeatures

PolicyKind = Literal["none", "fixed", "threshold", "greedy", "scheduled"]


@struct.dataclass
class _Questions:
    """What the target's head is asked.

    Attributes:
        hidden: last hidden states, `[T, D]`.
        row_of: row of the anchor and of each draft token of a slot; out of range where there is none.
        row_slots: slot of each row.
        positions: position of each slot's first row here.
        lengths: tokens run, the prompts' included, before anything is accepted.
        judged: slots that get a token.
    """

    hidden: Float[Array, "T D"]
    row_of: Int[Array, "S Q"]
    row_slots: Int[Array, "T"]
    positions: Int[Array, "S"]
    lengths: Int[Array, "S"]
    judged: Bool[Array, "S"]


@dataclasses.dataclass(frozen=True)
class Steps:
    """The programs of one target, drafter and policy; hashable, so that compiled programs can be kept by it.

    Attributes:
        target: the target's shape.
        drafter: the drafter's functions; None for plain decoding.
        dtype: type of the target's products and caches.
        slots: S.
        max_length: cache positions a slot.
        context: tokens of prompt and response together that a request may reach.
        policy: how much of a block is verified.
        limit: draft tokens verified at most.
        block_size: draft tokens drafted.
        attention: what the target's caches are and how it attends over them.
    """

    target: DecoderConfig
    drafter: DrafterFunctions | None
    dtype: Any
    slots: int
    max_length: int
    context: int
    policy: PolicyKind
    limit: int
    block_size: int
    attention: AttentionBackend = DENSE

    def init(self, vocab_size: int, num_stops: int) -> tuple[Slots, Memory]:
        """Empty slots."""
        zeros = jnp.zeros((self.slots,), jnp.int32)
        sampling = Sampling(
            temperature=zeros.astype(jnp.float32),
            top_k=zeros + vocab_size,
            top_p=jnp.ones((self.slots,), jnp.float32),
            min_p=zeros.astype(jnp.float32),
        )
        slots = Slots(
            keys=request_keys(zeros.astype(jnp.uint32)),
            sampling=sampling,
            stop_ids=jnp.full((self.slots, num_stops), -1, jnp.int32),
            budgets=zeros,
            lengths=zeros,
            anchors=zeros,
            emitted=zeros,
            done=jnp.ones((self.slots,), bool),
        )
        caches = create_caches(self.target, self.slots, self.max_length, self.dtype, self.attention)
        draft = None if self.drafter is None else self.drafter.init(self.slots, self.max_length)
        return slots, Memory(caches, draft)

    def admit(self, slots: Slots, request: Admission) -> Slots:
        """Put a request into a slot. Its prompt comes in chunks; until it is through, no round runs here."""
        at, sampling = request.slot, slots.sampling
        return dataclasses.replace(
            slots,
            keys=slots.keys.at[at].set(request_keys(request.seed[None])[0]),
            sampling=dataclasses.replace(
                sampling,
                temperature=sampling.temperature.at[at].set(request.temperature),
                top_k=sampling.top_k.at[at].set(request.top_k),
                top_p=sampling.top_p.at[at].set(request.top_p),
                min_p=sampling.min_p.at[at].set(request.min_p),
            ),
            stop_ids=slots.stop_ids.at[at].set(request.stop_ids),
            budgets=slots.budgets.at[at].set(request.budget),
            lengths=slots.lengths.at[at].set(0),
            anchors=slots.anchors.at[at].set(0),
            emitted=slots.emitted.at[at].set(0),
            done=slots.done.at[at].set(True),
        )

    def end(self, slots: Slots, slot: Int[Array, ""]) -> Slots:
        """Stop the request in a slot (cancellation)."""
        return dataclasses.replace(slots, done=slots.done.at[slot].set(True))

    def propose(self, weights: Weights, slots: Slots, memory: Memory, limits: Limits) -> tuple[Memory, Draft]:
        """Draft a block in every running slot and decide how much of it is verified.

        The decision sees confidences, which look at earlier tokens of the block only, never at the token it admits; of
        this round's confidences `scheduled` uses their order alone (SPEC §9).
        """
        assert self.drafter is not None
        active = ~slots.done
        state, proposal = self.drafter.propose(
            weights.draft,
            weights.tables,
            memory.draft,
            slots.anchors,
            slots.lengths,
            active,
            slots.keys,
            slots.sampling,
            self.block_size,
        )
        keep = jnp.minimum(proposal.num_valid, self.limit)
        if self.drafter.stops_early:
            keep = jnp.minimum(keep, leading(~is_stop(proposal.tokens, slots.stop_ids)) + 1)
        keep = jnp.where(active, keep, 0).astype(jnp.int32)
        confidence, alive = proposal.confidence_logits, None
        if confidence is not None:
            alive = survival(confidence, keep, active)
            if self.policy == "threshold":
                keep = jnp.minimum(keep, confidence_cut(confidence, limits.threshold))
            if self.policy == "greedy":
                keep = jnp.minimum(keep, greedy_lengths(alive, active, limits.seconds))
            if self.policy == "scheduled":
                keep = fill_capacity(alive, keep, active, limits.capacity)
        return dataclasses.replace(memory, draft=state), Draft(proposal, keep.astype(jnp.int32), alive)

    def step(
        self,
        weights: Weights,
        slots: Slots,
        memory: Memory,
        draft: Draft | None,
        chunk: Chunk | None,
        *,
        rows: int,
        diagnostics: bool = False,
    ) -> tuple[Slots, Memory, Report]:
        """Run anchors, kept drafts and parts of prompts through the target at once; verify, commit, extend the drafter.

        Args:
            weights, slots, memory: as everywhere.
            draft: what `propose` gave for the same state; None for plain decoding and for `rows` = 0.
            chunk: parts of prompts; None for none.
            rows: rows for anchors and drafts (static); 0 runs the chunk alone. A slot whose rows do not fit waits.
            diagnostics: report analytic accept rates of the drafts too (static), for one more pass over the vocabulary.
        """
        decode, row_of, active, proposal = self._decode_rows(slots, self._kept(draft, rows), rows)
        plan = self._plan(decode, chunk, proposal.tokens.shape[1] + 1)
        taps = () if self.drafter is None else self.drafter.tap_ids
        features, caches = forward_ragged(
            self.target, weights.target, weights.tables, memory.caches, plan, taps, self.dtype, self.attention
        )
        ask = self._questions(slots, decode, row_of, active, features, chunk)
        logits = weights.tables.logits(ask.hidden, self.dtype)
        result = verify_rows(
            logits,
            ask.row_of,
            ask.row_slots,
            proposal,
            proposal.num_valid,
            ask.positions,
            slots.keys,
            slots.sampling,
            slots.stop_ids,
            ask.judged,
        )
        # Room counts the tokens that may follow: the last one committed may sit at context - 1.
        room = self.context - 1 - ask.positions
        commit = commit_tokens(result, proposal, slots.budgets - slots.emitted, room, slots.stop_ids, ask.judged)
        lengths = jnp.where(active, slots.lengths + 1 + result.num_accepted, ask.lengths)
        state = memory.draft
        if self.drafter is not None:
            following = self._following(decode, proposal, result, slots, chunk)
            state = self.drafter.extend(weights.draft, weights.tables, state, plan, features, following, lengths)
        gaps = jnp.take(top2_gap(logits), ask.row_of, mode="fill", fill_value=jnp.inf)
        gaps = jnp.where(jnp.arange(gaps.shape[1]) < commit.count[:, None], gaps, jnp.inf)
        rates = None
        if diagnostics:
            rates = accept_rates(jnp.take(logits, ask.row_of, axis=0, mode="clip"), proposal, slots.sampling)
        report = Report(
            tokens=commit.tokens,
            count=commit.count,
            reason=commit.reason,
            proposed=jnp.where(active, proposal.num_valid, 0),
            accepted=result.num_accepted,
            accepted_raw=result.num_accepted_raw,
            stopped=result.stopped,
            top2_gap=jnp.min(gaps, axis=1),
            confidence=None if draft is None else draft.proposal.confidence_logits,
            survival=None if draft is None else draft.survival,
            accept_rates=rates,
        )
        slots = dataclasses.replace(
            slots,
            lengths=lengths,
            anchors=jnp.where(ask.judged, result.next_token, slots.anchors),
            emitted=slots.emitted + commit.count,
            done=jnp.where(ask.judged, commit.done, slots.done),
        )
        return slots, Memory(caches, state), report

    def _kept(self, draft: Draft | None, rows: int) -> Proposal:
        """The part of the drafts that may be verified: no slot has more rows than there are."""
        if draft is None:
            return Proposal(jnp.zeros((self.slots, 0), jnp.int32), None, None, jnp.zeros((self.slots,), jnp.int32))
        proposal, limit = draft.proposal, min(self.limit, max(rows - 1, 0))
        return Proposal(
            tokens=proposal.tokens[:, :limit],
            probs=None if proposal.probs is None else proposal.probs[:, :limit],
            confidence_logits=None,
            num_valid=draft.keep,
        )

    def _questions(
        self,
        slots: Slots,
        decode: RaggedTokens,
        row_of: Int[Array, "S Q"],
        active: Bool[Array, "S"],
        features: TargetFeatures,
        chunk: Chunk | None,
    ) -> _Questions:
        """Which rows the head is asked about: all that decode, and of a chunk only the last of each segment.

        Where a prompt ends, it joins as a block without drafts, in that prompt's slot.
        """
        hidden, rows = features.last_hidden, decode.slots.shape[0]
        assert hidden is not None  # the target always gives it
        if chunk is None:
            return _Questions(hidden, row_of, decode.slots, slots.lengths, slots.lengths, active)
        segments, width = chunk.tokens.shape
        segment = jnp.arange(segments, dtype=jnp.int32)
        last, ending = chunk.starts + chunk.counts - 1, jnp.where(chunk.ends, chunk.slots, self.slots)
        last_rows = jnp.take(hidden, rows + segment * width + chunk.counts - 1, axis=0, mode="clip")
        return _Questions(
            hidden=jnp.concatenate([hidden[:rows], last_rows]),
            row_of=row_of.at[ending, 0].set(rows + segment, mode="drop"),
            row_slots=jnp.concatenate([decode.slots, ending]),
            positions=slots.lengths.at[ending].set(last, mode="drop"),
            lengths=slots.lengths.at[chunk.slots].max(last + 1, mode="drop"),
            judged=active.at[ending].set(True, mode="drop"),
        )

    def _decode_rows(
        self, slots: Slots, proposal: Proposal, rows: int
    ) -> tuple[RaggedTokens, Int[Array, "S Q"], Bool[Array, "S"], Proposal]:
        """Lay anchors and kept drafts side by side; returns rows, row of each token, who takes part, and the proposal.

        Example, anchors (11, 40), drafts (-; 41, 42) kept, 5 rows: tokens 11 40 41 42 and padding; row_of [[0, ., .],
        [1, 2, 3]].
        """
        wanted = jnp.where(slots.done, 0, proposal.num_valid + 1)
        ends = jnp.cumsum(wanted)
        starts = ends - wanted
        counts = jnp.clip(rows - starts, 0, wanted)
        row, q = jnp.arange(rows, dtype=jnp.int32), jnp.arange(proposal.tokens.shape[1] + 1, dtype=jnp.int32)
        owner = jnp.searchsorted(ends, row, side="right").astype(jnp.int32)
        offset = row - jnp.take(starts, owner, mode="clip")
        block = jnp.concatenate([slots.anchors[:, None], proposal.tokens], axis=1)
        decode = RaggedTokens(
            tokens=block.at[owner, offset].get(mode="fill", fill_value=0).astype(jnp.int32),
            slots=owner,
            positions=jnp.where(owner < self.slots, jnp.take(slots.lengths, owner, mode="clip") + offset, 0),
        )
        row_of = jnp.where(q < counts[:, None], starts[:, None] + q, jnp.iinfo(jnp.int32).max)
        return decode, row_of, counts > 0, dataclasses.replace(proposal, num_valid=jnp.maximum(counts - 1, 0))

    def _plan(self, decode: RaggedTokens, chunk: Chunk | None, depth: int) -> RaggedPlan:
        if chunk is None:
            return make_plan(decode, self.slots, depth)
        q = jnp.arange(chunk.tokens.shape[1], dtype=jnp.int32)
        slots = jnp.where(q < chunk.counts[:, None], chunk.slots[:, None], self.slots)
        batch = RaggedTokens(
            tokens=jnp.concatenate([decode.tokens, chunk.tokens.ravel()]),
            slots=jnp.concatenate([decode.slots, slots.ravel()]),
            positions=jnp.concatenate([decode.positions, (chunk.starts[:, None] + q).ravel()]),
        )
        return make_plan(batch, self.slots, depth, segments=(chunk.tokens.shape[0], q.shape[0]))

    def _following(self, decode: RaggedTokens, proposal, result, slots: Slots, chunk: Chunk | None) -> Int[Array, "T"]:
        """The committed token after each row (anything after rows that do not count)."""
        drafts = jnp.pad(proposal.tokens, ((0, 0), (0, 1)))
        after = jnp.where(
            jnp.arange(drafts.shape[1]) < result.num_accepted[:, None], drafts, result.next_token[:, None]
        )
        offset = decode.positions - jnp.take(slots.lengths, decode.slots, mode="clip")
        following = after.at[decode.slots, offset].get(mode="fill", fill_value=0)
        if chunk is None:
            return following
        at_end = chunk.ends[:, None] & (jnp.arange(chunk.tokens.shape[1]) == chunk.counts[:, None] - 1)
        drawn = jnp.take(result.next_token, chunk.slots, mode="clip")
        return jnp.concatenate([following, jnp.where(at_end, drawn[:, None], chunk.following).ravel()])


def top2_gap(logits: Float[Array, "*rows V"]) -> Float[Array, "*rows"]:
    """Gap of the two largest logits."""
    best = jnp.max(logits, axis=-1)
    at = jnp.argmax(logits, axis=-1)
    rest = jnp.where(jnp.arange(logits.shape[-1]) == at[..., None], -jnp.inf, logits)
    return best - jnp.max(rest, axis=-1)
