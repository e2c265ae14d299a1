"""Answers as the engine returns them, made up from accepted counts: material for the evaluation tests."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from dspark_jax.config import DecoderConfig, DrafterConfig, RopeConfig
from dspark_jax.draft.contract import Drafter
from dspark_jax.engine.results import Generation, Round, Timings
from dspark_jax.evaluation.measure import PLAIN, Measurement, Sample, Settings, System
from dspark_jax.evaluation.tasks import Prompt
from dspark_jax.target.loading import Target
from dspark_jax.types import TargetTables

BLOCK = 3
SHAPE = DecoderConfig(
    family="llama", vocab_size=9, hidden_size=2, intermediate_size=2, num_layers=4, num_heads=1, num_kv_heads=1,
    head_dim=2, rms_norm_eps=1e-5, rope=RopeConfig(), max_position=64,
)  # fmt: skip
NO_FUNCTIONS: Any = None


def answer(accepted, *, plain=False, decode=1.0, prefill=0.5, tokens=None, stopped=False, gap=1.0):
    """An answer whose rounds accepted `accepted` drafts each; `stopped` ends the last one at an accepted stop token."""
    rounds = []
    for number, count in enumerate(accepted):
        stop = stopped and number == len(accepted) - 1
        emitted = count if stop else count + 1
        rounds.append(Round(0 if plain else BLOCK, count, count, emitted, stop, None, gap))
    length = 1 + sum(r.emitted for r in rounds)
    return Generation(
        prompt=(1, 2, 3),
        tokens=tuple(range(length)) if tokens is None else tuple(tokens),
        finish_reason="stop" if stopped else "length",
        rounds=tuple(rounds),
        first_top2_gap=gap,
        timings=Timings(prefill, decode, 2.0, len(rounds)),
    )


def target(seed=0):
    """A target nobody runs."""
    table = jnp.ones((9, 2))
    tables = TargetTables(embed=table, head=table)
    return Target("tiny", SHAPE, {"w": table + seed}, tables, None, (2,), jnp.float32)


def drafter(name, block=BLOCK, confidence_head=False):
    """A drafter nobody runs."""
    config = DrafterConfig(
        kind="dspark", decoder=SHAPE, target_layers=4, target_layer_ids=(0,), block_size=block, mask_token_id=8,
        confidence_head=confidence_head,
    )  # fmt: skip
    return Drafter(name, config, {}, NO_FUNCTIONS)


def measurement(answers, domains, *, batch_of=None, **settings):
    """A measurement from answers by system name (plain decoding among them) and the domain of each prompt."""
    prompts = [Prompt(f"file:{i + 1}", domain, f"question {i}") for i, domain in enumerate(domains)]
    batch_of = batch_of or list(range(len(prompts)))
    systems = (System(PLAIN, None, 0, 0.0), *(System(n, drafter(n), BLOCK, 0.0) for n in answers if n != PLAIN))
    samples = {
        name: [Sample(p, b, g) for p, b, g in zip(prompts, batch_of, generations, strict=True)]
        for name, generations in answers.items()
    }
    return Measurement(Settings(**settings), systems, samples)


def example():
    """Two drafters on two domains; plain decoding takes a second for every four tokens."""
    return measurement(
        {
            PLAIN: [answer([0] * 8, plain=True, decode=2.0), answer([0] * 4, plain=True), answer([0] * 4, plain=True)],
            "good": [answer([3, 3]), answer([1, 1], decode=0.5), answer([3], decode=0.5)],
            "poor": [answer([0] * 8, decode=4.0), answer([1, 1], decode=1.0), answer([0] * 4, decode=2.0)],
        },
        ["math", "chat", "chat"],
    )
