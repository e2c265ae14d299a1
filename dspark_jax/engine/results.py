"""What generation and the engine return."""

from __future__ import annotations

import dataclasses
from typing import Literal

FinishName = Literal["stop", "length", "context", "cancelled"]


@dataclasses.dataclass(frozen=True)
class Round:
    """One decoding round of one request.

    Attributes:
        proposed: draft tokens verified, l_r.
        accepted: draft tokens accepted, cut at the first accepted stop token.
        accepted_raw: the same before that cut.
        emitted: tokens that entered the output, cut at stop tokens and at the token budget.
        stopped: a stop token was accepted inside the draft prefix, so no token of the target's own follows.
        confidences: predicted accept rates c_1..c_G of the whole block; None for drafters without the head.
        top2_gap: smallest gap between the two largest target logits of the emitted rows; how close to a tie a greedy
            choice was.
        confidence_logits: logits of `confidences` as the drafter gave them (a probability near 1 has lost digits of
            its logit); recorded with `diagnostics` only.
        accept_rates: analytic accept rate of each verified position, the chance of accepting a token drawn from the
            draft distribution there; recorded with `diagnostics` only.
    """

    proposed: int
    accepted: int
    accepted_raw: int
    emitted: int
    stopped: bool
    confidences: tuple[float, ...] | None
    top2_gap: float
    confidence_logits: tuple[float, ...] | None = None
    accept_rates: tuple[float, ...] | None = None

    @property
    def accepted_length(self) -> int:
        """Raw accepted length, the paper's tau: accepted drafts plus the target's own token where there is one."""
        return self.accepted + (0 if self.stopped else 1)


@dataclasses.dataclass(frozen=True)
class Timings:
    """Wall-clock seconds of the batch a request ran in (shared by its neighbours), compilation excluded.

    Attributes:
        prefill: running the prompts and drawing the first tokens.
        decode: all rounds.
        compile: warming up programs that were new.
        rounds: number of rounds the batch ran.
    """

    prefill: float
    decode: float
    compile: float
    rounds: int


@dataclasses.dataclass(frozen=True)
class Generation:
    """The result for one prompt.

    Attributes:
        prompt: its token ids.
        tokens: generated ids, a final stop token included.
        finish_reason: "stop", "length" (max_new_tokens), "context" (no room is left) or "cancelled".
        rounds: what happened, round by round; the first token comes from the prompt's prefill, before any round.
        first_top2_gap: as `Round.top2_gap`, for that first token.
        timings: of the batch it ran in.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    finish_reason: FinishName
    rounds: tuple[Round, ...]
    first_top2_gap: float
    timings: Timings


@dataclasses.dataclass(frozen=True)
class Committed:
    """Tokens of one request that became final in a step.

    Attributes:
        request: its id.
        tokens: token ids; empty for a request that ended without any (`max_new_tokens` = 0, cancelled).
        finish_reason: None while the request goes on.
    """

    request: int
    tokens: tuple[int, ...]
    finish_reason: FinishName | None


@dataclasses.dataclass
class Statistics:
    """Sums over steps.

    Attributes:
        steps: steps dispatched.
        rows: rows the target ran, padding included.
        real_rows: those that carried an anchor, a draft or a prompt token.
        drafts: draft tokens verified.
        accepted: draft tokens accepted.
        tokens: tokens committed.
        verify_budget: rows of anchors and drafts, over steps that had any.
        verify_steps: steps that had any.
        prompt_steps: steps that carried a prompt chunk.
        plan_seconds: host time of planning and dispatching.
        wait_seconds: host time spent waiting for a report (or, where a policy asks for it, for confidences).
    """

    steps: int = 0
    rows: int = 0
    real_rows: int = 0
    drafts: int = 0
    accepted: int = 0
    tokens: int = 0
    verify_budget: int = 0
    verify_steps: int = 0
    prompt_steps: int = 0
    plan_seconds: float = 0.0
    wait_seconds: float = 0.0

    @property
    def padding(self) -> float:
        """Share of rows that carried nothing."""
        return 1 - self.real_rows / self.rows if self.rows else 0.0
