"""Decoder layers of the Llama, Qwen3 and Gemma-4 families, shared by targets and drafters.

Parameter paths mirror checkpoint names: `layers_0/self_attn/q_proj/weight` is `layers.0.self_attn.q_proj.weight`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from dspark_jax.config import Activation, AttentionShape, DecoderConfig
from dspark_jax.nn.attention import Attend, AttentionSpec
from dspark_jax.nn.linear import Linear, RMSNorm, rms_normalize
from dspark_jax.nn.rope import rotate

ACTIVATIONS: dict[Activation, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}
_CONSTANTS = ("layer_scalar",)


def is_constant(path: tuple[Any, ...]) -> bool:
    """Whether a parameter, by its path in the tree, is part of a checkpoint but never trained."""
    return bool(path) and getattr(path[-1], "key", None) in _CONSTANTS


class Attention(nn.Module):
    """Projections, norms and rotary embedding of one attention sublayer; `attend` does the rest."""

    config: DecoderConfig
    layer: int
    dtype: Any = jnp.float32

    def setup(self) -> None:
        """Declare sublayers and parameters."""
        c, shape = self.config, self.shape
        bias, std, width = c.attention_bias, c.initializer_range, shape.num_kv_heads * shape.head_dim
        self.q_proj = Linear(c.num_heads * shape.head_dim, bias, self.dtype, std)
        self.k_proj = Linear(width, bias, self.dtype, std)
        if not shape.keys_are_values:
            self.v_proj = Linear(width, bias, self.dtype, std)
        self.o_proj = Linear(c.hidden_size, bias, self.dtype, std)
        if c.qk_norm:
            self.q_norm = RMSNorm(c.rms_norm_eps, self.dtype)
            self.k_norm = RMSNorm(c.rms_norm_eps, self.dtype)

    @property
    def shape(self) -> AttentionShape:
        """Keys and values of this layer."""
        return self.config.attention(self.layer)

    @property
    def spec(self) -> AttentionSpec:
        """Static facts of this layer's attention."""
        scale = self.config.attention_scale
        return AttentionSpec(
            scale=self.shape.head_dim**-0.5 if scale is None else scale, window=self.config.window(self.layer)
        )

    def query(self, x: Float[Array, "... I"], positions: Int[Array, "..."]) -> Float[Array, "... N H"]:
        """Queries: projected, normed, rotated."""
        q = self.q_proj(x).reshape(*x.shape[:-1], self.config.num_heads, self.shape.head_dim)
        return rotate(self.q_norm(q) if self.config.qk_norm else q, positions, self.shape.rope)

    def key_value(
        self, x: Float[Array, "... I"], positions: Int[Array, "..."]
    ) -> tuple[Float[Array, "... K H"], Float[Array, "... K H"]]:
        """Keys (projected, normed, rotated) and values (projected, in Gemma-4 normed)."""
        shape = (*x.shape[:-1], self.shape.num_kv_heads, self.shape.head_dim)
        k = self.k_proj(x).reshape(shape)
        v = k if self.shape.keys_are_values else self.v_proj(x).reshape(shape)
        if self.config.value_norm:
            v = rms_normalize(v, self.config.rms_norm_eps).astype(self.dtype)
        return rotate(self.k_norm(k) if self.config.qk_norm else k, positions, self.shape.rope), v

    def __call__(self, x: Float[Array, "... I"], positions: Int[Array, "..."], attend: Attend, cache: Any):
        """Attend and project back to the model width; returns `(out [..., D], cache)`."""
        k, v = self.key_value(x, positions)
        out, cache = attend(self.spec, self.query(x, positions), k, v, cache)
        return self.o_proj(out.reshape(*out.shape[:-2], -1)), cache


class Mlp(nn.Module):
    """Gated feed-forward sublayer."""

    config: DecoderConfig
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Return `down(activation(gate(x)) * up(x))`."""
        c = self.config
        gate = Linear(c.intermediate_size, c.mlp_bias, self.dtype, c.initializer_range, name="gate_proj")(x)
        up = Linear(c.intermediate_size, c.mlp_bias, self.dtype, c.initializer_range, name="up_proj")(x)
        down = Linear(c.hidden_size, c.mlp_bias, self.dtype, c.initializer_range, name="down_proj")
        return down(ACTIVATIONS[c.activation](gate) * up)


class DecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward sublayers with residuals; in Gemma-4 normed on their way out too."""

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
        if c.sandwich_norms:
            self.pre_feedforward_layernorm = RMSNorm(c.rms_norm_eps, self.dtype)
            self.post_feedforward_layernorm = RMSNorm(c.rms_norm_eps, self.dtype)
        if c.layer_scalar:
            self.layer_scalar = self.param("layer_scalar", nn.initializers.ones, (1,), jnp.float32)

    def add(self, x: Float[Array, "... D"], attended: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """What follows attention: add it to the residual stream `x`, then the feed-forward sublayer."""
        if self.config.sandwich_norms:
            # Here the norm named after attention is attention's own, not the next sublayer's.
            x = x + self.post_attention_layernorm(attended)
            x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        else:
            x = x + attended
            x = x + self.mlp(self.post_attention_layernorm(x))
        if self.config.layer_scalar:
            x = x * jax.lax.stop_gradient(self.layer_scalar).astype(x.dtype)
        return x

    def __call__(self, x: Float[Array, "... D"], positions: Int[Array, "..."], attend: Attend, cache: Any = None):
        """Run the layer; returns `(x [..., D], cache)`. The residual stream keeps the type of `x`."""
        out, cache = self.self_attn(self.input_layernorm(x), positions, attend, cache)
        return self.add(x, out), cache
