"""Generation for any number of prompts over a fixed batch of slots."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax import buckets
from dspark_jax.draft.contract import Drafter
from dspark_jax.engine.compiled import MODES, CompiledSteps
from dspark_jax.engine.programs import PROGRAMS
from dspark_jax.engine.prompts import CHUNK_LADDER, next_chunk
from dspark_jax.engine.requests import Prompt, Request, check_request, whole
from dspark_jax.engine.results import Generation, Timings
from dspark_jax.engine.state import Chunk, Draft, Report, Weights
from dspark_jax.engine.steps import Steps
from dspark_jax.nn.paged import attention_backend
from dspark_jax.sampling import request_keys
from dspark_jax.target.loading import Target
from dspark_jax.types import Sampling

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
    count = len(prompts)
    seeds = [int(seed) + i for i in range(count)] if isinstance(seed, (int, np.integer)) else seed
    settings = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seeds,
    }
    each = {name: _each(name, value, count) for name, value in settings.items()}
    context = target.config.max_position
    requests = [
        # Stop tokens are the batch's, and any number of them.
        check_request(target, context, i, prompt, stop_token_ids=(), **{name: each[name][i] for name in each})
        for i, prompt in enumerate(prompts)
    ]
    block = _block_size(drafter, block_size, confidence_threshold)
    stops = tuple(target.stop_token_ids if stop_token_ids is None else stop_token_ids)
    slots = min(count, MAX_SLOTS) if batch_size is None else whole("batch_size", batch_size, 1)

    def progress() -> None:
        if on_progress is not None:
            on_progress(sum(len(r.tokens) for r in requests), sum(r.finish_reason is not None for r in requests))

    results: list[Generation] = []
    for start in range(0, count, max(slots, 1)):
        part = requests[start : start + slots]
        batch = _Batch(target, drafter, part, stops, slots, block, confidence_threshold, diagnostics)
        results += batch.run(progress)
    return results


class _Batch:
    """One fixed batch of requests from prompt to end; the host side of the steps."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        requests: Sequence[Request],
        stops: tuple[int, ...],
        slots: int,
        block: int,
        threshold: float,
        diagnostics: bool,
    ):
        self.requests, self.diagnostics = requests, diagnostics
        self.waits = drafter is not None and (threshold > 0 or not drafter.functions.fills_blocks)
        self.row_ladder = buckets.rungs(slots * (block + 1), first=slots, ratio=1.5)
        self.mode = max((r.mode for r in requests), key=MODES.index)
        context = target.config.max_position
        longest = max(len(r.prompt) + r.budget for r in requests)
        # One block of junk may lie beyond the last kept position.
        length = min(longest, context) + block + 1
        steps = Steps(
            target=target.config,
            drafter=None if drafter is None else drafter.functions,
            dtype=target.dtype,
            slots=slots,
            max_length=-(-length // _LENGTH_STEP) * _LENGTH_STEP,
            context=context,
            policy="threshold" if threshold > 0 else "fixed",
            limit=block,
            block_size=block,
            attention=attention_backend(head_dim=target.config.widest_head),
        )
        weights = Weights(target.params, target.tables, None if drafter is None else drafter.params)
        self.programs = CompiledSteps(steps, weights, threshold, np.ones(1, np.float32))
        self.compile_before = PROGRAMS.seconds
        empty, self.memory = self.programs.init()
        # Everyone is admitted at once, which takes no program. The last request also stands in slots that stay empty:
        # without a prompt nothing runs there.
        seated = [*requests, *[requests[-1]] * (slots - len(requests))]
        sampling = {name: jnp.asarray(np.stack([r.settings[name] for r in seated])) for name in requests[0].settings}
        # A few entries for everyone, so that the number of stop tokens is no shape of its own.
        padded = [*stops, *[-1] * (-len(stops) % _STOP_STEP or _STOP_STEP)]
        self.slots = dataclasses.replace(
            empty,
            keys=request_keys(jnp.asarray(np.array([r.seed for r in seated], np.uint32))),
            sampling=Sampling(**sampling, mode=self.mode),
            stop_ids=jnp.tile(jnp.asarray(padded, jnp.int32), (slots, 1)),
            budgets=jnp.asarray([r.budget for r in seated], jnp.int32),
        )

    def run(self, progress: Callable[[], None]) -> list[Generation]:
        """Run the prompts, then rounds until every request has ended; `progress` is called after every round."""
        started = _clock()
        self._prefill()
        prefill = _clock() - started
        started, rounds = _clock(), 0
        while any(r.finish_reason is None for r in self.requests):
            self._round()
            rounds += 1
            progress()
        timings = Timings(prefill, _clock() - started, PROGRAMS.seconds - self.compile_before, rounds)
        return [request.generation(timings) for request in self.requests]

    def _prefill(self) -> None:
        """Run the prompts, each of which draws its first token."""
        for request in self.requests:
            if request.budget == 0:
                request.finish("length")
        reports: list[tuple[frozenset[int], Report]] = []
        while waiting := [(i, r) for i, r in enumerate(self.requests) if r.finish_reason is None and not r.prompt_done]:
            chunk, firsts = next_chunk(waiting, CHUNK_LADDER, self.programs.steps.slots)
            reports.append((firsts, self._step(None, chunk, rows=0)))
        for firsts, report in jax.device_get(reports):
            for slot in firsts:
                self.requests[slot].take(report, slot, first=True)

    def _round(self) -> None:
        """Draft and verify in every slot that runs."""
        draft, rows = None, self.row_ladder[-1]
        running = [(slot, request) for slot, request in enumerate(self.requests) if request.finish_reason is None]
        if self.programs.steps.drafter is not None:
            self.memory, draft = self.programs.propose(self.slots, self.memory, self.mode, 0)
            # Where the number of rows depends on this round's values, and only there, the host waits for them.
            if self.waits:
                kept = int(np.sum(jax.device_get(draft.keep)))
                rows = buckets.pick(self.row_ladder, len(running) + kept, "rows")
        report = jax.device_get(self._step(draft, None, rows))
        for slot, request in running:
            request.take(report, slot, first=False)

    def _step(self, draft: Draft | None, chunk: Chunk | None, rows: int) -> Report:
        self.slots, self.memory, report = self.programs.step(
            self.slots, self.memory, self.mode, draft, chunk, rows, self.diagnostics and draft is not None
        )
        return report


def _clock() -> float:
    """Seconds of a clock that stands still while programs are compiled."""
    return time.perf_counter() - PROGRAMS.seconds


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
