from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from dspark_jax.config import RopeConfig
from dspark_jax.huggingface import (
    SafetensorsFolder,
    decoder_config,
    decoder_json,
    read_json,
    resolve_folder,
    rope_config,
    rope_keys,
)

CONFIG = {
    "model_type": "qwen3", "vocab_size": 11, "hidden_size": 12, "intermediate_size": 14, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "max_position_embeddings": 64,
}  # fmt: skip
GEMMA4 = {
    "model_type": "gemma4_text", "vocab_size": 11, "hidden_size": 16, "intermediate_size": 14, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "global_head_dim": 8,
    "num_global_key_value_heads": 1, "attention_k_eq_v": True, "rms_norm_eps": 1e-6, "max_position_embeddings": 64,
    "hidden_activation": "gelu_pytorch_tanh", "final_logit_softcapping": 30.0, "sliding_window": 4,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "hidden_size_per_layer_input": 0,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}  # fmt: skip
LLAMA3 = RopeConfig(
    theta=5e5, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64
)


PROPORTIONAL = RopeConfig(theta=1e6, kind="proportional", factor=2.0, rotated=0.25)


@pytest.mark.parametrize(
    "rope", [RopeConfig(theta=1e6), RopeConfig(theta=1e4, kind="linear", factor=8.0), LLAMA3, PROPORTIONAL]
)
def test_older_and_newer_rope_keys_parse_equal(rope):
    keys = rope_keys(rope)
    older = {k: keys[k] for k in ("rope_theta", "rope_scaling")}
    newer = {"rope_parameters": keys["rope_parameters"]}
    assert rope_config(older, "old") == rope_config(newer, "new") == rope_config(keys, "both") == rope


def test_oldest_name_of_the_rope_type():
    assert rope_config({"rope_scaling": {"type": "linear", "factor": 2.0}}, "x") == RopeConfig(kind="linear", factor=2)


def test_unknown_rope_is_refused_by_name():
    with pytest.raises(ValueError, match="here: rope type 'yarn' is not implemented"):
        rope_config({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "here")
    with pytest.raises(
        ValueError, match=r"here: partial_rotary_factor = 0.5 is not implemented for rope type 'default'"
    ):
        rope_config({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "here")


def test_defaults():
    config = decoder_config(CONFIG)
    assert config.head_dim == 3 and config.qk_norm and not config.tie_word_embeddings and config.layer_types == ()
    bare = {k: v for k, v in CONFIG.items() if k != "num_key_value_heads"}
    assert decoder_config(bare).num_kv_heads == 4
    assert not decoder_config({**CONFIG, "model_type": "llama"}).qk_norm
    assert decoder_config({**CONFIG, "head_dim": 16}).head_dim == 16


@pytest.mark.parametrize(
    "key, value",
    [
        ("hidden_act", "gelu"),
        ("final_logit_softcapping", 30.0),
        ("attn_logit_softcapping", 50.0),
        ("partial_rotary_factor", 0.5),
        ("num_experts", 8),
        ("query_pre_attn_scalar", 24),
        ("quantization_config", {"bits": 4}),
        ("residual_multiplier", 0.2),
        ("logits_scaling", 8.0),
        ("no_rope_layers", [0, 1]),
    ],
)
def test_a_key_that_changes_the_mathematics_is_refused_by_name(key, value):
    with pytest.raises(ValueError, match=f"here: {key} = .*changes the mathematics"):
        decoder_config({**CONFIG, key: value}, "here")


@pytest.mark.parametrize("key, value", [("hidden_act", "silu"), ("partial_rotary_factor", 1.0), ("num_experts", 0)])
def test_the_same_keys_switched_off_are_fine(key, value):
    assert decoder_config({**CONFIG, key: value}) == decoder_config(CONFIG)


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_moe", None])
def test_other_families_are_refused_by_name(family):
    with pytest.raises(ValueError, match=f"model_type {family!r} is not supported; supported are llama, qwen3"):
        decoder_config({**CONFIG, "model_type": family})


def test_gemma4():
    config = decoder_config(GEMMA4)
    sliding, full = config.attention(0), config.attention(2)
    assert (sliding.num_kv_heads, sliding.head_dim, sliding.keys_are_values) == (2, 6, False)
    assert (full.num_kv_heads, full.head_dim, full.keys_are_values) == (1, 8, True)
    assert sliding.rope == RopeConfig(theta=1e4)
    assert full.rope == RopeConfig(theta=1e6, kind="proportional", rotated=0.25)
    assert [config.window(i) for i in range(3)] == [4, 4, None]
    assert (config.embed_scale, config.soft_cap, config.attention_scale) == (4.0, 30.0, 1.0)
    assert config.sandwich_norms and config.layer_scalar and config.value_norm and config.qk_norm
    assert config.activation == "gelu_tanh" and config.tie_word_embeddings
    # What a drafter's file says of its layers reads back, but for the tables, of which it has none.
    assert decoder_config(decoder_json(config)) == dataclasses.replace(config, tie_word_embeddings=False)
    uncapped = decoder_config({**GEMMA4, "final_logit_softcapping": None})
    assert uncapped.soft_cap is None and decoder_config(decoder_json(uncapped)).soft_cap is None


def test_gemma4_without_shared_projections_has_one_number_of_heads():
    """`attention_k_eq_v` gates the number of global heads too, as in transformers."""
    full = decoder_config({**GEMMA4, "attention_k_eq_v": False}).attention(2)
    assert (full.num_kv_heads, full.head_dim, full.keys_are_values) == (2, 8, False)


def test_gemma4_inside_a_multimodal_config():
    text = {k: v for k, v in GEMMA4.items() if k != "hidden_size_per_layer_input"}  # unified models have no such key
    text |= {"model_type": "gemma4_unified_text", "use_bidirectional_attention": "vision"}
    whole = {"model_type": "gemma4_unified", "text_config": text, "vision_config": {"patch_size": 16}}
    assert decoder_config(whole) == dataclasses.replace(decoder_config(GEMMA4), family="gemma4_unified_text")
    assert not decoder_config({**whole, "tie_word_embeddings": False}).tie_word_embeddings
    assert decoder_config({"model_type": "gemma4", "text_config": GEMMA4}) == decoder_config(GEMMA4)
    with pytest.raises(ValueError, match="quantization_config"):
        decoder_config({**whole, "quantization_config": {"bits": 4}})
    with pytest.raises(ValueError, match="here: key 'text_config' is missing"):
        decoder_config({"model_type": "gemma4"}, "here")


def test_gemma4_as_newer_transformers_writes_it():
    bare = {k: v for k, v in GEMMA4.items() if k not in ("global_head_dim", "num_global_key_value_heads")}
    own = {"head_dim": 8, "num_key_value_heads": 1}
    assert decoder_config({**bare, "per_layer_config": {"02": own}}) == decoder_config(GEMMA4)
    for changes in ({"2": own, "0": {"head_dim": 8}}, {"2": {**own, "intermediate_size": 7}}):
        with pytest.raises(ValueError, match="here: per_layer_config is implemented for head_dim"):
            decoder_config({**bare, "per_layer_config": changes}, "here")


@pytest.mark.parametrize(
    "key, value",
    [
        ("hidden_size_per_layer_input", 8),
        ("enable_moe_block", True),
        ("num_experts", 8),
        ("num_kv_shared_layers", 1),
        ("use_double_wide_mlp", True),
        ("use_bidirectional_attention", "all"),
        ("hidden_activation", "silu"),
        ("attn_logit_softcapping", 50.0),
    ],
)
def test_what_gemma4_may_have_and_is_not_implemented(key, value):
    with pytest.raises(ValueError, match=f"here: {key} = .*changes the mathematics"):
        decoder_config({**GEMMA4, key: value}, "here")


@pytest.mark.parametrize(
    "key",
    ["head_dim", "global_head_dim", "layer_types", "rope_parameters", "hidden_activation", "num_key_value_heads",
     "hidden_size_per_layer_input"],
)  # fmt: skip
def test_what_a_gemma4_file_must_state(key):
    """transformers has defaults for these, sizes of some other model of the family."""
    with pytest.raises(ValueError, match=f"here: key '{key}' is missing"):
        decoder_config({k: v for k, v in GEMMA4.items() if k != key}, "here")


def test_layer_types():
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    assert decoder_config({**CONFIG, "layer_types": kinds, "sliding_window": 4}).layer_types == tuple(kinds)
    older = {**CONFIG, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    assert decoder_config(older).layer_types == ("full_attention", "sliding_attention", "sliding_attention")
    assert decoder_config({**older, "use_sliding_window": False}).window(2) is None
    with pytest.raises(ValueError, match="layer type 'chunked_attention' is not implemented"):
        decoder_config({**CONFIG, "layer_types": ["chunked_attention"] * 3})


def test_read_json(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"missing.json does not exist; expected a model folder"):
        read_json(tmp_path / "missing.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ValueError, match=r"broken.json is not valid JSON"):
        read_json(tmp_path / "broken.json")


def test_resolve_folder(tmp_path):
    assert resolve_folder(str(tmp_path), ()) == tmp_path
    for name in (str(tmp_path / "absent"), "./absent", "absent", "a/b/c"):
        with pytest.raises(FileNotFoundError, match=r"does not exist; give a model folder, a .gguf file or a hub name"):
            resolve_folder(name, ())


def test_safetensors_in_one_file_and_in_shards(tmp_path):
    tensors = {"a": np.arange(3, dtype=np.float32), "b": np.ones((2, 2), np.float16)}
    one, many = tmp_path / "one", tmp_path / "many"
    one.mkdir(), many.mkdir()
    save_file(tensors, one / "model.safetensors")
    for name, value in tensors.items():
        save_file({name: value}, many / f"{name}.safetensors")
    index = {"weight_map": {name: f"{name}.safetensors" for name in tensors}}
    (many / "model.safetensors.index.json").write_text(json.dumps(index))
    for folder in (one, many):
        files = SafetensorsFolder(folder)
        assert files.names() == {"a", "b"}
        for name, value in tensors.items():
            np.testing.assert_array_equal(files.read(name), value)
        with pytest.raises(KeyError, match="tensor 'c' is missing"):
            files.read("c")
    with pytest.raises(FileNotFoundError, match="holds neither"):
        SafetensorsFolder(tmp_path)
