"""Target families against the reference's numbers: taps, last hidden, logits, padding, cached decoding."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from goldens import ABSENT, golden_cases

from dspark_jax.huggingface import SafetensorsFolder, decoder_config, read_json
from dspark_jax.nn.attention import make_plan
from dspark_jax.target.loading import build_params
from dspark_jax.target.transformer import create_caches, forward_ragged, forward_rows
from dspark_jax.types import RaggedTokens

# What comes later must be refused by name, not half done.
LATER = {
    "target_gemma3": "model_type 'gemma3_text' is not supported",
    "target_gemma4_moe": "num_experts = 6 changes the mathematics and is not implemented",
    "target_gemma4_ple": "hidden_size_per_layer_input = 8 changes the mathematics and is not implemented",
    "target_qwen3_moe": "model_type 'qwen3_moe' is not supported",
}
FOLDERS = golden_cases("target_*", without=(*LATER, "target_cache"))
by_name = pytest.mark.parametrize("folder", FOLDERS, ids=lambda p: p.name)


def tolerance(folder):
    """Gemma-4's attention scores are not scaled down: the reference itself is less exact there (its README)."""
    return 3e-4 if "gemma4" in folder.name else 1e-4


def load(folder):
    config = decoder_config(read_json(folder / "config.json"), str(folder / "config.json"))
    files = SafetensorsFolder(folder)
    params, tables = build_params(config, {n: files.read(n) for n in files.names()}, jnp.float32, str(folder))
    return config, params, tables


@by_name
def test_target_matches_reference(folder):
    config, params, tables = load(folder)
    inputs, expected = np.load(folder / "inputs.npz"), np.load(folder / "expected.npz")
    tokens = jnp.asarray(inputs["full_input_ids"], jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    taps = tuple(range(-1, config.num_layers - 1))
    features = forward_rows(config, params, tables, tokens, jnp.ones_like(tokens), positions, taps)
    atol = tolerance(folder)
    raw = np.split(np.asarray(features.taps), len(taps), axis=-1)
    np.testing.assert_allclose(raw[0], expected["full_embed_out"], atol=1e-6)
    for i, layer in enumerate(raw[1:]):
        np.testing.assert_allclose(layer, expected["full_layer_outputs_raw"][i], atol=atol, err_msg=f"layer {i}")
    np.testing.assert_allclose(features.last_hidden, expected["full_last_hidden_state"], atol=atol)
    np.testing.assert_allclose(tables.logits(features.last_hidden), expected["full_logits"], atol=atol)


@by_name
def test_padding_changes_nothing(folder):
    config, params, tables = load(folder)
    inputs, expected = np.load(folder / "inputs.npz"), np.load(folder / "expected.npz")
    valid = jnp.asarray(inputs["pad_attention_mask"], jnp.int32)
    tokens = jnp.asarray(inputs["pad_input_ids"], jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    hidden = forward_rows(config, params, tables, tokens, valid, positions).last_hidden
    logits = np.asarray(tables.logits(hidden)) * np.asarray(valid)[..., None]
    np.testing.assert_allclose(logits, expected["pad_logits"], atol=tolerance(folder))


@by_name
def test_cached_decoding_matches_reference(folder):
    """Prefill 9, a chunk of 4, one token: the same ragged call each time, both rows in one batch with padding."""
    config, params, tables = load(folder)
    inputs, expected = np.load(folder / "inputs.npz"), np.load(folder / "expected.npz")
    ids = np.asarray(inputs["decode_input_ids"], np.int32)
    caches = create_caches(config, 3, 17)
    done = 0
    for step, width in enumerate((9, 4, 1)):
        pad = np.zeros(2, np.int32)
        batch = RaggedTokens(
            tokens=jnp.concatenate([ids[0, done : done + width], ids[1, done : done + width], pad]),
            slots=jnp.concatenate([np.full(width, 2, np.int32), np.full(width, 0, np.int32), pad + 3]),
            positions=jnp.concatenate([np.arange(done, done + width, dtype=np.int32)] * 2 + [pad]),
        )
        features, caches = forward_ragged(config, params, tables, caches, make_plan(batch, 3, width + 1))
        logits = np.asarray(tables.logits(features.last_hidden))
        got = np.stack([logits[:width], logits[width : 2 * width]])
        np.testing.assert_allclose(got, expected[f"decode{step}_logits"], atol=tolerance(folder))
        done += width
    assert not np.any(np.asarray(caches[0].k[1])), "padding rows must not write"


@pytest.mark.parametrize("name", LATER)
def test_later_families_are_refused_by_name(name):
    folders = golden_cases(name)
    if not folders:
        pytest.skip(ABSENT)
    with pytest.raises(ValueError, match=LATER[name]):
        load(folders[0])
