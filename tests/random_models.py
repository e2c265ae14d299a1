"""Tiny random targets and drafters of every kind, in memory: what the property tests of drafting and generation run.

Sizes are odd and mutually prime where the mathematics allows it, so that a swapped axis does not go unnoticed.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gemma4 import gemma4

from dspark_jax.config import DecoderConfig, DrafterConfig, RopeConfig
from dspark_jax.draft.contract import Drafter
from dspark_jax.draft.loading import functions_for
from dspark_jax.draft.ngram import ngram_drafter
from dspark_jax.draft.vocabulary import reduce_vocabulary
from dspark_jax.engine.drafters import independent_drafter
from dspark_jax.nn.decoder import is_constant
from dspark_jax.target.loading import Target, parameter_shapes
from dspark_jax.types import TargetTables

VOCAB, WIDTH, BLOCK = 11, 10, 4
TARGET = DecoderConfig(
    family="llama", vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=14, num_layers=2, num_heads=2,
    num_kv_heads=1, head_dim=6, rms_norm_eps=1e-5, rope=RopeConfig(), max_position=64,
)  # fmt: skip
TAPS = (-1, 0)

HEADS: dict[str, dict[str, Any]] = {
    "vanilla": {"markov_rank": 3, "confidence_head": True},
    "gated": {"markov_rank": 3, "markov_head": "gated", "confidence_head": True, "confidence_with_markov": False},
    "rnn": {"markov_rank": 3, "markov_head": "rnn", "confidence_head": True},
    "no_markov": {"confidence_head": True},
    "dflash": {},
    "sliding": {"markov_rank": 3},
    "gemma4": {"markov_rank": 3, "confidence_head": True},
}
AUTOREGRESSIVE = ("eagle3", "mtp")
# What a drafter is that may draft every second token only.
REDUCED = {"reduced": "vanilla", "reduced_eagle3": "eagle3"}
KINDS = (*HEADS, *AUTOREGRESSIVE, *REDUCED)
# Drafters that are not trained.
UNTRAINED = ("ngram", "lm")


def randomise(shapes: Any, seed: int, gain: float = 1.0) -> Any:
    """Arrays for a tree of shapes: matrices of scale `gain / sqrt(fan in)`, factors near 1, biases near 0."""
    rng = np.random.default_rng(seed)

    def fill(path: tuple[Any, ...], leaf: Any) -> jax.Array:
        if len(leaf.shape) > 1:
            return jnp.asarray(rng.normal(0, gain * leaf.shape[-1] ** -0.5, leaf.shape), jnp.float32)
        centre = 1.0 if "norm" in path[-2].key or is_constant(path) else 0.0
        return jnp.asarray(rng.normal(centre, 0.2, leaf.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(fill, shapes)


@functools.lru_cache
def random_target(vocab: int = VOCAB, max_position: int = 64, seed: int = 0, as_gemma4: bool = False) -> Target:
    """A target whose greedy text is varied and whose distributions are neither flat nor sharp."""
    config = dataclasses.replace(TARGET, vocab_size=vocab, max_position=max_position)
    config = gemma4(config, tie_word_embeddings=False) if as_gemma4 else config
    rng = np.random.default_rng(seed + 100)
    table = lambda: jnp.asarray(rng.normal(0, 1, (vocab, WIDTH)) * 0.6, jnp.float32)
    tables = TargetTables(embed=table(), head=table(), embed_scale=config.embed_scale, soft_cap=config.soft_cap)
    return Target("random", config, randomise(parameter_shapes(config), seed, 1.5), tables, None, (), jnp.float32)


@functools.lru_cache
def random_drafter(kind: str, block: int = BLOCK, vocab: int = VOCAB, seed: int = 1) -> Drafter:
    """A drafter of one of `KINDS` or `UNTRAINED` for `random_target(vocab)`."""
    if kind == "ngram":
        return ngram_drafter(random_target(vocab), block_size=block, min_ngram=1, max_ngram=3)
    if kind == "lm":
        # Its table is padded: the last two ids exist for it alone.
        return independent_drafter(random_target(vocab + 2, seed=7), random_target(vocab), block_size=block)
    if kind in REDUCED:
        whole = dataclasses.replace(
            random_drafter(REDUCED[kind], block, vocab, seed), tables=random_target(vocab).tables
        )
        return dataclasses.replace(reduce_vocabulary(whole, range(0, vocab, 2)), name=kind)
    layers = 2 if kind in ("sliding", "gemma4") else 1
    decoder = dataclasses.replace(
        TARGET, family="qwen3", qk_norm=True, num_layers=layers, vocab_size=vocab,
        layer_types=("sliding_attention", "full_attention") if layers == 2 else ("full_attention",),
        sliding_window=3 if layers == 2 else None,
    )  # fmt: skip
    if kind == "gemma4":
        decoder = gemma4(decoder, sliding_window=3, tie_word_embeddings=False)
    common: dict[str, Any] = {
        "decoder": decoder, "target_layers": TARGET.num_layers, "target_layer_ids": TAPS, "block_size": block,
    }  # fmt: skip
    if kind == "mtp":
        config = DrafterConfig(kind="mtp", **{**common, "target_layer_ids": ()})
    elif kind == "eagle3":
        config = DrafterConfig(kind="eagle3", **common)
    else:
        config = DrafterConfig(kind="dspark", mask_token_id=vocab - 1, **common, **HEADS[kind])
    functions = functions_for(config)
    shapes = jax.eval_shape(lambda key: functions.initialise(key, config.feature_width), jax.random.key(0))
    return Drafter(kind, config, randomise(shapes, seed), functions)
