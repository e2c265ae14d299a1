"""`bench decode`: the target's steps over 1, 2, 4, ... rows of one sequence, and a drafter's round beside them."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.bench.timing import seconds
from dspark_jax.draft.contract import Drafter, chooser
from dspark_jax.draft.heads import sample_block
from dspark_jax.draft.loading import load_drafter
from dspark_jax.engine.engine import Engine
from dspark_jax.engine.state import Draft, Limits, Memory, Slots, Weights
from dspark_jax.engine.steps import Steps
from dspark_jax.target.loading import Target, load_target
from dspark_jax.types import Proposal

ENGINE_TOKENS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decode:
    """Time target steps and a drafter's round.

    Attributes:
        target: the target.
        draft: the drafter.
        rows: rows of one sequence run through the target at once.
        context: cache positions.
        repeats: timed repeats; the median and the minimum are reported.
        output: JSON file for the numbers.
    """

    target: str = "smollm2-135m"
    draft: str = "dspark"
    rows: tuple[int, ...] = (1, 2, 4, 8, 16)
    context: int = 512
    repeats: int = 15
    output: Path | None = None


def bench_decode(command: Decode) -> dict[str, Any]:
    """Target steps over several widths, the proposal, the sequential head alone, and what the engine adds to a step."""
    target = load_target(command.target, dtype=jnp.float32)
    drafter = load_drafter(command.draft, target)
    block = drafter.config.block_size
    vocab = target.tables.embed.shape[0]
    weights = Weights(target.params, target.tables, drafter.params)
    steps = Steps(
        target=target.config,
        drafter=drafter.functions,
        dtype=target.dtype,
        slots=1,
        max_length=command.context,
        context=target.config.max_position,
        policy="fixed",
        limit=block,
        block_size=block,
    )

    def running(which: Steps) -> tuple[Slots, Memory]:
        """Half of the context is filled, and nothing ends."""
        slots, memory = jax.jit(lambda: which.init(vocab, num_stops=4))()
        return dataclasses.replace(
            slots,
            lengths=jnp.full((1,), command.context // 2, jnp.int32),
            budgets=jnp.full((1,), 1 << 20, jnp.int32),
            done=jnp.zeros(1, bool),
        ), memory

    def timed(which: Steps, program: Callable[..., Any], *extra: Any) -> dict[str, float]:
        """Time a program that consumes and returns the memory; the slot stays at its position."""
        slots, memory = running(which)
        held = [memory]
        compiled = jax.jit(program, donate_argnums=2)

        def call() -> Any:
            held[0], *rest = compiled(weights, slots, held[0], *extra)
            return held[0], rest

        return seconds(call, command.repeats)

    def step(which: Steps, rows: int) -> Callable[..., Any]:
        def program(weights: Weights, slots: Slots, memory: Memory, draft: Draft) -> Any:
            slots, memory, report = which.step(weights, slots, memory, draft, None, rows=rows)
            return memory, slots, report

        return program

    results: dict[str, Any] = {"target_step": {}}
    for rows in command.rows:
        # A verification without a drafter: the rows run through the target, and their argmax is taken.
        plain = dataclasses.replace(steps, drafter=None, limit=rows - 1)
        drafts = Proposal(jnp.zeros((1, rows - 1), jnp.int32), None, None, jnp.full((1,), rows - 1, jnp.int32))
        results["target_step"][rows] = timed(plain, step(plain, rows), Draft(drafts, drafts.num_valid, None))
    limits = Limits(jnp.float32(0), jnp.int32(0), jnp.ones(1))
    results["propose"] = timed(steps, steps.propose, limits)
    slots, memory = running(steps)
    _, draft = jax.jit(steps.propose)(weights, slots, memory, limits)
    results["verify"] = timed(steps, step(steps, block + 1), draft)
    if drafter.config.markov_rank:
        total = results["propose"]["median"] + results["verify"]["median"]
        results["sequential_head"] = _sequential_head(drafter, slots, vocab, total, command.repeats)
    results["engine"] = _engine(target, command.context, rounds=5)
    return results


def _engine(target: Target, context: int, rounds: int) -> dict[str, float]:
    """Seconds a token of one request in the engine, and of its one-token step called in a bare loop, in turn."""
    engine = Engine(target, None, slots=1, max_length=context)
    engine.warm_up()
    count = min(ENGINE_TOKENS, context - 2)
    times: dict[str, list[float]] = {"engine": [], "bare": []}
    for _ in range(rounds):
        engine.submit([0], max_new_tokens=count + 1, stop_token_ids=())
        stamps = [time.perf_counter() for event in engine.stream() if event.tokens]
        times["engine"].append((stamps[-1] - stamps[0]) / count)
        slots = dataclasses.replace(
            engine.slots,
            lengths=jnp.ones(1, jnp.int32),
            emitted=jnp.zeros(1, jnp.int32),
            budgets=jnp.full((1,), count + 1, jnp.int32),
            done=jnp.zeros(1, bool),
        )
        memory = engine.memory
        started = time.perf_counter()
        for _ in range(count):
            slots, memory, report = engine.programs.step(slots, memory, "greedy", None, None, 1)
        jax.block_until_ready(report)
        times["bare"].append((time.perf_counter() - started) / count)
        engine.slots, engine.memory = dataclasses.replace(slots, done=jnp.ones(1, bool)), memory
    medians = {name: float(np.median(values)) for name, values in times.items()}
    return {**medians, "over_bare": medians["engine"] / medians["bare"]}


def _sequential_head(drafter: Drafter, slots: Slots, vocab: int, total: float, repeats: int) -> dict[str, float]:
    """Seconds of the sampling scan beyond a plain argmax of the same base logits, and its share of a round."""
    shape = drafter.config
    base = jax.random.normal(jax.random.key(0), (1, shape.block_size, shape.draft_vocab_size or vocab))
    hidden = jax.random.normal(jax.random.key(1), (1, shape.block_size, shape.decoder.hidden_size))
    anchors = jnp.ones((1,), jnp.int32)
    choose = chooser(slots.sampling, slots.keys, anchors)
    times = []
    for config in (shape, dataclasses.replace(shape, markov_rank=0)):
        run = jax.jit(functools.partial(sample_block, config, choose=choose))
        call = functools.partial(run, drafter.params, base, hidden, anchors)
        times.append(seconds(call, repeats)["median"])
    return {"median": times[0] - times[1], "share_of_round": (times[0] - times[1]) / total}
