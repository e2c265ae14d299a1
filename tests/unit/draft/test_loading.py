"""Draft checkpoints: exact round trips, the vocabulary rules, and every refusal by name."""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_models import DECODER, GEMMA4, MASK, VOCAB, write_drafter, write_target

from dspark_jax.draft.loading import config_json, drafter_config, load_drafter, save_drafter, tensor_name
from dspark_jax.draft.vocabulary import VOCABULARY, ids_to_offsets, offsets_to_ids, reduce_vocabulary, stored_ids
from dspark_jax.target.loading import build_params, load_target, parameter_shapes

KINDS = ("dspark", "dflash", "eagle3", "mtp")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(str(write_target(tmp_path_factory.mktemp("target"))), dtype=jnp.float32)


def rewrite(folder, tensors=None, **config):
    """Change a checkpoint on disk."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    if tensors is not None:
        save_file({**load_file(folder / "model.safetensors"), **tensors}, folder / "model.safetensors")


@pytest.mark.parametrize("kind", KINDS)
def test_saving_what_was_loaded_gives_the_same_bits(kind, target, tmp_path):
    first = load_drafter(str(write_drafter(tmp_path / "a", kind)), target)
    save_drafter(first, tmp_path / "b")
    one, two = load_file(tmp_path / "a" / "model.safetensors"), load_file(tmp_path / "b" / "model.safetensors")
    assert one.keys() == two.keys()
    for name in one:
        assert one[name].dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(one[name].view(np.uint16), two[name].view(np.uint16), err_msg=name)
    again = load_drafter(str(tmp_path / "b"), target)
    assert again.config == first.config
    assert drafter_config(config_json(first.config), "x") == first.config


@pytest.mark.parametrize("kind", KINDS)
def test_gemma4_drafters(kind, tmp_path):
    """Names and values survive; a drafter for other scales of embeddings or logits is refused."""
    target = load_target(str(write_target(tmp_path / "target", decoder=GEMMA4)), dtype=jnp.float32)
    first = load_drafter(str(write_drafter(tmp_path / "a", kind, decoder=GEMMA4)), target)
    save_drafter(first, tmp_path / "b")
    one, two = load_file(tmp_path / "a" / "model.safetensors"), load_file(tmp_path / "b" / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, one, two)
    layer = {name.removeprefix("layers.0.") for name in one if name.startswith("layers.0.")}
    assert {"layer_scalar", "pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight"} <= layer
    assert "self_attn.v_proj.weight" not in layer and one["layers.0.layer_scalar"].shape == (1,)
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config["architectures"][0].startswith("Gemma4") and config["final_logit_softcapping"] == 4.0
    assert load_drafter(str(tmp_path / "b"), target).config == first.config
    rewrite(tmp_path / "b", final_logit_softcapping=30.0)
    with pytest.raises(ValueError, match=r"final_logit_softcapping 30.0, target .* has 4.0"):
        load_drafter(str(tmp_path / "b"), target)


def test_a_qwen3_drafter_is_refused_for_a_gemma4_target(target, tmp_path):
    gemma4 = dataclasses.replace(target, config=dataclasses.replace(target.config, embed_scale=24**0.5))
    with pytest.raises(ValueError, match=r"made for embeddings scaled by 1.0, target .* has 4.89"):
        load_drafter(str(write_drafter(tmp_path / "a", "dflash")), gemma4)
    rewrite(tmp_path / "a", architectures=["Gemma4DSparkModel"])
    with pytest.raises(ValueError, match="model_type 'qwen3' goes with Qwen3DSparkModel"):
        load_drafter(str(tmp_path / "a"), target)


@pytest.mark.parametrize("kind", KINDS)
def test_target_tensors_are_written_on_request_and_not_copied_on_load(kind, target, tmp_path):
    drafter = load_drafter(str(write_drafter(tmp_path / "a", kind)), target)
    save_drafter(drafter, tmp_path / "b", include_target_tensors=True)
    stored = load_file(tmp_path / "b" / "model.safetensors")
    assert stored["embed_tokens.weight"].shape == stored["lm_head.weight"].shape == (VOCAB, DECODER.hidden_size)
    again = load_drafter(str(tmp_path / "b"), target)
    assert {tensor_name(p) for p, _ in jax.tree_util.tree_flatten_with_path(again.params)[0]}.isdisjoint(
        {"embed_tokens.weight", "lm_head.weight"}
    )
    with pytest.raises(ValueError, match="tables"):
        save_drafter(dataclasses.replace(drafter, tables=None), tmp_path / "c", include_target_tensors=True)
    stored["lm_head.weight"] = (stored["lm_head.weight"].astype(np.float32) + 1).astype(ml_dtypes.bfloat16)
    save_file(stored, tmp_path / "b" / "model.safetensors")
    with pytest.raises(ValueError, match=r"lm_head.weight.*another target"):
        load_drafter(str(tmp_path / "b"), target)


def test_br17_padded_is_identity_and_pruned_is_offsets(target, tmp_path):
    np.testing.assert_array_equal(offsets_to_ids(np.asarray([5, 6, 6, 8])), [5, 7, 8, 11])
    np.testing.assert_array_equal(ids_to_offsets(np.asarray([5, 7, 8, 11])), [5, 6, 6, 8])
    stored = functools.partial(stored_ids, where="here")
    assert stored(None, None, stated=201024, target_rows=200058) is None, "padded"
    assert stored(np.zeros(4, np.int64), None, stated=4, target_rows=4) is None, "the identity is all zeros ..."
    with pytest.raises(ValueError, match="names token 4, the target has 4"):
        stored(np.arange(4), None, stated=4, target_rows=4)  # ... and not 0, 1, 2, 3
    with pytest.raises(ValueError, match="needs a d2t map"):
        stored(None, None, stated=3, target_rows=4)
    with pytest.raises(ValueError, match="maps 2 tokens, draft_vocab_size is 3"):
        stored(np.asarray([1, 1]), None, stated=3, target_rows=4)
    with pytest.raises(ValueError, match="do not ascend"):
        stored(np.asarray([1, 0]), None, stated=2, target_rows=4)
    with pytest.raises(ValueError, match="t2d marks 1 tokens"):
        stored(np.asarray([1, 1]), np.asarray([True, False, False, False]), stated=2, target_rows=4)
    # A padded checkpoint from disk: more Markov rows than the target has tokens.
    folder = write_drafter(tmp_path, "dspark")
    tensors = load_file(folder / "model.safetensors")
    padded = {n: np.pad(tensors[n], ((0, 9), (0, 0))) for n in tensors if n.startswith("markov_head.markov_w")}
    rewrite(folder, padded, vocab_size=VOCAB + 9)
    assert load_drafter(str(folder), target).config.decoder.vocab_size == VOCAB + 9
    rewrite(folder, {"d2t": np.full(VOCAB, 5, np.int64)})
    with pytest.raises(ValueError, match=f"names token {VOCAB}, the target has {VOCAB}"):
        load_drafter(str(folder), target)


@pytest.mark.parametrize("kind", KINDS)
def test_br17_a_reduced_vocabulary_keeps_its_map_on_disk(kind, target, tmp_path):
    whole = load_drafter(str(write_drafter(tmp_path / "a", kind)), target)
    reduced = reduce_vocabulary(whole, [11, 5, 8, 7, 8])
    save_drafter(reduced, tmp_path / "b")
    stored = load_file(tmp_path / "b" / "model.safetensors")
    np.testing.assert_array_equal(stored["d2t"], [5, 6, 6, 8])
    np.testing.assert_array_equal(np.flatnonzero(stored["t2d"]), [5, 7, 8, 11])
    assert stored["d2t"].dtype == np.int64 and "lm_head.weight" not in stored
    again = load_drafter(str(tmp_path / "b"), target)
    assert again.config == reduced.config and again.config.draft_vocab_size == 4
    jax.tree.map(np.testing.assert_array_equal, again.params, reduced.params)
    # With a head of its own, as checkpoints from elsewhere have it.
    save_drafter(again, tmp_path / "c", include_target_tensors=True)
    assert load_file(tmp_path / "c" / "model.safetensors")["lm_head.weight"].shape == (4, DECODER.hidden_size)
    head = load_drafter(str(tmp_path / "c"), target).params[VOCABULARY]["head"]
    np.testing.assert_allclose(head, reduced.params[VOCABULARY]["head"], rtol=2**-8)
    with pytest.raises(ValueError, match="does not draft by its target's whole head"):
        reduce_vocabulary(again, [5])
    with pytest.raises(ValueError, match=f"names token {VOCAB}"):
        reduce_vocabulary(whole, [5, VOCAB])
    with pytest.raises(ValueError, match="vocabulary's 0 target ids"):
        reduce_vocabulary(whole, [])
    rewrite(tmp_path / "b", {"lm_head.weight": np.zeros((3, DECODER.hidden_size), np.float32)})
    with pytest.raises(ValueError, match=r"lm_head.weight.*d2t asks for"):
        load_drafter(str(tmp_path / "b"), target)


def test_br19_the_mask_token_must_be_a_row_of_the_targets_table(target, tmp_path):
    folder = write_drafter(tmp_path, "dflash")
    rewrite(folder, vocab_size=VOCAB + 250, mask_token_id=VOCAB)
    with pytest.raises(ValueError, match=f"mask_token_id {VOCAB} .*{VOCAB} rows"):
        load_drafter(str(folder), target)
    rewrite(folder, mask_token_id=MASK)
    load_drafter(str(folder), target)


def test_br19_a_target_table_shorter_than_its_config_says(target):
    config = dataclasses.replace(DECODER, vocab_size=VOCAB + 250)
    tensors = {
        tensor_name(path): np.zeros(leaf.shape, np.float32)
        for path, leaf in jax.tree_util.tree_flatten_with_path(parameter_shapes(config))[0]
    }
    tensors["embed_tokens.weight"] = np.zeros((VOCAB, DECODER.hidden_size), np.float32)
    _, tables = build_params(config, tensors, jnp.float32, "here")
    assert tables.embed.shape[0] == VOCAB
    assert np.all(np.isnan(tables.embed_tokens(jnp.asarray([VOCAB, VOCAB + 1])))), "never a wrong row"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "DeepSpec layout"),
        ({"architectures": []}, "DeepSpec layout"),
        ({"architectures": ["DFlashDraftModel"]}, "predicts from slot 1"),
        ({"architectures": ["x"], "speculators_config": {}}, "speculators layout"),
        ({"sample_from_anchor": False}, "slot 1"),
        ({"num_target_layers": 9}, "num_target_layers 9.*has 4"),
        ({"hidden_size": 25}, "hidden_size 25.*has 24"),
        ({"target_layer_ids": [0, 3]}, "last"),
        ({"target_layer_ids": [0, 7]}, "7"),
        ({"block_size": None}, "block_size"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "yarn"),
    ],
)
def test_br08_other_layouts_and_foreign_settings_are_refused_by_name(change, message, target, tmp_path):
    folder = write_drafter(tmp_path, "dflash")
    rewrite(folder, **change)
    with pytest.raises(ValueError, match=message):
        load_drafter(str(folder), target)


def test_missing_unknown_and_misshaped_tensors_are_named(target, tmp_path):
    folder = write_drafter(tmp_path, "dspark")
    tensors = load_file(folder / "model.safetensors")
    for change, message in (
        ({"fc.weight": None}, r"'fc.weight' is missing"),
        ({"extra.weight": np.zeros(3, np.float32)}, r"extra.weight"),
        ({"fc.weight": np.zeros((3, 4), np.float32)}, r"'fc.weight' has shape \(3, 4\)"),
    ):
        kept = {n: v for n, v in {**tensors, **change}.items() if v is not None}
        save_file(kept, folder / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            load_drafter(str(folder), target)


def test_an_unreachable_name_says_what_to_do(target):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_drafter("./nowhere", target)
