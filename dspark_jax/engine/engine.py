"""Continuous batching: requests come and go while the device works, and every step is filled with what pays.

A step runs the anchors of all running requests, the drafts its policy keeps and the next parts of waiting prompts as
one ragged batch, padded to a bucket. The host only plans: shapes, who enters, which prompts are next. It plans from
reports two steps old and so never waits for the device inside a step; a request that a stop token has ended is noticed
late, and what the device did for its slot meanwhile is nothing. Where the steps on their way are enough for a request's
budget, its slot is given away without waiting for them.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from dspark_jax import buckets
from dspark_jax.draft.contract import Drafter
from dspark_jax.engine.compiled import MODES, CompiledSteps
from dspark_jax.engine.layout import MarkovTables, check_mesh, drafting_layout
from dspark_jax.engine.policies import policy_curves, policy_shape
from dspark_jax.engine.prompts import CHUNK_LADDER, next_chunk
from dspark_jax.engine.requests import Prompt, Request, check_request
from dspark_jax.engine.results import Committed, FinishName, Generation, Statistics, Timings
from dspark_jax.engine.scheduling import Scheduling
from dspark_jax.engine.state import Chunk, Draft, Report, Weights
from dspark_jax.engine.steps import Steps
from dspark_jax.nn.attention import AttentionBackend
from dspark_jax.nn.paged import attention_backend
from dspark_jax.sharding import place
from dspark_jax.spec.schedule import Fixed, NoDraft, Policy, Threshold
from dspark_jax.target.loading import Target

_LENGTH_STEP = 128


class EngineFull(RuntimeError):
    """The queue has no room: take results or wait, then submit again."""


@dataclasses.dataclass(frozen=True)
class _InFlight:
    """A dispatched step: its report, whose tokens it gives by slot, and which slots' first tokens are among them."""

    report: Report
    owners: tuple[Request | None, ...]
    firsts: frozenset[int]
    chunk_rows: int


class Engine:
    """A target and perhaps a drafter behind a queue.

    Args:
        target: the model whose text this is.
        drafter: what proposes blocks; None decodes one token a step.
        slots: requests that run at the same time.
        max_length: tokens of prompt and response together that a slot holds.
        policy: how much of each block is verified; None verifies whole blocks (without a drafter: nothing).
        row_ladder: numbers of rows that anchors and drafts of a step are padded to; None makes one.
        mixed_ladder: those of steps that also carry a prompt chunk; None takes every second one.
        chunk_ladder: prompt tokens of a step are padded to one of these; several prompts may share them.
        max_queue: requests that may wait for a slot; None for no limit.
        lag: steps the host plans ahead of the reports it has read; 0 waits for every step.
        attention: how the target attends over its caches; None takes what the devices are best at.
        mesh: devices whose `tensor` axis splits both models (`sharding.create_mesh(data=1, tensor=4)`); a target loaded
            onto the same mesh stays where it is. None for one device.
        markov_tables: on a mesh, whether DSpark's sequential head is split too or whole on every device.

    Raises:
        ValueError: a policy that the drafter cannot follow, sizes out of range, a mesh with another axis, or whole
            tables without a mesh or of a drafter that has none.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        *,
        slots: int,
        max_length: int,
        policy: Policy | None = None,
        row_ladder: Sequence[int] | None = None,
        mixed_ladder: Sequence[int] | None = None,
        chunk_ladder: Sequence[int] = CHUNK_LADDER,
        max_queue: int | None = None,
        lag: int = 2,
        attention: AttentionBackend | None = None,
        mesh: Mesh | None = None,
        markov_tables: MarkovTables = "split",
    ):
        if mesh is not None:
            check_mesh(mesh)
        elif markov_tables != "split":
            raise ValueError(f"markov_tables is {markov_tables!r} without a mesh: give the engine one, or leave it out")
        if slots < 1 or max_length < 2 or lag < 0:
            raise ValueError(f"expected slots >= 1, max_length >= 2 and lag >= 0, found {slots}, {max_length}, {lag}")
        block = 0 if drafter is None else drafter.config.block_size
        self.policy = policy if policy is not None else Fixed(block) if block else NoDraft()
        kind, limit, drafted = policy_shape(self.policy, drafter)
        self.target, self.lag, self.max_queue = target, lag, max_queue
        self.context = min(max_length, target.config.max_position)
        functions = None if drafter is None or kind == "none" else drafter.functions
        rules, functions = drafting_layout(functions, markov_tables)
        self.steps = Steps(
            target=target.config,
            drafter=functions,
            dtype=target.dtype,
            slots=slots,
            # One block of junk may lie beyond the last kept position.
            max_length=-(-(self.context + limit + 1) // _LENGTH_STEP) * _LENGTH_STEP,
            context=self.context,
            policy=kind,
            limit=limit,
            block_size=drafted,
            attention=attention or attention_backend(mesh=mesh, head_dim=target.config.widest_head),
        )
        largest = slots * (limit + 1)
        self.row_ladder = tuple(row_ladder or buckets.rungs(largest, first=1, ratio=1.25))
        self.mixed_ladder = tuple(mixed_ladder or sorted({*self.row_ladder[1::2], self.row_ladder[-1]}))
        self.chunk_ladder = tuple(chunk_ladder)
        for name, ladder in (("row_ladder", self.row_ladder), ("mixed_ladder", self.mixed_ladder)):
            if ladder[-1] < largest:
                raise ValueError(f"{name} ends at {ladder[-1]}; {slots} slots of {limit + 1} rows need {largest}")
        self.plain_rows = buckets.pick(self.mixed_ladder, slots, "rows")
        self.curve, self.plain = policy_curves(self.policy, slots, largest)
        seconds = np.ones(1, np.float32)
        if kind == "greedy" and self.curve is not None:
            seconds = self.curve.seconds_by_rows(largest)
        draft_params = None if self.steps.drafter is None or drafter is None else drafter.params
        weights = Weights(target.params, target.tables, draft_params)
        self.programs = CompiledSteps(
            self.steps,
            weights if mesh is None else place(mesh, weights, rules),
            self.policy.c if isinstance(self.policy, Threshold) else 0.0,
            seconds,
            mesh,
        )
        self.scheduling = None
        if kind == "scheduled" and self.curve is not None:
            self.scheduling = Scheduling(self.curve, self.plain, drafted, limit)
        self.statistics = Statistics()
        self.queue: deque[Request] = deque()
        self.requests: list[Request | None] = [None] * slots
        self.in_flight: deque[_InFlight] = deque()
        self.submitted = 0
        self.results: dict[int, Request] = {}
        self.slots, self.memory = self.programs.init()

    def warm_up(self, modes: Sequence[str] = ("greedy",)) -> int:
        """Compile every program that requests of these sampling modes can need and run each once, for nobody.

        Returns:
            How many programs were new.
        """
        shapes = [(rows, 0) for rows in self.row_ladder]
        shapes += [(rows, width) for width in self.chunk_ladder for rows in (0, *self.mixed_ladder)]
        undrafted = [s for s in shapes if s[0] <= self.plain_rows] if self.plain is not None else []
        self.memory, count = self.programs.warm_up(self.slots, self.memory, modes, shapes, undrafted)
        return count

    def submit(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int = 0,
        stop_token_ids: Sequence[int] | None = None,
    ) -> int:
        """Queue a request; arguments as in `generate`. Returns its id.

        Raises:
            ValueError: the request cannot be run; nothing else is affected.
            EngineFull: the queue is full.
        """
        if self.max_queue is not None and len(self.queue) >= self.max_queue and None not in self.requests:
            raise EngineFull(
                f"{len(self.queue)} requests wait and {len(self.requests)} run: step the engine, then submit again"
            )
        request = check_request(
            self.target,
            self.context,
            self.submitted,
            prompt,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            stop_token_ids=stop_token_ids,
        )
        self.submitted += 1
        self.queue.append(request)
        return request.id

    def cancel(self, number: int) -> bool:
        """End a request that waits or runs, with the tokens it has; returns whether there was one."""
        for request in self.queue:
            if request.id == number:
                self.queue.remove(request)
                self._finish(request, "cancelled")
                return True
        for slot, running in enumerate(self.requests):
            if running is not None and running.id == number:
                self.slots = self.programs.end(self.slots, slot)
                self.requests[slot] = None
                self._finish(running, "cancelled")
                return True
        for flight in self.in_flight:
            for owner in flight.owners:
                if owner is not None and owner.id == number and owner.finish_reason is None:
                    self._finish(owner, "cancelled")
                    return True
        return False

    @property
    def idle(self) -> bool:
        """Nothing waits, runs or is on its way."""
        return not self.queue and not self.in_flight and all(r is None for r in self.requests)

    def step(self) -> list[Committed]:
        """Plan and dispatch one step; returns what has become final meanwhile."""
        events = self._collect(self.lag)
        started, waited = time.perf_counter(), self.statistics.wait_seconds
        events += self._admit()
        dispatched = self._dispatch()
        self.statistics.plan_seconds += time.perf_counter() - started - (self.statistics.wait_seconds - waited)
        if not dispatched:
            events += self._collect(0)
        return events

    def stream(self) -> Iterator[Committed]:
        """Step until nothing is left, yielding tokens as they become final; more may be submitted meanwhile."""
        while not self.idle:
            yield from self.step()

    def run(self) -> dict[int, Generation]:
        """Step until nothing is left; returns the results not yet taken, by id."""
        for _ in self.stream():
            pass
        return {number: self.take(number) for number in list(self.results)}

    def take(self, number: int) -> Generation:
        """Result of a request that has ended; it is forgotten here.

        Raises:
            KeyError: it has not ended, was taken before, or never existed.
        """
        if number not in self.results:
            raise KeyError(f"request {number} has no result to take: it runs still, was taken, or never existed")
        request = self.results.pop(number)
        assert request.ended is not None  # else it were no result
        started = request.submitted if request.started is None else request.started
        first = request.ended if request.first is None else request.first
        return request.generation(
            Timings(first - started, request.ended - first, compile=0.0, rounds=len(request.rounds))
        )

    def _finish(self, request: Request, reason: FinishName | None = None) -> None:
        if reason is not None:
            request.finish(reason)
        self.results[request.id] = request

    def _admit(self) -> list[Committed]:
        """Put waiting requests into free slots."""
        events = []
        for slot, running in enumerate(self.requests):
            while running is None and self.queue:
                request = self.queue.popleft()
                request.started = time.perf_counter()
                if request.budget == 0:
                    self._finish(request, "length")
                    events.append(Committed(request.id, (), "length"))
                    continue
                self.slots = self.programs.admit(self.slots, request, slot)
                self.requests[slot] = running = request
        return events

    def _next_chunk(self) -> tuple[Chunk | None, frozenset[int]]:
        """The next parts of the prompts that have waited longest, and the slots whose first tokens they draw."""
        waiting = [(slot, r) for slot, r in enumerate(self.requests) if r is not None and not r.prompt_done]
        if not waiting:
            return None, frozenset()
        return next_chunk(sorted(waiting, key=lambda w: w[1].id), self.chunk_ladder, len(self.requests))

    def _dispatch(self) -> bool:
        """Send the next step to the device; returns whether there was anything to do."""
        running = [r for r in self.requests if r is not None and r.prompt_done]
        chunk, firsts = self._next_chunk()
        if not running and chunk is None:
            return False
        mode = self._mode()
        draft, rows = None, 0
        if running:
            draft, rows = self._draft(mode, running, self.row_ladder if chunk is None else self.mixed_ladder)
        self.slots, self.memory, report = self.programs.step(self.slots, self.memory, mode, draft, chunk, rows)
        for leaf in jax.tree.leaves(report):
            leaf.copy_to_host_async()
        chunk_rows = 0 if chunk is None else int(np.sum(chunk.counts))
        owners = tuple(r if r is not None and r.prompt_done else None for r in self.requests)
        self.in_flight.append(_InFlight(report, owners, firsts, chunk_rows))
        for slot, owner in enumerate(owners):
            if owner is not None:
                owner.pending += 1
                if owner.surely_ends:
                    self.requests[slot] = None
        self.statistics.steps += 1
        self.statistics.rows += rows + (0 if chunk is None else chunk.tokens.size)
        self.statistics.verify_budget += rows
        self.statistics.verify_steps += rows > 0
        self.statistics.prompt_steps += chunk is not None
        return True

    def _draft(self, mode: str, running: list[Request], ladder: tuple[int, ...]) -> tuple[Draft | None, int]:
        """Draft for the running requests; returns the draft and the rows of the step."""
        steps = self.steps
        if steps.drafter is None:
            return None, buckets.pick(ladder, len(running), "rows")
        capacity = full = len(running) * (steps.limit + 1)
        if self.scheduling is not None:
            capacity = self.scheduling.capacity([r.id for r in running])
            if not capacity:
                return None, buckets.pick(ladder, len(running), "rows")
        rows = buckets.pick(ladder, min(capacity, full), "rows")
        self.memory, draft = self.programs.propose(self.slots, self.memory, mode, rows)
        if steps.policy in ("threshold", "greedy") or not steps.drafter.fills_blocks:
            # Only here does a step's shape depend on what was just drafted: the host has to wait for it.
            waiting = time.perf_counter()
            keep, done = jax.device_get((draft.keep, self.slots.done))
            self.statistics.wait_seconds += time.perf_counter() - waiting
            rows = buckets.pick(ladder, max(1, int(np.sum(np.where(done, 0, keep + 1)))), "rows")
        return draft, rows

    def _mode(self) -> str:
        """The widest sampling mode among the running requests."""
        return max((r.mode for r in self.requests if r is not None), key=MODES.index, default="greedy")

    def _collect(self, leave: int) -> list[Committed]:
        """Read reports until at most `leave` steps are in flight."""
        events = []
        while len(self.in_flight) > leave:
            flight = self.in_flight.popleft()
            waiting = time.perf_counter()
            report = jax.device_get(flight.report)
            self.statistics.wait_seconds += time.perf_counter() - waiting
            for slot, owner in enumerate(flight.owners):
                if owner is None or owner.finish_reason is not None:
                    continue
                owner.pending -= 1
                tokens = owner.take(report, slot, first=slot in flight.firsts)
                if not tokens:
                    continue
                if self.scheduling is not None and report.survival is not None and slot not in flight.firsts:
                    self.scheduling.report(owner.id, report.survival[slot])
                events.append(Committed(owner.id, tuple(tokens), owner.finish_reason))
                self.statistics.tokens += len(tokens)
                if owner.finish_reason is not None:
                    self._finish(owner)
                    if self.requests[slot] is owner:
                        self.requests[slot] = None
            ran = sum(1 for slot, count in enumerate(report.count) if count and slot not in flight.firsts)
            drafts = int(np.sum(report.proposed))
            self.statistics.real_rows += ran + drafts + flight.chunk_rows
            self.statistics.drafts += drafts
            self.statistics.accepted += int(np.sum(report.accepted))
        return events
