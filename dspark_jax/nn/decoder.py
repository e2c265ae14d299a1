"""Decoder layers of the Llama and Qwen3 families, shared by targets and drafters.

Parameter paths mirror checkpoint names: `layers_0/self_attn/q_proj/weight` is `layers.0.self_attn.q_proj.weight`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from dspark_jax.config import DecoderConfig
from dspark_jax.nn.attention import Attend, AttentionSpec
from dspark_jax.nn.linear import Linear, RMSNorm
from dspark_jax.nn.rope import rotate


class Attention(nn.Module):
    """Projections, norms and rotary embedding of one attention sublayer; `attend` does the rest."""

    config: DecoderConfig
    layer: int
    dtype: Any = jnp.float32

    def setup(self) -> None:
        """Declare sublayers and parameters."""
        c = self.config
        bias, std = c.attention_bias, c.initializer_range
        self.q_proj = Linear(c.num_heads * c.head_dim, bias, self.dtype, std)
        self.k_proj = Linear(c.num_kv_heads * c.head_dim, bias, self.dtype, std)
        self.v_proj = Linear(c.num_kv_heads * c.head_dim, bias, self.dtype, std)
        self.o_proj = Linear(c.hidden_size, bias, self.dtype, std)
        if c.qk_norm:
            self.q_norm = RMSNorm(c.rms_norm_eps, self.dtype)
            self.k_norm = RMSNorm(c.rms_norm_eps, self.dtype)

    @property
    def spec(self) -> AttentionSpec:
        """Static facts of this layer's attention."""
        return AttentionSpec(scale=self.config.head_dim**-0.5, window=self.config.window(self.layer))

    def query(self, x: Float[Array, "... I"], positions: Int[Array, "..."]) -> Float[Array, "... N H"]:
        """Queries: projected, normed, rotated."""
        q = self.q_proj(x).reshape(*x.shape[:-1], self.config.num_heads, self.config.head_dim)
        return rotate(self.q_norm(q) if self.config.qk_norm else q, positions, self.config.rope)

    def key_value(
        self, x: Float[Array, "... I"], positions: Int[Array, "..."]
    ) -> tuple[Float[Array, "... K H"], Float[Array, "... K H"]]:
        """Keys (projected, normed, rotated) and values."""
        shape = (*x.shape[:-1], self.config.num_kv_heads, self.config.head_dim)
        k, v = self.k_proj(x).reshape(shape), self.v_proj(x).reshape(shape)
        return rotate(self.k_norm(k) if self.config.qk_norm else k, positions, self.config.rope), v

    def __call__(self, x: Float[Array, "... I"], positions: Int[Array, "..."], attend: Attend, cache: Any):
        """Attend and project back to the model width; returns `(out [..., D], cache)`."""
        k, v = self.key_value(x, positions)
        out, cache = attend(self.spec, self.query(x, positions), k, v, cache)
        return self.o_proj(out.reshape(*out.shape[:-2], -1)), cache


class Mlp(nn.Module):
    """SwiGLU feed-forward sublayer."""

    config: DecoderConfig
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Return `down(silu(gate(x)) * up(x))`."""
        c = self.config
        gate = Linear(c.intermediate_size, c.mlp_bias, self.dtype, c.initializer_range, name="gate_proj")(x)
        up = Linear(c.intermediate_size, c.mlp_bias, self.dtype, c.initializer_range, name="up_proj")(x)
        down = Linear(c.hidden_size, c.mlp_bias, self.dtype, c.initializer_range, name="down_proj")
        return down(jax.nn.silu(gate) * up)


class DecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward sublayers with residuals."""

    config: DecoderConfig
    layer: int
    dtype: Any = jnp.float32

    def setup(self) -> None:
        """Declare sublayers and parameters."""
        c = self.config
        self.input_layernorm = RMSNorm(c.rms_norm_eps, self.dtype)
        self.self_attn = Attention(c, self.layer, self.dtype)
        self.post_attention_layernorm = RMSNorm(c.rms_norm_eps, self.dtype)
        self.mlp = Mlp(c, self.dtype)

    def __call__(self, x: Float[Array, "... D"], positions: Int[Array, "..."], attend: Attend, cache: Any = None):
        """Run the layer; returns `(x [..., D], cache)`. The residual stream keeps the type of `x`."""
        out, cache = self.self_attn(self.input_layernorm(x), positions, attend, cache)
        x = x + out
        return x + self.mlp(self.post_attention_layernorm(x)), cache
