"""What the device programs take and give: weights, slots, their memory, requests and their prompts, drafts, reports."""

from __future__ import annotations

from typing import Any

from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

from dspark_jax.types import Params, Proposal, Sampling, TargetTables


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
class Slots:
    """The small part of the state: whose request sits in each slot, and how far it is.

    Attributes:
        keys: one key a request.
        sampling: sampling settings.
        stop_ids: stop tokens, padded with -1.
        budgets: `max_new_tokens`.
        lengths: tokens run through the target and kept, which is the anchor's position, `[S]`.
        anchors: last committed token of each slot, not yet run.
        emitted: tokens emitted so far.
        done: no round runs here: the slot is empty, its prompt is not through, or its request has ended.
    """

    keys: Key[Array, "S"]
    sampling: Sampling
    stop_ids: Int[Array, "S E"]
    budgets: Int[Array, "S"]
    lengths: Int[Array, "S"]
    anchors: Int[Array, "S"]
    emitted: Int[Array, "S"]
    done: Bool[Array, "S"]


@struct.dataclass
class Memory:
    """The large part of the state, donated and updated in place.

    Attributes:
        caches: the target's caches, one a layer, of its attention backend.
        draft: the drafter's state; None for plain decoding.
    """

    caches: tuple[Any, ...]
    draft: Any


@struct.dataclass
class Admission:
    """A request for a slot; scalars, and `stop_ids` `[E]`."""

    slot: Int[Array, ""]
    seed: Int[Array, ""]
    temperature: Float[Array, ""]
    top_k: Int[Array, ""]
    top_p: Float[Array, ""]
    min_p: Float[Array, ""]
    stop_ids: Int[Array, "E"]
    budget: Int[Array, ""]


@struct.dataclass
class Chunk:
    """The next parts of waiting prompts, in segments of one width; those of one prompt stand in order.

    Attributes:
        tokens: prompt tokens, `[n, W]`; all segments of a prompt are full but its last.
        following: the prompt token after each: a drafter may pair each token's features with the token that follows,
            also where the next segment begins.
        slots: whose prompt a segment is of, `[n]`; S for nobody's.
        starts: position of each segment's first token.
        counts: tokens of each segment.
        ends: segments that their prompt ends with, so the first token of the response is drawn.
    """

    tokens: Int[Array, "n W"]
    following: Int[Array, "n W"]
    slots: Int[Array, "n"]
    starts: Int[Array, "n"]
    counts: Int[Array, "n"]
    ends: Bool[Array, "n"]


@struct.dataclass
class Draft:
    """A proposal and what the policy made of it.

    Attributes:
        proposal: the drafted blocks.
        keep: drafts to verify of each slot.
        survival: probability that each draft token is reached and accepted, `[S, G]`; None without a confidence head.
    """

    proposal: Proposal
    keep: Int[Array, "S"]
    survival: Float[Array, "S G"] | None


@struct.dataclass
class Limits:
    """What a policy knows when the block is drafted; traced, so that no value of it is a shape.

    Attributes:
        threshold: `threshold`: accept rate below which a block is cut.
        capacity: `scheduled`: rows the step may run, anchors included; chosen from survival two steps old.
        seconds: `greedy`: seconds of a step over 0, 1, 2, ... rows.
    """

    threshold: Float[Array, ""]
    capacity: Int[Array, ""]
    seconds: Float[Array, "B1"]


@struct.dataclass
class Report:
    """What the host reads of a step.

    Attributes:
        tokens: committed tokens, left-aligned, `[S, W]`.
        count: how many, `[S]`.
        reason: why the request has ended (`FinishReason`), UNFINISHED while it runs.
        proposed, accepted, accepted_raw, stopped: of the step's verification.
        top2_gap: smallest gap of the two largest target logits over the rows that decided a committed token.
        confidence: confidence logits of the whole block, `[S, G]`; None without the head.
        survival: of the whole block; None without a confidence head.
        accept_rates: analytic accept rate of each draft token, meaningless where it was not verified; None unless asked
            for.
    """

    tokens: Int[Array, "S W"]
    count: Int[Array, "S"]
    reason: Int[Array, "S"]
    proposed: Int[Array, "S"]
    accepted: Int[Array, "S"]
    accepted_raw: Int[Array, "S"]
    stopped: Bool[Array, "S"]
    top2_gap: Float[Array, "S"]
    confidence: Float[Array, "S G"] | None
    survival: Float[Array, "S G"] | None
    accept_rates: Float[Array, "S L"] | None
