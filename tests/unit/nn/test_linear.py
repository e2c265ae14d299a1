from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.nn import run
from dspark_jax.nn.linear import Linear, RMSNorm


def test_linear_names_and_bias():
    module = Linear(3, use_bias=True)
    params = {"weight": jnp.asarray([[1.0, 0], [0, 2], [1, 1]]), "bias": jnp.asarray([0.5, 0, -1])}
    np.testing.assert_array_equal(run(module, params, jnp.asarray([[3.0, 4.0]])), [[3.5, 8, 6]])


def test_zero_init():
    params = Linear(2, zero_init=True).init(jax.random.key(0), jnp.ones((1, 3)))["params"]
    assert params["weight"].shape == (2, 3) and not np.any(np.asarray(params["weight"]))


def test_norm_multiplies_by_the_weight():
    """Llama, Qwen3 and Gemma-4; one plus the weight (Gemma 2 and 3) would give (1.69705, 3.39411) here."""
    out = run(RMSNorm(0.0), {"weight": jnp.asarray([1.0, 2.0])}, jnp.asarray([3.0, 4.0]))
    np.testing.assert_allclose(out, [0.848528, 2.262742], rtol=1e-6)


def test_norm_computes_in_float32():
    x = jnp.asarray([1e4, 1.0], jnp.bfloat16)
    out = run(RMSNorm(1e-6, jnp.bfloat16), {"weight": jnp.ones(2)}, x)
    exact = np.asarray(x, np.float64) / np.sqrt(np.mean(np.asarray(x, np.float64) ** 2))
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(out, np.float64), exact, rtol=2**-8)
