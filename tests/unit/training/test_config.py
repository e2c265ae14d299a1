"""Configurations: every setting is read or refused, files load, the command line overrides."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from training_setup import KINDS, MASK, tiny_config, tiny_target

from dspark_jax.config import DrafterConfig
from dspark_jax.train import parse
from dspark_jax.training.config import DrafterShape, drafter_config, load_config, to_json
from dspark_jax.training.losses import LossConfig

CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.mark.parametrize("kind", ["dspark", "dflash", "eagle3", "mtp"])
def test_the_drafter_follows_its_target(kind):
    target = tiny_target().config
    config = drafter_config(tiny_config(kind), target)
    assert isinstance(config, DrafterConfig) and config.name.lower().replace("-", "") == kind
    for name in ("vocab_size", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "rope", "rms_norm_eps"):
        assert getattr(config.decoder, name) == getattr(target, name)
    assert config.decoder.qk_norm and config.decoder.family == "qwen3" and config.decoder.num_layers == 1
    assert config.block_size == (1 if kind == "mtp" else 3)


@pytest.mark.parametrize("kind", ["dspark", "dflash", "eagle3", "mtp"])
def test_a_gemma4_drafter_has_its_targets_layers(kind):
    """All of them see the whole text: they have the shape of the target's full-attention layers."""
    target = tiny_target(as_gemma4=True).config
    decoder = drafter_config(tiny_config(kind), target).decoder
    own = {"num_layers": 1, "intermediate_size": 16, "layer_types": ("full_attention",), "tie_word_embeddings": False}
    assert decoder == dataclasses.replace(target, **own)
    assert decoder.attention(0) == target.attention(1) != target.attention(0) and decoder.window(0) is None


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("dspark", {"steps": None}, "exactly one"),
        ("dspark", {"epochs": 3}, "exactly one"),
        ("dspark", {"accumulation": 3}, "not a multiple"),
        ("dspark", {"num_anchors": None}, "needs num_anchors"),
        ("dspark", {"log_every": 0}, "log_every must be at least 1"),
        ("eagle3", {"num_anchors": 3}, "num_anchors = 3 would not be read"),
        ("eagle3", {"loss": LossConfig(ce=1)}, "loss = .* would not be read"),
        ("dflash", {"loss": LossConfig()}, "drafter.confidence_head is off"),
    ],
)
def test_settings_nobody_reads_are_refused(kind, changes, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(kind, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "dflash", "mask_token_id": MASK, "markov_rank": 4}, "markov_rank = 4 would not be read"),
        ({"kind": "eagle3", "mask_token_id": MASK}, "mask_token_id = 39 would not be read"),
        ({"kind": "mtp", "taps": (0, 2)}, r"taps = \(0, 2\) would not be read \(MTP reads the last hidden state alone"),
        ({"kind": "dspark", "mask_token_id": MASK, "step_loss_decay": 0.5}, "step_loss_decay = 0.5 would not be read"),
        ({"kind": "dspark"}, "needs mask_token_id"),
    ],
)
def test_shapes_nobody_reads_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        DrafterShape(**changes)


def test_an_unknown_setting_is_an_error():
    with pytest.raises(TypeError, match="warmup_ratio"):
        tiny_config(warmup_ratio=0.1)


@pytest.mark.parametrize("kind", ["dspark", "dflash", "eagle3", "mtp"])
def test_shipped_configs_share_data_and_taps(kind):
    config = load_config(CONFIGS / f"smollm2_{kind}.py")
    dspark = load_config(CONFIGS / "smollm2_dspark.py")
    assert config.drafter.kind == kind
    for name in ("data", "seed", "sequence_length", "packed", "target", "dtype", "vocab_columns"):
        assert getattr(config, name) == getattr(dspark, name)
    taps, block = (None, 1) if kind == "mtp" else (dspark.drafter.taps, dspark.drafter.block_size)
    assert (config.drafter.taps, config.drafter.block_size) == (taps, block)
    assert (CONFIGS / f"smollm2_{kind}.py").read_text().startswith('"""')


def test_command_line_overrides_the_file():
    overrides = "--steps 7 --output somewhere --drafter.layers 3 --optimizer.learning-rate 0.5 --loss.ce 0.25"
    config = parse(["--config", str(CONFIGS / "smollm2_dspark.py"), *overrides.split(), "--data", "a.jsonl", "b.jsonl"])
    assert (config.steps, config.output, config.drafter.layers) == (7, Path("somewhere"), 3)
    assert config.optimizer.learning_rate == 0.5 and config.loss.ce == 0.25 and config.loss.tv == 0.9
    assert config.data == ("a.jsonl", "b.jsonl")


def test_an_unknown_argument_is_an_error(capsys):
    with pytest.raises(SystemExit):
        parse(["--config", str(CONFIGS / "smollm2_dspark.py"), "--warmup-ratio", "0.1"])
    assert "warmup-ratio" in capsys.readouterr().err


def test_files_that_are_no_configs_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.py"):
        load_config(tmp_path / "none.py")
    (tmp_path / "empty.py").write_text("settings = 3\n")
    with pytest.raises(ValueError, match="expected a TrainConfig"):
        load_config(tmp_path / "empty.py")


def test_plain_values_tell_configs_apart():
    one, other = tiny_config(), tiny_config(seed=3)
    assert to_json(one) != to_json(other)
    assert to_json(one) == to_json(dataclasses.replace(other, seed=0))
    assert set(KINDS) == {"dspark", "dflash", "eagle3", "mtp"}
