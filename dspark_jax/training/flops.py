"""Operations of a train step: those its algorithm needs, and those its program asks for."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jax.extend.core import jaxprs_in_params

from dspark_jax.config import DecoderConfig, DrafterConfig
from dspark_jax.training.config import TrainConfig, drafter_config


@dataclasses.dataclass(frozen=True)
class ModelFlops:
    """Operations (2 for a multiplication with its addition) in the products of one step over its whole batch.

    Nothing is counted twice, and attention counts the pairs its mask leaves (half of a causal square; anchors see half
    of their row on average). A product with trained weights counts three times: forward, the input's gradient, the
    weight's gradient. Norms, softmaxes and the optimizer are left out.

    Attributes:
        target: forward pass of the frozen target's layers, 2 * tokens * (weights + attention).
        drafter: 3 * forward pass of the drafter: fusion of the taps, context keys and values, layers, attention.
        loss: vocabulary products: the head twice a slot (forward, hidden's gradient), W2 three times, the teacher's
            logits once.
    """

    target: float
    drafter: float
    loss: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.target + self.drafter + self.loss


def model_flops(config: TrainConfig, target: DecoderConfig) -> ModelFlops:
    """Count what one step of a run needs.

    Args:
        config: the run.
        target: shape of its target; it runs in the step unless the run reads a feature cache.
    """
    shape, length = drafter_config(config, target), config.sequence_length
    tokens = config.batch_size * length
    layers = range(target.num_layers)
    forward = sum(layer_weights(target, i) + _attention(target, i, length, length / 2) for i in layers) * tokens
    online = config.features_cache is None
    drafter, loss = _block_drafter(config, shape) if shape.kind == "dspark" else _autoregressive_drafter(config, shape)
    return ModelFlops(target=2 * forward if online else 0.0, drafter=2 * 3 * drafter, loss=2 * loss)


def layer_weights(decoder: DecoderConfig, layer: int = 0, *, width: int | None = None) -> int:
    """Weights in the products of one decoder layer; `width` is what queries, keys and values read, by default D."""
    queries = decoder.num_heads * decoder.attention(layer).head_dim
    attention = (width or decoder.hidden_size) * (queries + _key_value_width(decoder, layer))
    return attention + decoder.hidden_size * (queries + 3 * decoder.intermediate_size)


def _key_value_width(decoder: DecoderConfig, layer: int) -> int:
    """Outputs of the k and v projections together."""
    shape = decoder.attention(layer)
    return shape.num_kv_heads * shape.head_dim * (1 if shape.keys_are_values else 2)


def traced_flops(jaxpr: Any) -> float:
    """Operations in the products of a program as it was written: loops times their length, branches at their dearest,
    kernels as they declare themselves.

    Args:
        jaxpr: closed, over global arrays; what a compiler recomputes or leaves out later is not in it.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    total = 0.0
    for equation in jaxpr.eqns:
        name, parameters = equation.primitive.name, equation.params
        if name == "dot_general":
            total += _dot_flops(equation)
        elif name == "pallas_call":
            declared = parameters["cost_estimate"]
            total += 0 if declared is None else declared.flops
        elif name == "cond":
            total += max(traced_flops(branch) for branch in parameters["branches"])
        else:
            inner = sum(traced_flops(x) for x in jaxprs_in_params(parameters))
            # The body of a shard_map is what one device does.
            times = parameters["length"] if name == "scan" else parameters["mesh"].size if name == "shard_map" else 1
            total += inner * times
    return total


def _dot_flops(equation: Any) -> float:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left, out = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    return 2.0 * math.prod(out) * math.prod(left[i] for i in contracted)


def _attention(decoder: DecoderConfig, layer: int, length: int, keys: float) -> float:
    """Multiplications of scores and weighted values of one query position of one layer.

    Args:
        decoder, layer: whose.
        length: of the row; in it a window leaves `window - window^2 / (2 length)` of the `length / 2` keys on average.
        keys: keys on average without a window.
    """
    window = decoder.window(layer)
    if window is not None and window < length:
        keys = keys - length / 2 + window - window**2 / (2 * length)
    return 2 * decoder.num_heads * decoder.attention(layer).head_dim * keys


def _block_drafter(config: TrainConfig, shape: DrafterConfig) -> tuple[float, float]:
    """Multiplications of a parallel drafter's forward pass and of its loss."""
    d, size, length = shape.decoder, shape.block_size, config.sequence_length
    tokens, slots = config.batch_size * length, config.batch_size * shape.num_anchors * size
    layers = range(d.num_layers)
    forward = slots * sum(layer_weights(d, i) + _attention(d, i, length, length / 2 + size) for i in layers)
    injected = sum(_key_value_width(d, i) for i in layers)
    forward += tokens * d.hidden_size * (len(shape.target_layer_ids) * d.hidden_size + injected)
    teacher = config.loss.tv or config.loss.confidence
    loss = slots * d.vocab_size * (d.hidden_size * (3 if teacher else 2) + 3 * shape.markov_rank)
    return float(forward), float(loss)


def _autoregressive_drafter(config: TrainConfig, shape: DrafterConfig) -> tuple[float, float]:
    """The same for EAGLE-3 and MTP, as if every position were supervised."""
    d, steps, length = shape.decoder, shape.block_size, config.sequence_length
    tokens = config.batch_size * length
    layer = layer_weights(d, width=2 * d.hidden_size) + _attention(d, 0, length, length / 2 + (steps - 1) / 2)
    forward = tokens * (steps * layer + shape.feature_width * d.hidden_size)
    return float(forward), float(tokens * d.vocab_size * d.hidden_size * (2 * steps + 1))
