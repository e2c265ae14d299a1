"""Sampling rules against literal numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import sampling
from dspark_jax.sampling import Purpose, make_sampling, probabilities, residual, sample


def law(p: list[float], **settings) -> np.ndarray:
    built = make_sampling(1, vocab_size=len(p), **settings)
    return np.asarray(probabilities(jnp.log(jnp.array([p])), built))[0]


@pytest.mark.parametrize(
    "settings, mode",
    [
        (dict(temperature=0.0), "greedy"),
        (dict(temperature=0.0, top_k=2, top_p=0.5, min_p=0.1), "greedy"),
        (dict(temperature=[0.0, 9.9e-6, 0.0]), "greedy"),
        (dict(temperature=[0.0, 1.0, 1e-6]), "plain"),
        (dict(temperature=1.0, top_k=5, top_p=1.0, min_p=0.0), "plain"),
        (dict(temperature=[0.0, 1.0, 1.0], top_k=[2, None, None]), "plain"),
        (dict(temperature=[0.0, 1.0, 1.0], top_k=[None, 2, None]), "filtered"),
        (dict(temperature=1.0, top_p=0.9), "filtered"),
        (dict(temperature=1.0, min_p=0.1), "filtered"),
    ],
)
def test_the_narrowest_mode_is_chosen(settings, mode):
    assert make_sampling(3, vocab_size=5, **settings).mode == mode


def test_absent_filters_become_neutral_values():
    built = make_sampling(2, vocab_size=7, temperature=[0.0, 0.7], top_k=[None, 3])
    np.testing.assert_array_equal(built.top_k, [7, 3])
    np.testing.assert_array_equal(built.top_p, [1, 1])
    np.testing.assert_array_equal(built.min_p, [0, 0])


@pytest.mark.parametrize(
    "settings, name",
    [
        (dict(temperature=-1.0), "temperature is -1.0"),
        (dict(temperature=float("nan")), "temperature is nan"),
        (dict(temperature=float("inf")), "temperature is inf"),
        (dict(temperature=1.0, top_k=0), "top_k is 0"),
        (dict(temperature=1.0, top_k=-1), "top_k is -1"),
        (dict(temperature=1.0, top_p=0.0), "top_p is 0.0"),
        (dict(temperature=1.0, top_p=1.5), "top_p is 1.5"),
        (dict(temperature=1.0, min_p=1.0), "min_p is 1.0"),
        (dict(temperature=1.0, min_p=-0.1), "min_p is -0.1"),
        (dict(temperature=[1.0]), "temperature has 1 entries for 2 slots"),
    ],
)
def test_settings_out_of_range_are_refused(settings, name):
    with pytest.raises(ValueError, match=name):
        make_sampling(2, vocab_size=5, **settings)


def test_probabilities_do_not_exist_in_greedy_mode():
    with pytest.raises(ValueError, match="compare argmax"):
        probabilities(jnp.zeros((1, 3)), make_sampling(1, vocab_size=3, temperature=0.0))


def test_temperature():
    np.testing.assert_allclose(law([0.5, 0.3, 0.2], temperature=0.5), np.array([25, 9, 4]) / 38, atol=1e-6)
    np.testing.assert_allclose(law([0.5, 0.3, 0.2], temperature=1.0), [0.5, 0.3, 0.2], atol=1e-6)


@pytest.mark.parametrize("mode", ["plain", "filtered"])
@pytest.mark.parametrize("temperature", [0.0, 1e-6, 9.9e-6])
def test_br21_tiny_temperature_is_greedy(mode, temperature):
    built = make_sampling(1, vocab_size=3, temperature=temperature).replace(mode=mode)
    np.testing.assert_array_equal(probabilities(jnp.array([[1.0, 1.001, 0.5]]), built)[0], [0, 1, 0])


@pytest.mark.parametrize("mode", ["plain", "filtered"])
def test_br21_at_the_bound_the_softmax_is_finite(mode):
    built = make_sampling(1, vocab_size=3, temperature=1e-5).replace(mode=mode)
    assert not sampling.is_greedy(built)[0]
    np.testing.assert_allclose(probabilities(jnp.array([[1.0, 1.001, 0.5]]), built)[0], [0, 1, 0], atol=1e-6)


@pytest.mark.parametrize("mode", ["plain", "filtered"])
@pytest.mark.parametrize("temperature", [1e-6, 1e-5, 1.0])
def test_br21_huge_logits_do_not_overflow(mode, temperature):
    built = make_sampling(1, vocab_size=3, temperature=temperature).replace(mode=mode)
    np.testing.assert_array_equal(probabilities(jnp.array([[1e33, 0.0, -1e33]]), built)[0], [1, 0, 0])


def test_br21_mixed_batch_each_row_by_its_own_rule():
    logits = jnp.tile(jnp.array([1.0, 1.001, 0.5]), (3, 1))
    probs = probabilities(logits, make_sampling(3, vocab_size=3, temperature=[0.0, 1e-6, 1.0]))
    np.testing.assert_array_equal(probs[:2], [[0, 1, 0], [0, 1, 0]])
    np.testing.assert_allclose(probs[2], jax.nn.softmax(logits[2]), atol=1e-6)


def test_br22_numbers():
    np.testing.assert_allclose(law([0.5, 0.3, 0.2], temperature=1.0, top_k=2), [0.625, 0.375, 0], atol=1e-6)
    # Temperature first: (.66, .24, .11), of which top-p .6 keeps one. The other order would give (.735, .265, 0).
    np.testing.assert_allclose(law([0.5, 0.3, 0.2], temperature=0.5, top_p=0.6), [1, 0, 0], atol=1e-6)


def test_top_p_counts_what_top_k_left():
    p = [0.4, 0.3, 0.2, 0.1]
    # After top-k 3 the masses are 4/9, 3/9, 2/9: .75 is reached by two tokens, of the raw masses it would take three.
    np.testing.assert_allclose(law(p, temperature=1.0, top_k=3, top_p=0.75), [4 / 7, 3 / 7, 0, 0], atol=1e-6)
    np.testing.assert_allclose(law(p, temperature=1.0, top_p=0.75), [4 / 9, 3 / 9, 2 / 9, 0], atol=1e-6)


def test_min_p_is_relative_to_the_most_likely_token():
    np.testing.assert_allclose(law([0.4, 0.3, 0.2, 0.1], temperature=1.0, min_p=0.6), [4 / 7, 3 / 7, 0, 0], atol=1e-6)


def test_ties_are_broken_by_id():
    np.testing.assert_allclose(law([0.25] * 4, temperature=1.0, top_k=2), [0.5, 0.5, 0, 0], atol=1e-6)
    np.testing.assert_allclose(law([0.25] * 4, temperature=1.0, top_p=0.7), [1 / 3] * 3 + [0], atol=1e-6)
    np.testing.assert_allclose(law([0.1, 0.4, 0.4, 0.1], temperature=1.0, top_k=1), [0, 1, 0, 0], atol=1e-6)


def test_filters_agree_with_sorting():
    logits = jax.random.normal(jax.random.key(1), (6, 5, 97)) * 4
    top_k, top_p, min_p = (
        [3, None, 11, None, 97, 1],
        [None, 0.3, 0.8, 0.999, 1.0, None],
        [None, None, 0.05, None, 0.2, None],
    )
    temperature = [0.3, 0.8, 1.0, 1.7, 1.0, 1.0]
    built = make_sampling(6, vocab_size=97, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    actual = np.asarray(probabilities(logits, built))
    for s in range(6):
        for row, got in zip(np.asarray(logits[s], np.float64), actual[s], strict=True):
            order = np.argsort(-row, kind="stable")
            p = np.exp((row - row.max()) / temperature[s])[order]
            p[top_k[s] or 97 :] = 0
            p /= p.sum()
            p[np.cumsum(p) - p >= (top_p[s] or 1.0)] = 0
            p[p < p[0] * (min_p[s] or 0.0)] = 0
            expected = np.zeros(97)
            expected[order] = p / p.sum()
            np.testing.assert_allclose(got, expected, atol=1e-6)


def test_neutral_filters_change_nothing_at_all():
    logits = jax.random.normal(jax.random.key(2), (2, 1001)) * 20
    plain = make_sampling(2, vocab_size=1001, temperature=[0.7, 0.0])
    np.testing.assert_array_equal(probabilities(logits, plain), probabilities(logits, plain.replace(mode="filtered")))


def test_bfloat16_logits_are_cast_before_anything_else():
    logits = jnp.array([[1.0, 2.0, 3.0]], jnp.bfloat16)
    built = make_sampling(1, vocab_size=3, temperature=0.7)
    probs = probabilities(logits, built)
    assert probs.dtype == jnp.float32
    np.testing.assert_array_equal(probs, probabilities(logits.astype(jnp.float32), built))


@pytest.mark.parametrize("mode", ["plain", "filtered"])
def test_a_nan_row_leaves_the_others_alone(mode):
    built = make_sampling(3, vocab_size=5, temperature=[1.0, 1.0, 0.0], top_k=[2, 2, None]).replace(mode=mode)
    logits = jax.random.normal(jax.random.key(3), (3, 5))
    poisoned = probabilities(logits.at[1].set(jnp.nan), built)
    np.testing.assert_array_equal(poisoned[::2], probabilities(logits, built)[::2])
    ids = sample(poisoned, jnp.full(3, 0.5))
    assert 0 <= int(ids[1]) < 5


def test_inverse_cdf_by_hand():
    probs = jnp.tile(jnp.array([0.0, 0.25, 0.0, 0.5, 0.25, 0.0]), (6, 1))
    draws = jnp.array([0.0, 0.2499, 0.25, 0.7499, 0.75, 0.99999994])
    np.testing.assert_array_equal(sample(probs, draws), [1, 1, 3, 3, 4, 4])
    # Weights need not sum to one, and a number that reaches the total still gives a token that exists.
    np.testing.assert_array_equal(sample(3 * probs, draws), [1, 1, 3, 3, 4, 4])
    np.testing.assert_array_equal(sample(probs[:1], jnp.array([1.0])), [4])


def test_sample_never_returns_an_impossible_token():
    """Parallel cumulative sums are not exactly flat over zeros: many small numbers with zeros between."""
    size = 4099
    probs = jax.random.uniform(jax.random.key(4), (64, size)) * (
        jax.random.uniform(jax.random.key(5), (64, size)) < 0.01
    )
    draws = jnp.concatenate([jnp.linspace(0.0, 1.0, 32, endpoint=False), jnp.full(32, 1 - 2**-24)])
    ids = sample(probs, draws)
    assert np.all(np.take_along_axis(np.asarray(probs), np.asarray(ids)[:, None], 1) > 0)


def test_residual_by_hand():
    p = jnp.array([[0.1, 0.45, 0.45], [0.5, 0.5, 0.0], [0.2, 0.3, 0.5]])
    q = jnp.array([[0.6, 0.3, 0.1], [0.5, 0.5, 0.0], [0.0, 0.0, 0.0]])
    np.testing.assert_allclose(residual(p, q), [[0, 0.3, 0.7], [0.5, 0.5, 0], [0.2, 0.3, 0.5]], atol=1e-6)


def test_br24_every_draw_has_its_own_key():
    keys = sampling.request_keys(jnp.array([0, 1]))
    named = [
        jax.random.key_data(sampling.purpose_key(keys[r], position, purpose, k)).tobytes()
        for r in range(2)
        for position in range(3)
        for purpose in Purpose
        for k in range(3)
    ]
    assert len(Purpose) == 4
    assert len(set(named)) == len(named)


def test_draws_depend_on_their_name_alone():
    keys = sampling.request_keys(jnp.array([5, 6, 7]))
    positions, slots = jnp.array([3, 4, 9]), jnp.tile(jnp.arange(4), (3, 1))
    together = sampling.uniforms(keys, positions, Purpose.ACCEPT, slots)
    order = jnp.array([2, 0, 1])
    np.testing.assert_array_equal(
        sampling.uniforms(keys[order], positions[order], Purpose.ACCEPT, slots[:, :2]), together[order][:, :2]
    )
    single = jax.random.uniform(sampling.purpose_key(keys[1], 4, Purpose.ACCEPT, 2))
    assert single == together[1, 2]
