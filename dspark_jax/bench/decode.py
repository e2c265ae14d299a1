"""`bench decode`: the target's steps over 1, 2, 4, ... rows of one sequence, and a drafter's round beside them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from dspark_jax.bench.timing import seconds
from dspark_jax.draft.contract import Drafter, chooser
from dspark_jax.draft.heads import sample_block
from dspark_jax.draft.loading import load_drafter
from dspark_jax.engine.rounds import DecodeState, Requests, Rounds, Weights
from dspark_jax.sampling import make_sampling, request_keys
from dspark_jax.target.loading import load_target
from dspark_jax.types import Proposal


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
    """Target steps over several widths, the proposal, and the sequential head alone."""
    target = load_target(command.target, dtype=jnp.float32)
    drafter = load_drafter(command.draft, target)
    block = drafter.config.block_size
    vocab = target.tables.embed.shape[0]
    requests = Requests(
        keys=request_keys(jnp.zeros(1, jnp.uint32)),
        sampling=make_sampling(1, vocab_size=vocab, temperature=0.0),
        stop_ids=jnp.full((1, 4), -1, jnp.int32),
        prompt_lengths=jnp.ones(1, jnp.int32),
        budgets=jnp.full((1,), 1 << 20, jnp.int32),
        threshold=jnp.float32(0),
    )
    weights = Weights(target.params, target.tables, drafter.params)
    rounds = Rounds(target.config, drafter.functions, target.dtype, command.context, target.config.max_position)
    plain = dataclasses.replace(rounds, drafter=None)
    results: dict[str, Any] = {"target_step": {}}

    def running(which: Rounds) -> DecodeState:
        state = jax.jit(which.init)(requests)
        return dataclasses.replace(state, lengths=jnp.full((1,), command.context // 2, jnp.int32))

    def timed(which: Rounds, program: Callable[..., Any], *extra: Any) -> dict[str, float]:
        """Time a program that consumes and returns the state; it stays at the same position."""
        states = [running(which)]
        compiled = jax.jit(program, donate_argnums=2)

        def call() -> Any:
            before = states[0].lengths + 0
            after, *rest = compiled(weights, requests, states[0], *extra)
            states[0] = dataclasses.replace(after, lengths=before)
            return after, rest

        return seconds(call, command.repeats)

    for width in command.rows:
        results["target_step"][width] = timed(plain, _target_rows(plain, width))
    propose = lambda w, q, s: rounds.propose(w, q, s, block_size=block)  # noqa: E731
    results["propose"] = timed(rounds, propose)
    _, proposal, keep = jax.jit(propose)(weights, requests, running(rounds))
    verify = lambda w, q, s, p, k: rounds.verify(w, q, s, p, k, width=block + 1)  # noqa: E731
    results["verify"] = timed(rounds, verify, proposal, keep)
    if drafter.config.markov_rank:
        total = results["propose"]["median"] + results["verify"]["median"]
        results["sequential_head"] = _sequential_head(drafter, requests, vocab, total, command.repeats)
    return results


def _sequential_head(drafter: Drafter, requests: Requests, vocab: int, total: float, repeats: int) -> dict[str, float]:
    """Seconds of the sampling scan beyond a plain argmax of the same base logits, and its share of a round."""
    shape = drafter.config
    base = jax.random.normal(jax.random.key(0), (1, shape.block_size, vocab))
    hidden = jax.random.normal(jax.random.key(1), (1, shape.block_size, shape.decoder.hidden_size))
    anchors = jnp.ones((1,), jnp.int32)
    choose = chooser(requests.sampling, requests.keys, anchors)
    times = []
    for config in (shape, dataclasses.replace(shape, markov_rank=0)):
        run = jax.jit(functools.partial(sample_block, config, choose=choose))
        call = functools.partial(run, drafter.params, base, hidden, anchors)
        times.append(seconds(call, repeats)["median"])
    return {"median": times[0] - times[1], "share_of_round": (times[0] - times[1]) / total}


def _target_rows(rounds: Rounds, width: int) -> Callable[..., Any]:
    """Run `width` rows of the sequence through the target and take their argmax: a verification without a drafter."""

    def program(weights: Weights, requests: Requests, state: DecodeState) -> Any:
        drafts = jnp.zeros((1, width - 1), jnp.int32)
        proposal = Proposal(drafts, None, None, jnp.full((1,), width - 1, jnp.int32))
        return rounds.verify(weights, requests, state, proposal, None, width=width)

    return program
