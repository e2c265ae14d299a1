"""A target read into the shards of a mesh: the same values, and no more of a file than a device's part."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models
from safetensors.numpy import load_file, save_file

from dspark_jax.huggingface import SafetensorsFolder, StoredTensor
from dspark_jax.sharding import create_mesh, tree_shardings
from dspark_jax.target.loading import load_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_models.write_target(tmp_path_factory.mktemp("target") / "tiny")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_a_mesh_changes_the_place_of_values_only(folder, dtype):
    mesh = create_mesh(data=1, fsdp=4, tensor=2)
    whole, split = load_target(str(folder), dtype=dtype), load_target(str(folder), dtype=dtype, mesh=mesh)
    for tree, other in ((whole.params, split.params), (whole.tables, split.tables)):
        for ours, theirs, layout in zip(
            jax.tree.leaves(other), jax.tree.leaves(tree), jax.tree.leaves(tree_shardings(mesh, tree)), strict=True
        ):
            assert ours.sharding == layout and ours.dtype == theirs.dtype
            np.testing.assert_array_equal(ours, theirs)
    assert any(x.addressable_shards[0].data.size < x.size for x in jax.tree.leaves(split.params))


def test_only_the_parts_of_devices_are_read(folder, monkeypatch):
    reads, original = [], StoredTensor.__getitem__

    def read(self, index):
        value = original(self, index)
        reads.append((self.shape, value.size))
        return value

    monkeypatch.setattr(StoredTensor, "__getitem__", read)
    mesh = create_mesh(data=1, fsdp=8)
    target = load_target(str(folder), mesh=mesh)
    parts = {x.shape: x.addressable_shards[0].data.size for x in jax.tree.leaves((target.params, target.tables))}
    assert reads and all(size <= parts[shape] for shape, size in reads)


def test_the_text_part_of_a_multimodal_checkpoint(tmp_path):
    """Gemma-4 12B's layout: the decoder under `language_model`, the config under `text_config`, embedders beside it."""
    plain = tiny_models.write_target(tmp_path / "plain", decoder=tiny_models.GEMMA4)
    whole = tmp_path / "whole"
    whole.mkdir()
    tensors = load_file(plain / "model.safetensors")
    nested = {name.replace("model.", "model.language_model.", 1): value for name, value in tensors.items()}
    extra = {"model.embed_vision.patch_dense.weight": np.ones((3, 2), np.float32)}
    save_file({**nested, **extra}, whole / "model.safetensors")
    text = {**json.loads((plain / "config.json").read_text()), "model_type": "gemma4_unified_text"}
    config = {"model_type": "gemma4_unified", "text_config": text, "vision_config": {}}
    (whole / "config.json").write_text(json.dumps(config))
    one, other = load_target(str(plain)), load_target(str(whole))
    jax.tree.map(np.testing.assert_array_equal, one.params, other.params)
    assert (other.tables.embed_scale, other.tables.soft_cap) == (24**0.5, 4.0)
    assert other.tables.head is other.tables.embed
    # Without the nesting, what is left over is an error as ever.
    save_file({**tensors, **extra}, whole / "model.safetensors")
    with pytest.raises(ValueError, match=r"unknown tensors \['embed_vision.patch_dense.weight'\]"):
        load_target(str(whole))


def test_a_stored_tensor_gives_parts(folder):
    files = SafetensorsFolder(folder)
    name = next(n for n in sorted(files.names()) if n.endswith("up_proj.weight"))
    stored, value = files.tensor(name), files.read(name)
    assert stored.shape == value.shape
    np.testing.assert_array_equal(stored[2:5, 1:], value[2:5, 1:])
    np.testing.assert_array_equal(stored[:, :], value)
    with pytest.raises(KeyError, match="tensor 'none' is missing"):
        files.tensor("none")
