"""Any tiny decoder turned into a Gemma-4 one of the same width and depth."""

from __future__ import annotations

import dataclasses
from typing import Any

from dspark_jax.config import AttentionShape, DecoderConfig, RopeConfig


def gemma4(base: DecoderConfig, **changes: Any) -> DecoderConfig:
    """Every other layer sees a window; the full ones have one K/V head, twice as wide, whose keys are its values."""
    kinds = ("sliding_attention", "full_attention")
    full = AttentionShape(
        num_kv_heads=1, head_dim=2 * base.head_dim, keys_are_values=True,
        rope=RopeConfig(theta=1e6, kind="proportional", rotated=0.5),
    )  # fmt: skip
    family: dict[str, Any] = {
        "family": "gemma4_text", "layer_types": tuple(kinds[i % 2] for i in range(base.num_layers)),
        "sliding_window": 5, "full_attention": full, "qk_norm": True, "value_norm": True, "attention_scale": 1.0,
        "activation": "gelu_tanh", "sandwich_norms": True, "layer_scalar": True,
        "embed_scale": float(base.hidden_size) ** 0.5, "soft_cap": 4.0, "tie_word_embeddings": True,
    }  # fmt: skip
    return dataclasses.replace(base, **{**family, **changes})
