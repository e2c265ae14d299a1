"""That the safety nets of the test run are really up."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

from dspark_jax.sampling import residual


def test_shapes_in_signatures_are_checked():
    with pytest.raises(TypeCheckError, match="residual"):
        residual(jnp.zeros((2, 3)), jnp.zeros((2, 4)))


def test_warnings_of_our_own_modules_are_errors():
    with pytest.raises(UserWarning):
        warnings.warn_explicit("ours", UserWarning, "verify.py", 1, module="dspark_jax.spec.verify")
    with pytest.raises(DeprecationWarning):
        warnings.warn_explicit(
            "caused by a call of ours", DeprecationWarning, "verify.py", 1, module="dspark_jax.spec.verify"
        )


@pytest.mark.filterwarnings("default:theirs")
def test_warnings_of_libraries_are_not():
    with warnings.catch_warnings(record=True) as caught:
        warnings.warn_explicit("theirs", UserWarning, "library.py", 1, module="library")
    assert len(caught) == 1


def test_there_are_eight_devices_and_full_products():
    if jax.default_backend() == "cpu":
        assert jax.device_count() == 8
    x = jnp.full((2, 2), 1.0 + 2.0**-20)
    assert float((x @ jnp.eye(2))[0, 0]) == 1.0 + 2.0**-20
