"""Linear layers and norms."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from dspark_jax.products import product


class Linear(nn.Module):
    """Affine map; parameter `weight` is `[out, in]` as in checkpoints, `bias` `[out]`."""

    features: int
    use_bias: bool = False
    dtype: Any = jnp.float32
    stddev: float = 0.02
    zero_init: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
        """Return `x @ weight.T + bias`."""
        init = nn.initializers.zeros if self.zero_init else nn.initializers.normal(self.stddev)
        out = product(x, self.param("weight", init, (self.features, x.shape[-1]), jnp.float32), self.dtype)
        if self.use_bias:
            out = out + self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32).astype(self.dtype)
        return out


def rms_normalize(x: Float[Array, "... D"], eps: float) -> Float[Array, "... D"]:
    """Divide by the root mean square of the last axis, in float32 and returned as such."""
    x32 = x.astype(jnp.float32)
    return x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)


class RMSNorm(nn.Module):
    """Root-mean-square norm in float32 times `weight` (as in Llama, Qwen3 and Gemma-4; not one plus the weight)."""

    eps: float
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Return the normed input."""
        weight = self.param("weight", nn.initializers.ones, (x.shape[-1],), jnp.float32)
        return (rms_normalize(x, self.eps) * weight.astype(jnp.float32)).astype(self.dtype)
