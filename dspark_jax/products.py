"""Products with weights in checkpoint layout, `[out, in]`."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

_FEW_ROWS = 32
"""Inputs up to which a CPU multiplies faster with the weight as the left operand."""
_TILE = 16
"""Up to it, 2, 4, 8 and 16 inputs take less time than the numbers between them."""


def product(x: Float[Array, "... I"], weight: Float[Array, "O I"], dtype: Any) -> Float[Array, "... O"]:
    """Compute `x @ weight.T` in `dtype` with float32 accumulation, forward and backward.

    Args:
        x: inputs, any leading axes.
        weight: `[out, in]`.
        dtype: type of the operands; the result has it too, the weight's gradient is in the weight's own type.
    """
    if dtype == jnp.float32:
        return float32_product(x.astype(dtype), weight.astype(dtype))
    return _low_precision_product(x.astype(dtype), weight)


def float32_product(x: Float[Array, "... I"], weight: Float[Array, "O I"]) -> Float[Array, "... O"]:
    """Compute `x @ weight.T`, accumulated and returned in float32 whatever the type of the operands.

    Verification multiplies a few rows with every weight, which should take as long as reading the weights once. CPUs
    come near that only if the weight is the left operand: a step over eight rows then takes 1.5 times one over one row,
    not 3.1 times (`bench decode`, two cores of an AMD EPYC).
    """
    few = 1 < math.prod(x.shape[:-1]) <= _FEW_ROWS
    if few and x.dtype == weight.dtype == jnp.float32:
        return jax.lax.platform_dependent(x, weight, cpu=_weight_first, default=_contract)
    return _contract(x, weight)


def _contract(x: Float[Array, "... I"], weight: Float[Array, "O I"]) -> Float[Array, "... O"]:
    return jnp.einsum("...i,oi->...o", x, weight, preferred_element_type=jnp.float32)


def _weight_first(x: Float[Array, "... I"], weight: Float[Array, "O I"]) -> Float[Array, "... O"]:
    rows = x.reshape(-1, x.shape[-1])
    count = len(rows)
    if count < _TILE:
        rows = jnp.pad(rows, ((0, (1 << (count - 1).bit_length()) - count), (0, 0)))
    # The compiler would fold the transpositions into the product and swap its operands again, but for the barriers.
    columns = jax.lax.optimization_barrier(rows.T)
    out = jax.lax.optimization_barrier(weight @ columns)
    return out[:, :count].T.reshape(*x.shape[:-1], weight.shape[0])


@jax.custom_vjp
def _low_precision_product(x: Float[Array, "... I"], weight: Float[Array, "O I"]) -> Float[Array, "... O"]:
    # Accumulating in float32 and rounding once is both more exact and, on CPUs with matrix units, several times faster.
    return float32_product(x, weight.astype(x.dtype)).astype(x.dtype)


def _product_forward(x, weight):
    return _low_precision_product(x, weight), (x, weight)


def _product_backward(residuals, cotangent):
    x, weight = residuals
    cotangent = cotangent.astype(x.dtype)
    dx = jnp.einsum("...o,oi->...i", cotangent, weight.astype(x.dtype), preferred_element_type=jnp.float32).astype(
        x.dtype
    )
    rows, outs = x.reshape(-1, x.shape[-1]), cotangent.reshape(-1, cotangent.shape[-1])
    dw = jnp.einsum("to,ti->oi", outs, rows, preferred_element_type=jnp.float32).astype(weight.dtype)
    return dx, dw


_low_precision_product.defvjp(_product_forward, _product_backward)
