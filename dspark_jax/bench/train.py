"""`bench train`: forward and backward at SmolLM2's sizes, features given, against a plain matrix product."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from dspark_jax.bench.timing import seconds
from dspark_jax.config import DrafterConfig
from dspark_jax.draft.dspark import DSparkFunctions
from dspark_jax.draft.eagle3 import Eagle3Functions
from dspark_jax.draft.loading import functions_for
from dspark_jax.training.abstract import KNOWN_TARGETS
from dspark_jax.training.anchors import block_labels, draw_anchors, row_keys
from dspark_jax.training.losses import LossConfig, block_loss, eagle3_loss, slot_weights
from dspark_jax.types import TargetTables


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train:
    """Time forward and backward of the drafters at SmolLM2's sizes (5 layers, rank 256; EAGLE-3: 1 layer, 7 steps).

    Attributes:
        batch: rows.
        length: tokens of a row.
        anchors: anchors of a row.
        chunk: anchors of a row whose logits exist at once.
        dtype: of products and activations.
        repeats: timed repeats; the minimum counts.
        output: JSON file for the numbers.
    """

    batch: tuple[int, ...] = (1, 4)
    dtype: Literal["float32", "bfloat16"] = "float32"
    length: int = 512
    anchors: int = 32
    chunk: int = 8
    repeats: int = 3
    output: Path | None = None


SMOLLM2_LAYER = dataclasses.replace(KNOWN_TARGETS["smollm2-135m"], family="qwen3", num_layers=5, qk_norm=True)


def bench_train(command: Train) -> dict[str, Any]:
    """Seconds of forward and backward, features given, and their rates against a plain product."""
    results: dict[str, Any] = {"product": _plain_product(command)}
    taps = (0, 1, 2, 3, 4)
    common: dict[str, Any] = {"target_layers": 6, "target_layer_ids": taps, "block_size": 7}
    dspark = DrafterConfig(
        kind="dspark", decoder=SMOLLM2_LAYER, mask_token_id=0, markov_rank=256, confidence_head=True, **common
    )
    eagle = DrafterConfig(kind="eagle3", decoder=dataclasses.replace(SMOLLM2_LAYER, num_layers=1), **common)
    for batch in command.batch:
        for config in (dspark, eagle):
            results[f"{config.name}, batch {batch}"] = _forward_backward(config, batch, command)
    return results


def _forward_backward(config: DrafterConfig, batch: int, command: Train) -> dict[str, float]:
    dtype = jnp.dtype(command.dtype)
    functions = functions_for(config, dtype)
    width, vocab, length = config.decoder.hidden_size, config.decoder.vocab_size, command.length
    keys = jax.random.split(jax.random.key(0), 5)
    table = jax.random.normal(keys[0], (vocab, width)) * 0.05
    tables = TargetTables(embed=table, head=table)
    tokens = jax.random.randint(keys[1], (batch, length), 0, vocab)
    taps = jax.random.normal(keys[2], (batch, length, width * len(config.target_layer_ids)))
    hidden = jax.random.normal(keys[3], (batch, length, width))
    positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
    segments, mask = jnp.ones_like(tokens), jnp.ones(tokens.shape, bool)
    params = functions.initialise(keys[4], taps.shape[-1])

    def loss(params: Any, tables: Any, taps: Any, hidden: Any) -> Any:
        if isinstance(functions, Eagle3Functions):
            states = functions.train_states(params, tables, taps, tokens, positions, segments)
            scale, chunk = jnp.float32(batch * length), 8 * command.chunk
            return eagle3_loss(states, tables, hidden, mask, segments, 0.8, scale, chunk=chunk, dtype=dtype)[0]
        return _block_objective(functions, params, tables, tokens, positions, segments, mask, taps, hidden, command)

    program = jax.jit(jax.grad(loss)).lower(params, tables, taps, hidden).compile()
    memory = program.memory_analysis()
    assert memory is not None
    result = seconds(lambda: program(params, tables, taps, hidden), command.repeats)
    result["temporaries_gb"] = memory.temp_size_in_bytes / 1e9
    result["gflop"] = _gflop(config, batch, command)
    result["gflop_per_s"] = result["gflop"] / result["minimum"]
    return result


def _gflop(config: DrafterConfig, batch: int, command: Train) -> float:
    """Billions of operations in the products that forward and backward need, none of them counted twice.

    A product with a trained weight counts three times (forward, input's gradient, weight's gradient), one with the
    frozen head twice, the teacher's logits once.
    """
    d, size = config.decoder, config.block_size
    hidden, vocab, rank = d.hidden_size, d.vocab_size, config.markov_rank
    queries, keys = d.num_heads * d.head_dim, d.num_kv_heads * d.head_dim
    context = batch * command.length
    slots = size * (batch * command.anchors if config.kind == "dspark" else context)
    wide = hidden if config.kind == "dspark" else 2 * hidden  # EAGLE-3 attends over embedding and state side by side
    layer = wide * (queries + 2 * keys) + queries * hidden + 3 * hidden * d.intermediate_size
    attention = 2 * queries * (command.length + size)
    total = 3 * slots * d.num_layers * (layer + attention)
    total += 3 * context * len(config.target_layer_ids) * hidden * hidden
    if config.kind == "dspark":
        total += 3 * context * d.num_layers * 2 * hidden * keys + 3 * slots * vocab * rank
    teachers = slots if config.kind == "dspark" else context
    total += vocab * hidden * (2 * slots + teachers)
    return 2 * total / 1e9


def _block_objective(functions, params, tables, tokens, positions, segments, mask, taps, hidden, command: Train) -> Any:
    assert isinstance(functions, DSparkFunctions)
    draws = row_keys(0, jnp.int32(0), jnp.arange(tokens.shape[0]))
    anchors = draw_anchors(mask, segments, draws, command.anchors)
    labels = block_labels(anchors, tokens, mask, segments, functions.config.block_size)
    outputs = functions.train_blocks(
        params, tables, taps, tokens, positions, segments, anchors.index, anchors.keep, labels.tokens
    )
    config = LossConfig()
    denominator = jnp.sum(slot_weights(labels, config.loss_decay))
    return block_loss(
        outputs,
        params,
        tables,
        hidden,
        anchors,
        labels,
        config,
        denominator,
        chunk=command.chunk,
        dtype=functions.dtype,
    )[0]


def _plain_product(command: Train) -> dict[str, float]:
    """A product of block states with the head, the shape most of a step consists of."""
    a, b = (jnp.ones((rows, 576), jnp.dtype(command.dtype)) for rows in (896, 49152))
    product = jax.jit(lambda a, b: jnp.einsum("td,vd->tv", a, b, preferred_element_type=jnp.float32))
    result = seconds(lambda: product(a, b), command.repeats)
    result["gflop_per_s"] = 2 * 896 * 576 * 49152 / result["minimum"] / 1e9
    return result
