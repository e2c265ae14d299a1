"""A tiny target, corpus and training configuration shared by the training tests."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from gemma4 import gemma4

from dspark_jax.config import DecoderConfig, RopeConfig
from dspark_jax.data.corpus import TokenizedCorpus, TokenizedRow
from dspark_jax.nn.decoder import is_constant
from dspark_jax.target.loading import Target, parameter_shapes
from dspark_jax.training.config import DrafterShape, MeshShape, TrainConfig
from dspark_jax.training.losses import LossConfig
from dspark_jax.training.optimizer import OptimizerConfig
from dspark_jax.types import TargetTables

VOCAB, MASK = 40, 39


def tiny_target(seed=0, dtype=jnp.float32, as_gemma4=False, **changes):
    config = DecoderConfig(
        family="llama", vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_layers=4, num_heads=2,
        num_kv_heads=1, head_dim=8, rms_norm_eps=1e-5, rope=RopeConfig(), max_position=64, tie_word_embeddings=True,
    )  # fmt: skip
    config = dataclasses.replace(config, **changes)
    config = gemma4(config) if as_gemma4 else config
    rng = np.random.default_rng(seed)

    def fill(path, leaf):
        if len(leaf.shape) == 1:
            return jnp.full(leaf.shape, 0.8 if is_constant(path) else 1.0, dtype)
        return jnp.asarray(rng.normal(0, leaf.shape[-1] ** -0.5, leaf.shape), dtype)

    params = jax.tree_util.tree_map_with_path(fill, parameter_shapes(config))
    embed = jnp.asarray(rng.normal(0, 1, (VOCAB, 16)), dtype)
    tables = TargetTables(embed=embed, head=embed, embed_scale=config.embed_scale, soft_cap=config.soft_cap)
    return Target("tiny", config, params, tables, None, (2,), dtype)


def tiny_corpus(count=60, seed=0, shortest=6, longest=14):
    """Rows whose tokens follow one another by a fixed rule, so that there is something to learn."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        length = int(rng.integers(shortest, longest + 1))
        tokens = (int(rng.integers(0, 30)) + 3 * np.arange(length)) % 38
        mask = (np.arange(length) >= 2).astype(np.uint8)
        rows.append(TokenizedRow(f"row-{i:04d}", "toy", i, tokens.astype(np.int32), mask))
    return TokenizedCorpus.from_rows(rows)


KINDS = {
    "dspark": (
        DrafterShape(
            kind="dspark", layers=1, intermediate_size=16, block_size=3, taps=(0, 2), mask_token_id=MASK, markov_rank=4,
            confidence_head=True,
        ),
        LossConfig(),
        4,
    ),
    "dflash": (
        DrafterShape(kind="dflash", layers=1, intermediate_size=16, block_size=3, taps=(0, 2), mask_token_id=MASK),
        LossConfig(ce=1, tv=0, confidence=0),
        4,
    ),
    "eagle3": (
        DrafterShape(kind="eagle3", layers=1, intermediate_size=16, block_size=3, taps=(0, 2)), LossConfig(), None
    ),
    "mtp": (DrafterShape(kind="mtp", layers=1, intermediate_size=16), LossConfig(), None),
}  # fmt: skip


def tiny_config(kind="dspark", **changes):
    shape, loss, anchors = KINDS[kind]
    settings = {
        "drafter": shape, "loss": loss, "num_anchors": anchors, "data": (), "output": Path("unused"), "target": "tiny",
        "steps": 10, "sequence_length": 16, "batch_size": 4, "dtype": "float32", "log_every": 3, "vocab_chunk": 2,
        "optimizer": OptimizerConfig(learning_rate=1e-2, warmup=0.2), "mesh": MeshShape(data=1),
    }  # fmt: skip
    return TrainConfig(**{**settings, **changes})
