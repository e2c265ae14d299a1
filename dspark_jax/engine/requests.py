"""A request on the host: what was asked, checked before it can touch a slot, and what has come back so far."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np

from dspark_jax.data.chat import render_prompt
from dspark_jax.engine.results import FinishName, Generation, Round, Timings
from dspark_jax.engine.state import Report
from dspark_jax.sampling import make_sampling
from dspark_jax.spec.verify import FinishReason
from dspark_jax.target.loading import Target

Prompt = Sequence[int] | Sequence[Mapping[str, Any]]

MAX_STOP_TOKENS = 8
"""Stop tokens a request may have: their number is a shape."""

FINISH_NAMES: dict[FinishReason, FinishName] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CONTEXT: "context",
}


@dataclasses.dataclass
class Request:
    """One request and its output.

    Attributes:
        id: number in order of submission.
        prompt: token ids.
        budget: `max_new_tokens`.
        settings: temperature, top_k, top_p and min_p as device values of one slot, by name.
        mode: sampling mode it needs.
        seed: of its random draws.
        stop_ids: padded to `MAX_STOP_TOKENS`.
        cursor: prompt tokens handed to the device so far.
        pending: steps on their way that give it at least one token each.
        tokens, rounds, first_gap: what came back.
        finish_reason: None while it runs or waits.
        submitted, started, first, ended: `time.perf_counter()` of those moments; None before them.
    """

    id: int
    prompt: list[int]
    budget: int
    settings: dict[str, np.ndarray]
    mode: str
    seed: int
    stop_ids: np.ndarray
    cursor: int = 0
    pending: int = 0
    tokens: list[int] = dataclasses.field(default_factory=list)
    rounds: list[Round] = dataclasses.field(default_factory=list)
    first_gap: float = float("inf")
    finish_reason: FinishName | None = None
    submitted: float = dataclasses.field(default_factory=time.perf_counter)
    started: float | None = None
    first: float | None = None
    ended: float | None = None

    @property
    def prompt_done(self) -> bool:
        """All of the prompt has been handed to the device."""
        return self.cursor == len(self.prompt)

    @property
    def surely_ends(self) -> bool:
        """The steps on their way are enough for its budget, however little they accept."""
        return len(self.tokens) + self.pending >= self.budget

    def finish(self, reason: FinishName) -> None:
        """The request has ended."""
        self.finish_reason, self.ended = reason, time.perf_counter()

    def generation(self, timings: Timings) -> Generation:
        """The result of a request that has ended."""
        assert self.finish_reason is not None  # else it were no result
        return Generation(
            prompt=tuple(self.prompt),
            tokens=tuple(self.tokens),
            finish_reason=self.finish_reason,
            rounds=tuple(self.rounds),
            first_top2_gap=self.first_gap,
            timings=timings,
        )

    def take(self, report: Report, slot: int, first: bool) -> list[int]:
        """Append a step's report of this request's slot; returns the tokens it added."""
        count = int(report.count[slot])
        if not count:
            return []
        tokens = [int(t) for t in report.tokens[slot, :count]]
        self.tokens += tokens
        if first:
            self.first_gap, self.first = float(report.top2_gap[slot]), time.perf_counter()
        else:
            self.rounds.append(_round(report, slot))
        reason = FinishReason(int(report.reason[slot]))
        if reason != FinishReason.UNFINISHED:
            self.finish(FINISH_NAMES[reason])
        return tokens


def _round(report: Report, slot: int) -> Round:
    confidences = None
    if report.confidence is not None:
        probability = 1 / (1 + np.exp(-np.asarray(report.confidence[slot], np.float64)))
        confidences = tuple(float(p) for p in probability)
    proposed = int(report.proposed[slot])
    diagnostics: dict[str, tuple[float, ...]] = {}
    if report.accept_rates is not None:
        diagnostics["accept_rates"] = tuple(float(r) for r in report.accept_rates[slot, :proposed])
        if report.confidence is not None:
            diagnostics["confidence_logits"] = tuple(float(x) for x in report.confidence[slot])
    return Round(
        proposed=proposed,
        accepted=int(report.accepted[slot]),
        accepted_raw=int(report.accepted_raw[slot]),
        emitted=int(report.count[slot]),
        stopped=bool(report.stopped[slot]),
        confidences=confidences,
        top2_gap=float(report.top2_gap[slot]),
        **diagnostics,
    )


def check_request(
    target: Target,
    context: int,
    number: int,
    prompt: Prompt,
    *,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    seed: int,
    stop_token_ids: Sequence[int] | None,
) -> Request:
    """Check a request against target and cache.

    Args:
        target: gives vocabulary, template and default stop tokens.
        context: tokens of prompt and response together that a slot holds.
        number: its id, for messages.
        prompt: token ids or chat messages.
        max_new_tokens, temperature, top_k, top_p, min_p, seed, stop_token_ids: as in `generate`.

    Raises:
        ValueError: an empty prompt, a token outside the vocabulary, a prompt that leaves no room, or a setting out of
            range; the message names the request.
    """
    ids = token_ids(target, prompt, number)
    if len(ids) >= context:
        whole_context = context == target.config.max_position
        raise ValueError(
            f"prompt {number} has {len(ids)} tokens; {'the target' if whole_context else 'the engine'}'s context of "
            f"{context} leaves no room for an answer: shorten it"
            + ("" if whole_context else ", or give the engine a larger max_length")
        )
    stops = tuple(target.stop_token_ids if stop_token_ids is None else stop_token_ids)
    if len(stops) > MAX_STOP_TOKENS:
        raise ValueError(f"prompt {number} has {len(stops)} stop tokens: at most {MAX_STOP_TOKENS} are allowed")
    sampling = make_sampling(
        1,
        vocab_size=target.tables.embed.shape[0],
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
    )
    names = ("temperature", "top_k", "top_p", "min_p")
    settings = jax.device_get({name: getattr(sampling, name)[0] for name in names})
    return Request(
        id=number,
        prompt=ids,
        budget=whole("max_new_tokens", max_new_tokens, 0),
        settings=settings,
        mode=sampling.mode,
        seed=whole("seed", seed, 0),
        stop_ids=np.array([*stops, *[-1] * (MAX_STOP_TOKENS - len(stops))], np.int32),
    )


def token_ids(target: Target, prompt: Prompt, number: int) -> list[int]:
    """Token ids of a prompt, checked against the vocabulary.

    Raises:
        ValueError: text that is no conversation, an empty prompt, ids outside the table, or messages for a target
            without a tokenizer.
    """
    if isinstance(prompt, str):
        raise ValueError(
            f"prompt {number} is text: give a conversation, [{{'role': 'user', 'content': ...}}], or token ids"
        )
    if len(prompt) and isinstance(prompt[0], Mapping):
        if target.tokenizer is None:
            raise ValueError(
                f"prompt {number} holds chat messages, but target {target.name!r} came without a tokenizer"
            )
        text = render_prompt(target.tokenizer, cast(Sequence[Mapping[str, Any]], prompt), target.chat)
        ids = list(target.tokenizer(text, add_special_tokens=False)["input_ids"])
    else:
        ids = [int(t) for t in cast(Sequence[int], prompt)]
    rows = target.tables.embed.shape[0]
    if not ids:
        raise ValueError(f"prompt {number} is empty: give at least one token")
    if min(ids) < 0 or max(ids) >= rows:
        raise ValueError(
            f"prompt {number} holds token ids {min(ids)}..{max(ids)}; the target's table has rows 0..{rows - 1}"
        )
    return ids


def whole(name: str, value: Any, least: int) -> int:
    """A whole number of at least `least`.

    Raises:
        ValueError: anything else.
    """
    if isinstance(value, bool) or int(value) != value or value < least:
        raise ValueError(f"{name} is {value!r}: expected a whole number of at least {least}")
    return int(value)
