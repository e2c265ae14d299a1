from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.config import RopeConfig
from dspark_jax.nn.rope import inverse_frequencies, rotate

DEFAULT = RopeConfig(theta=100.0)
LINEAR = RopeConfig(theta=100.0, kind="linear", factor=8.0)
PROPORTIONAL = RopeConfig(theta=100.0, kind="proportional", rotated=0.5)
LLAMA3 = RopeConfig(
    theta=500_000.0, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=512
)


def test_default_and_linear_by_hand():
    np.testing.assert_allclose(inverse_frequencies(DEFAULT, 4), [1.0, 0.1], rtol=1e-6)
    np.testing.assert_allclose(inverse_frequencies(LINEAR, 4), [0.125, 0.0125], rtol=1e-6)


def test_llama3_band_by_band():
    """Wavelengths under 128 stay, over 512 are stretched by 8, between them the two are blended."""
    plain = inverse_frequencies(RopeConfig(theta=500_000.0), 32).astype(np.float64)
    seen = set()
    for freq, got in zip(plain, inverse_frequencies(LLAMA3, 32), strict=True):
        wavelength = 2 * math.pi / freq
        if wavelength < 128:
            band, expected = "kept", freq
        elif wavelength > 512:
            band, expected = "stretched", freq / 8
        else:
            smooth = (512 / wavelength - 1) / 3
            band, expected = "blended", (1 - smooth) * freq / 8 + smooth * freq
        seen.add(band)
        assert got == pytest.approx(expected, rel=1e-5)
    assert seen == {"kept", "blended", "stretched"}


def test_proportional_by_hand():
    """A quarter of 8 pairs turns, at the frequencies that the first two of 8 have anyway; the others stand still."""
    config = RopeConfig(theta=10_000.0, kind="proportional", rotated=0.25)
    np.testing.assert_allclose(inverse_frequencies(config, 16), [1, 10**-0.5, 0, 0, 0, 0, 0, 0], rtol=1e-6)
    stretched = dataclasses.replace(config, factor=8.0)
    np.testing.assert_allclose(inverse_frequencies(stretched, 16)[:2], [1 / 8, 10**-0.5 / 8], rtol=1e-6)
    x = jnp.arange(16.0)[None, None]
    out = rotate(x, jnp.asarray([5]), config)
    still = [i for i in range(16) if i % 8 >= 2]
    np.testing.assert_array_equal(out[0, 0, jnp.asarray(still)], still)
    assert not np.allclose(out[0, 0, :2], x[0, 0, :2])


@pytest.mark.parametrize("config", [DEFAULT, LINEAR, LLAMA3, PROPORTIONAL], ids=lambda c: c.kind)
def test_rotation_pairs_the_halves(config):
    """Element i turns with element i + H/2, by position times frequency i; every head alike."""
    rng = np.random.default_rng(0)
    x, positions = rng.normal(size=(3, 2, 6)), np.array([0, 1, 7])
    out = np.asarray(rotate(jnp.asarray(x, jnp.float32), jnp.asarray(positions), config))
    angle = positions[:, None] * inverse_frequencies(config, 6)
    turned = (x[..., :3] + 1j * x[..., 3:]) * np.exp(1j * angle)[:, None, :]
    np.testing.assert_allclose(out, np.concatenate([turned.real, turned.imag], -1), atol=1e-5)
    np.testing.assert_allclose(out[0], x[0], atol=1e-6)


def test_products_depend_on_distance_only():
    rng = np.random.default_rng(1)
    q, k = (jnp.asarray(rng.normal(size=(1, 8)), jnp.float32) for _ in range(2))
    score = lambda a, b: float(jnp.sum(rotate(q, jnp.asarray(a), DEFAULT) * rotate(k, jnp.asarray(b), DEFAULT)))
    assert score(9, 4) == pytest.approx(score(25, 20), rel=1e-4)
    assert score(9, 4) != pytest.approx(score(4, 9), rel=1e-2)
