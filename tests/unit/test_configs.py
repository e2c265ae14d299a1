"""Every file in `configs/` loads and gives the drafter its docstring describes, checked against the target's shape."""

from __future__ import annotations

import ast
import dataclasses
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import random_models
from gemma4 import gemma4

from dspark_jax.compile import CompileCommand, target_shape
from dspark_jax.config import DecoderConfig, spread_layer_ids
from dspark_jax.draft.loading import functions_for
from dspark_jax.target.transformer import check_tap_ids
from dspark_jax.training.abstract import KNOWN_TARGETS
from dspark_jax.training.config import TrainConfig, drafter_config, load_config
from dspark_jax.training.losses import LossConfig
from dspark_jax.training.optimizer import OptimizerConfig

FILES = sorted((Path(__file__).parents[2] / "configs").glob("*.py"))
QWEN3 = [path for path in FILES if path.stem.startswith("qwen3_")]
GEMMA4 = [path for path in FILES if path.stem.startswith("gemma4_")]
# Stands in for Gemma-4 12B, of which the package knows the number of layers only: as deep, and with its first ids.
GEMMA4_12B = gemma4(dataclasses.replace(random_models.TARGET, num_layers=48))


def target_of(config: TrainConfig) -> DecoderConfig:
    return GEMMA4_12B if config.target == "google/gemma-4-12B-it" else KNOWN_TARGETS[config.target]


def parameter_count(config: TrainConfig) -> int:
    shape = drafter_config(config, target_of(config))
    functions = functions_for(shape, jnp.dtype(config.dtype))
    params = jax.eval_shape(lambda key: functions.initialise(key, shape.feature_width), jax.random.key(0))
    return sum(math.prod(x.shape) for x in jax.tree.leaves(params))


def docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def test_every_qwen3_drafter_has_a_file():
    sizes, kinds = ("4b", "8b", "14b"), ("dspark", "dflash", "eagle3")
    assert {path.stem for path in QWEN3} == {f"qwen3_{size}_{kind}" for size in sizes for kind in kinds}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_loads_and_its_drafter_fits_its_target(path):
    config = load_config(path)
    target = target_of(config)
    shape = drafter_config(config, target)
    check_tap_ids(target, shape.target_layer_ids)
    assert path.stem.rpartition("_")[2] == config.drafter.kind == shape.name.lower().replace("-", "")
    assert str(config.output) == f"runs/{path.stem}"
    assert (shape.decoder.hidden_size, shape.decoder.vocab_size) == (target.hidden_size, target.vocab_size)
    assert (config.batch_size // config.accumulation) % (config.mesh.fsdp * (config.mesh.data or 1)) == 0
    assert f"--config configs/{path.name}" in docstring(path)


@pytest.mark.parametrize("path", QWEN3, ids=lambda path: path.stem)
def test_qwen3_files_hold_the_recipe(path):
    config = load_config(path)
    _, size, kind = path.stem.split("_")
    assert config.target == f"Qwen/Qwen3-{size.upper()}" and config.data == (f"data/qwen3_{size}_train.jsonl",)
    assert (config.batch_size, config.sequence_length, config.epochs, config.packed) == (512, 4096, 10, False)
    assert config.optimizer == OptimizerConfig() and config.optimizer.learning_rate == 6e-4
    assert (config.optimizer.warmup, config.optimizer.clip, config.optimizer.weight_decay) == (0.04, 1.0, 0.0)
    shape = drafter_config(config, KNOWN_TARGETS[config.target])
    assert shape.target_layer_ids == spread_layer_ids(KNOWN_TARGETS[config.target].num_layers)
    assert (shape.block_size, shape.decoder.intermediate_size) == (7, KNOWN_TARGETS[config.target].intermediate_size)
    expected = {"dspark": (5, 256, True, 512), "dflash": (5, 0, False, 512), "eagle3": (1, 0, False, None)}[kind]
    found = (config.drafter.layers, shape.markov_rank, shape.confidence_head, config.num_anchors)
    assert found == expected
    losses = {"dspark": LossConfig(ce=0.1, tv=0.9, confidence=1.0), "dflash": LossConfig(ce=1.0, tv=0, confidence=0)}
    assert config.loss == losses.get(kind, LossConfig())


@pytest.mark.parametrize("path", QWEN3, ids=lambda path: path.stem)
def test_docstrings_state_size_taps_and_slices(path):
    config, text = load_config(path), " ".join(docstring(path).split())
    stated = re.search(r"([\d,]+) parameters; taps ([\d, ]+) of (\d+) layers", text)
    assert stated is not None
    target = KNOWN_TARGETS[config.target]
    assert int(stated[1].replace(",", "")) == parameter_count(config)
    taps = drafter_config(config, target).target_layer_ids
    assert [int(x) for x in stated[2].split(",")] == list(taps) and int(stated[3]) == target.num_layers
    # Every slice of the list takes the file's parts: rows of a part divide over its shards.
    rows = config.batch_size // config.accumulation
    for shards in re.findall(r"--mesh\.fsdp (\d+)", text):
        assert rows % int(shards) == 0
    for slice_type in ("v5e 4x4", "v6e 2x4", "v5p 2x2x1", "tpu7x 2x2x1"):
        assert slice_type in text
    assert f"{rows} rows" in text or f"{config.accumulation} parts" in text


def test_every_gemma4_drafter_has_a_file():
    assert {path.stem for path in GEMMA4} == {f"gemma4_12b_{kind}" for kind in ("dspark", "dflash", "eagle3")}


@pytest.mark.parametrize("path", GEMMA4, ids=lambda path: path.stem)
def test_gemma4_files_hold_the_recipe_with_the_releases_taps(path):
    """Line by line the same kind's Qwen3 file, but for target, taps, mask token and folders."""
    kind = path.stem.rpartition("_")[2]
    config, qwen3 = load_config(path), load_config(path.with_name(f"qwen3_4b_{kind}.py"))
    own = {"target": "google/gemma-4-12B-it", "data": ("data/gemma4_12b_train.jsonl",), "output": config.output}
    drafter = dataclasses.replace(qwen3.drafter, taps=(5, 17, 29, 41, 46), mask_token_id=config.drafter.mask_token_id)
    assert config == dataclasses.replace(qwen3, drafter=drafter, **own)
    assert config.drafter.mask_token_id == (None if kind == "eagle3" else 4)
    assert parameter_count(config) > 0 and functions_for(drafter_config(config, GEMMA4_12B)).tap_ids == drafter.taps
    text = " ".join(docstring(path).split())
    assert "Taps 5, 17, 29, 41, 46 of 48 layers" in text and "No run of this file" in text.replace("; no", ". No")
    assert [x for x in ("v5e 4x4", "v6e 2x4", "v5p 2x2x1", "tpu7x 2x2x1") if x not in text] == []


def test_sizes_of_a_target_that_is_not_known_come_from_its_own_file():
    path = GEMMA4[0].with_name("gemma4_12b_dspark.py")
    command = CompileCommand(config=path, topology="v6e:2x4")
    with pytest.raises(ValueError, match=r"gemma-4-12B-it' is not known .*config.json with --target-config"):
        target_shape(command, load_config(path))


def test_stated_sizes_come_from_the_shape():
    """One count by hand: DSpark for Qwen3-4B."""
    d, f, heads, kv, v, rank = 2560, 9728, 32 * 128, 8 * 128, 151_936, 256
    layer = d * (heads + 2 * kv) + heads * d + 3 * d * f + 2 * d + 2 * 128
    expected = 5 * layer + 5 * d * d + 2 * d + 2 * v * rank + (d + rank + 1)
    assert parameter_count(load_config(QWEN3[0].with_name("qwen3_4b_dspark.py"))) == expected
