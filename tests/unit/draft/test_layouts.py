"""Which block layouts the loader takes for its own, and which it refuses by name (FAULTS BR-08)."""

from __future__ import annotations

import pytest
from random_models import KINDS, random_drafter

from dspark_jax.draft.loading import config_json, drafter_config

DSPARK = config_json(random_drafter("vanilla").config)


@pytest.mark.parametrize("kind", KINDS)
def test_configs_survive_the_file(kind):
    config = random_drafter(kind).config
    assert drafter_config(config_json(config), "x") == config


def test_br08_block_size_is_the_number_of_drafts():
    """Anchor first: N rows give N proposals, and the anchor makes the verify width N + 1."""
    for size in (7, 16):
        assert drafter_config({**DSPARK, "block_size": size}, "x").block_size == size
    assert drafter_config({**DSPARK, "sample_from_anchor": True}, "x").block_size == 4


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"sample_from_anchor": False}, "sample_from_anchor is false"),
        ({"architectures": []}, "is not a draft checkpoint in the DeepSpec layout"),
        ({"architectures": None}, "is not a draft checkpoint in the DeepSpec layout"),
        ({"architectures": ["LlamaForCausalLM"]}, "A target model belongs to --target"),
        ({"architectures": ["DFlashDraftModel"]}, "z-lab DFlash checkpoint: it predicts from slot 1"),
        (
            {"architectures": ["DSparkSpeculator"], "speculators_model_type": "dspark"},
            "speculators layout, which is not read yet",
        ),
        ({"architectures": None, "speculators_config": {"algorithm": "dspark"}}, "speculators layout"),
    ],
)
def test_br08_the_other_layouts_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=f"some/config.json: .*{message}"):
        drafter_config({**DSPARK, **changes}, "some/config.json")


def test_br08_a_config_without_architectures_raises():
    with pytest.raises(ValueError, match=r"architectures \[\] is not a draft checkpoint"):
        drafter_config({k: v for k, v in DSPARK.items() if k != "architectures"}, "x")


@pytest.mark.parametrize("key", ["block_size", "mask_token_id", "target_layer_ids", "num_target_layers"])
def test_what_a_checkpoint_must_state(key):
    with pytest.raises(ValueError, match=f"x: key '{key}' is missing"):
        drafter_config({k: v for k, v in DSPARK.items() if k != key}, "x")
