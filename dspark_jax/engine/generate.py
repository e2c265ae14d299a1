"""Generation for any number of prompts over a fixed batch of slots."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax import buckets
from dspark_jax.draft.contract import Drafter
from dspark_jax.engine.programs import PROGRAMS
from dspark_jax.engine.requests import FINISH_NAMES, Prompt, token_ids, whole
from dspark_jax.engine.results import Generation, Round, Timings
from dspark_jax.engine.rounds import DecodeState, Report, Requests, Rounds, Weights
from dspark_jax.sampling import make_sampling, request_keys
from dspark_jax.spec.verify import FinishReason
from dspark_jax.target.loading import Target

PREFILL_LADDER = (16, 32, 64, 128, 256)
MAX_SLOTS = 16
_LENGTH_STEP = 128
_STOP_STEP = 4

PerPrompt = Any  # one value for all prompts, or a sequence with one a prompt


def generate(
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int | Sequence[int],
    temperature: float | Sequence[float] = 0.0,
    top_k: PerPrompt = None,
    top_p: PerPrompt = None,
    min_p: PerPrompt = None,
    seed: int | np.integer | Sequence[int] = 0,
    stop_token_ids: Sequence[int] | None = None,
    confidence_threshold: float = 0.0,
    block_size: int | None = None,
    batch_size: int | None = None,
    diagnostics: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Generation]:
    """Generate with speculative decoding; the output has the target's own distribution, whatever the drafter.

    Args:
        target: the model whose text this is.
        drafter: what proposes blocks; None decodes one token a round.
        prompts: token ids, or chat messages (`{"role", "content"}`) rendered by the target's template.
        max_new_tokens: exact limit of generated tokens, one for all or one a prompt.
        temperature: below 1e-5 decodes greedily; one for all or one a prompt, like the three filters.
        top_k, top_p, min_p: filters, applied after the temperature in this order; None is off.
        seed: prompt i uses `seed + i`, or its own entry of a sequence. Seeded text does not depend on the batch.
        stop_token_ids: tokens that end a response (kept in the output); None takes the target's own.
        confidence_threshold: verify a block only up to the first token whose predicted accept rate is below this.
        block_size: draft tokens a round; None takes the drafter's trained size.
        batch_size: slots of the fixed batch; prompts beyond it wait for the next batch. None: up to 16.
        diagnostics: record each round's confidence logits and analytic accept rates too, for one more pass over the
            vocabulary a round; the text stays the same.
        on_progress: called after every round with (tokens emitted so far, requests finished so far).

    Returns:
        One `Generation` a prompt, in order.

    Raises:
        ValueError: an empty prompt, a token id outside the vocabulary, a prompt that leaves no room in the context, or
            a setting out of range; the message names the prompt.
    """
    ids = [_prompt_ids(target, prompt, i) for i, prompt in enumerate(prompts)]
    budgets = [whole("max_new_tokens", x, 0) for x in _each("max_new_tokens", max_new_tokens, len(ids))]
    count = len(ids)
    seeds = [seed + i for i in range(count)] if isinstance(seed, (int, np.integer)) else _each("seed", seed, count)
    settings = {
        name: _each(name, value, len(ids))
        for name, value in (("temperature", temperature), ("top_k", top_k), ("top_p", top_p), ("min_p", min_p))
    }
    block = _block_size(drafter, block_size, confidence_threshold)
    stops = tuple(target.stop_token_ids if stop_token_ids is None else stop_token_ids)
    slots = min(len(ids), MAX_SLOTS) if batch_size is None else whole("batch_size", batch_size, 1)
    results: list[Generation] = []
    for start in range(0, len(ids), max(slots, 1)):
        part = slice(start, start + slots)
        batch = _Batch(
            target,
            drafter,
            ids[part],
            budgets[part],
            seeds[part],
            {name: values[part] for name, values in settings.items()},
            stops,
            slots,
            block,
            confidence_threshold,
            diagnostics,
        )
        done = (sum(len(r.tokens) for r in results), len(results))
        report = None if on_progress is None else functools.partial(_forward_progress, on_progress, *done)
        results += batch.run(report)
    return results


def _forward_progress(
    on_progress: Callable[[int, int], None], tokens: int, finished: int, more: int, ended: int
) -> None:
    on_progress(tokens + more, finished + ended)


class _Batch:
    """One fixed batch of requests from prompt to end; the host side of the rounds."""

    def __init__(self, target, drafter, prompts, budgets, seeds, settings, stops, slots, block, threshold, diagnostics):
        self.prompts, self.slots, self.block, self.threshold = prompts, slots, block, threshold
        self.diagnostics = diagnostics
        empty = slots - len(prompts)
        longest = max((len(p) + b for p, b in zip(prompts, budgets, strict=True)), default=1)
        # One block of junk may lie beyond the last kept position.
        length = min(longest, target.config.max_position) + block + 1
        self.rounds = Rounds(
            target=target.config,
            drafter=None if drafter is None else drafter.functions,
            dtype=target.dtype,
            max_length=-(-length // _LENGTH_STEP) * _LENGTH_STEP,
            context=target.config.max_position,
        )
        self.weights = Weights(target.params, target.tables, None if drafter is None else drafter.params)
        vocab = target.tables.embed.shape[0]
        pad = {"temperature": 0.0, "top_k": None, "top_p": None, "min_p": None}
        self.requests = Requests(
            keys=request_keys(jnp.asarray(np.array([*seeds, *[0] * empty], np.uint32))),
            sampling=make_sampling(
                slots, vocab_size=vocab, **{name: [*values, *[pad[name]] * empty] for name, values in settings.items()}
            ),
            # A few entries for everyone, so that the number of stop tokens is no shape of its own.
            stop_ids=jnp.tile(
                jnp.asarray([*stops, *[-1] * (-len(stops) % _STOP_STEP or _STOP_STEP)], jnp.int32), (slots, 1)
            ),
            prompt_lengths=jnp.asarray([*map(len, prompts), *[0] * empty], jnp.int32),
            budgets=jnp.asarray([*budgets, *[0] * empty], jnp.int32),
            threshold=jnp.float32(threshold),
        )
        self.compile_before = PROGRAMS.seconds
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.history: list[list[Round]] = [[] for _ in prompts]
        self.reasons = [FinishReason.LENGTH if b < 1 else FinishReason.UNFINISHED for b in budgets]
        self.first_gaps = [float("inf")] * len(prompts)

    def run(self, on_progress: Callable[[int, int], None] | None) -> list[Generation]:
        """Prefill, then rounds until every request has ended."""
        state = self._program("init", lambda requests: self.rounds.init(requests), (), self.requests)
        started = time.perf_counter()
        compiled = PROGRAMS.seconds
        state = self._prefill(state)
        prefill = time.perf_counter() - started - (PROGRAMS.seconds - compiled)
        started, compiled, count = time.perf_counter(), PROGRAMS.seconds, 0
        while any(r == FinishReason.UNFINISHED for r in self.reasons):
            state = self._round(state)
            count += 1
            if on_progress is not None:
                ended = sum(r != FinishReason.UNFINISHED for r in self.reasons)
                on_progress(sum(map(len, self.tokens)), ended)
        decode = time.perf_counter() - started - (PROGRAMS.seconds - compiled)
        timings = Timings(prefill=prefill, decode=decode, compile=PROGRAMS.seconds - self.compile_before, rounds=count)
        return [
            Generation(
                prompt=tuple(prompt),
                tokens=tuple(self.tokens[i]),
                finish_reason=FINISH_NAMES[self.reasons[i]],
                rounds=tuple(self.history[i]),
                first_top2_gap=self.first_gaps[i],
                timings=timings,
            )
            for i, prompt in enumerate(self.prompts)
        ]

    def _program(self, name: Any, function: Callable[..., Any], donate: tuple[int, ...], *args: Any) -> Any:
        return PROGRAMS.get((self.rounds, name), function, donate, *args)(*args)

    def _prefill(self, state: DecodeState) -> DecodeState:
        longest = max(map(len, self.prompts), default=0)
        begin = 0
        for chunk in buckets.cut(PREFILL_LADDER, longest):
            width = buckets.pick(PREFILL_LADDER, chunk, "prompt chunk")
            tokens, counts = np.zeros((self.slots, width + 1), np.int32), np.zeros(self.slots, np.int32)
            for i, prompt in enumerate(self.prompts):
                part = prompt[begin : begin + chunk + 1]
                tokens[i, : len(part)], counts[i] = part, min(len(part), chunk)
            begin += chunk
            state, report = self._program(
                "prefill", self.rounds.prefill, (2,), self.weights, self.requests, state, tokens, counts
            )
            self._record(jax.device_get(report), None, first=True)
        return state

    def _round(self, state: DecodeState) -> DecodeState:
        if self.rounds.drafter is None:
            verify = functools.partial(self.rounds.verify, width=1)
            state, report = self._program(("verify", 1), verify, (2,), self.weights, self.requests, state, None, None)
            self._record(jax.device_get(report), None)
            return state
        propose = functools.partial(self.rounds.propose, block_size=self.block)
        state, proposal, keep = self._program(
            ("propose", self.block), propose, (2,), self.weights, self.requests, state
        )
        # Where the width depends on this round's values, and only there, the host waits for them.
        width = self.block + 1
        if self.threshold > 0 or not self.rounds.drafter.fills_blocks:
            longest = int(np.max(jax.device_get(keep))) + 1
            width = buckets.pick(buckets.rungs(self.block + 1, first=1, ratio=1.5), longest, "verify width")
        verify = functools.partial(self.rounds.verify, width=width, diagnostics=self.diagnostics)
        confidence = proposal.confidence_logits
        state, report = self._program(
            ("verify", width, self.diagnostics), verify, (2,), self.weights, self.requests, state, proposal, keep
        )
        report, confidence = jax.device_get((report, confidence))
        self._record(report, confidence)
        return state

    def _record(self, report: Report, confidence: np.ndarray | None, first: bool = False) -> None:
        """Append one program's report to the requests that were running."""
        for i, reason in enumerate(self.reasons):
            if reason != FinishReason.UNFINISHED or (first and not report.count[i]):
                continue
            self.tokens[i] += [int(t) for t in report.tokens[i, : report.count[i]]]
            self.reasons[i] = FinishReason(int(report.reason[i]))
            if first:
                self.first_gaps[i] = float(report.top2_gap[i])
                continue
            extra = self._diagnostics(report, confidence, i) if self.diagnostics else {}
            probability = None if confidence is None else 1 / (1 + np.exp(-confidence[i].astype(np.float64)))
            self.history[i].append(
                Round(
                    proposed=int(report.proposed[i]),
                    accepted=int(report.accepted[i]),
                    accepted_raw=int(report.accepted_raw[i]),
                    emitted=int(report.count[i]),
                    stopped=bool(report.stopped[i]),
                    confidences=None if probability is None else tuple(float(p) for p in probability),
                    top2_gap=float(report.top2_gap[i]),
                    **extra,
                )
            )

    @staticmethod
    def _diagnostics(report: Report, confidence: np.ndarray | None, i: int) -> dict[str, tuple[float, ...]]:
        found = {"confidence_logits": None if confidence is None else confidence[i]}
        if report.accept_rates is not None:
            found["accept_rates"] = report.accept_rates[i, : report.proposed[i]]
        return {name: tuple(map(float, values)) for name, values in found.items() if values is not None}


def _prompt_ids(target: Target, prompt: Prompt, index: int) -> list[int]:
    ids = token_ids(target, prompt, index)
    if len(ids) >= target.config.max_position:
        raise ValueError(
            f"prompt {index} has {len(ids)} tokens; the target's context of {target.config.max_position} leaves no "
            "room for an answer: shorten it"
        )
    return ids


def _each(name: str, value: PerPrompt, count: int) -> list[Any]:
    if value is None or np.ndim(value) == 0:
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{name} has {len(value)} entries for {count} prompts: give one value or one a prompt")
    return list(value)


def _block_size(drafter: Drafter | None, block_size: int | None, threshold: float) -> int:
    if not 0 <= threshold <= 1:
        raise ValueError(
            f"confidence_threshold is {threshold}: expected a probability in [0, 1]; 0 verifies every draft token"
        )
    if drafter is None:
        return 0
    if threshold > 0 and not drafter.config.confidence_head:
        raise ValueError(f"confidence_threshold is {threshold}, but drafter {drafter.name!r} has no confidence head")
    return drafter.config.block_size if block_size is None else whole("block_size", block_size, 1)
