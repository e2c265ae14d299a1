"""Rotary position embeddings."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dspark_jax.config import RopeConfig


def inverse_frequencies(config: RopeConfig, head_dim: int) -> np.ndarray:
    """Angular frequency of each pair, `[H/2]` float32, radians per position; 0 for pairs that do not turn."""
    freq = 1.0 / config.theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if config.kind == "linear":
        freq = freq / config.factor
    elif config.kind == "llama3":
        wavelength = 2 * math.pi / freq
        low = config.original_max_position / config.low_freq_factor
        high = config.original_max_position / config.high_freq_factor
        span = config.high_freq_factor - config.low_freq_factor
        smooth = (config.original_max_position / wavelength - config.low_freq_factor) / span
        blended = (1 - smooth) * freq / config.factor + smooth * freq
        freq = np.where(wavelength > low, freq / config.factor, np.where(wavelength < high, freq, blended))
    elif config.kind == "proportional":
        turned = int(config.rotated * head_dim // 2)
        freq = np.where(np.arange(head_dim // 2) < turned, freq / config.factor, 0.0)
    return freq.astype(np.float32)


def rotate(x: Float[Array, "... P H"], positions: Int[Array, "..."], config: RopeConfig) -> Float[Array, "... P H"]:
    """Rotate every head of `x` by its row's absolute position (first half paired with second half).

    Args:
        x: queries or keys, heads on the axis before the last.
        positions: one per row; its axes are the leading axes of `x`.
        config: frequencies.
    """
    angles = positions[..., None].astype(jnp.float32) * inverse_frequencies(config, x.shape[-1])
    cos, sin = jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
