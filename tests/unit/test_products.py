from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.products import float32_product, product


def operands():
    rng = np.random.default_rng(0)
    return (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((2, 3, 16), (5, 16), (2, 3, 5)))


@pytest.mark.parametrize("leading", [(), (1,), (2, 3), (32,), (33,), (0,)])
def test_float32_product_and_gradients(leading):
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(*leading, 16)).astype(np.float32), rng.normal(size=(5, 16)).astype(np.float32)
    out, backward = jax.vjp(jax.jit(lambda x, w: product(x, w, jnp.float32)), x, weight)
    np.testing.assert_allclose(out, x @ weight.T, atol=1e-5)
    cotangent = rng.normal(size=out.shape).astype(np.float32)
    dx, dw = backward(jnp.asarray(cotangent))
    np.testing.assert_allclose(dx, cotangent @ weight, atol=1e-5)
    np.testing.assert_allclose(dw, cotangent.reshape(-1, 5).T @ x.reshape(-1, 16), atol=1e-4)


@pytest.mark.parametrize(("rows", "weight_first"), [(1, False), (2, True), (32, True), (33, False)])
def test_a_few_rows_have_the_weight_as_left_operand_on_a_cpu(rows, weight_first):
    """What the compiled product really does, as a compiler may swap operands that it can transpose for nothing."""
    x, weight = jnp.ones((rows, 576)), jnp.ones((1536, 576))
    text = jax.jit(float32_product).lower(x, weight).compile().as_text()
    assert (f"f32[1536,{rows}]" in text) is weight_first


def test_bfloat16_product_accumulates_in_float32_both_ways():
    """Rounded operands, exact sums: a bfloat16 accumulation of 16 terms would miss these bounds."""
    x, weight, cotangent = operands()

    @jax.jit
    def run_product(x, weight, cotangent):
        out, backward = jax.vjp(lambda x, w: product(x, w, jnp.bfloat16), x, weight)
        return out, *backward(cotangent.astype(out.dtype))

    out, dx, dw = run_product(x, weight, cotangent)
    assert out.dtype == jnp.bfloat16 and dx.dtype == dw.dtype == jnp.float32, "gradients come in the inputs' own types"
    low = lambda a: np.asarray(a.astype(jnp.bfloat16), np.float64)
    half = 2.0**-8
    np.testing.assert_allclose(np.asarray(out, np.float64), low(x) @ low(weight).T, rtol=half, atol=1e-6)
    np.testing.assert_allclose(dx, low(cotangent) @ low(weight), rtol=half, atol=1e-6)
    exact = np.einsum("bto,bti->oi", low(cotangent), low(x))
    np.testing.assert_allclose(dw, exact, rtol=1e-6, atol=1e-6)
