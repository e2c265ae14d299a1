from __future__ import annotations

import dataclasses

import pytest
from gemma4 import gemma4
from random_models import TARGET as SMALL

from dspark_jax.config import DrafterConfig, spread_layer_ids

TARGET = dataclasses.replace(SMALL, num_layers=3)
DSPARK = DrafterConfig(
    kind="dspark", decoder=TARGET, target_layers=6, target_layer_ids=(0, 2), mask_token_id=10, markov_rank=3
)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_heads": 3, "num_kv_heads": 2}, "num_heads 3 is not a multiple of num_kv_heads 2"),
        ({"layer_types": ("full_attention",)}, "layer_types names 1 layers, num_layers is 3"),
        ({"layer_types": ("sliding_attention",) * 3}, "sliding_window is not set"),
    ],
)
def test_decoder_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TARGET, **changes)


def test_layer_types_decide_the_window():
    """The mere presence of `sliding_window` slides nothing (SPEC §3)."""
    assert dataclasses.replace(TARGET, sliding_window=4).window(1) is None
    mixed = ("full_attention", "sliding_attention", "full_attention")
    sliding = dataclasses.replace(TARGET, sliding_window=4, layer_types=mixed)
    assert [sliding.window(i) for i in range(3)] == [None, 4, None]


def test_full_layers_may_have_another_shape():
    """Gemma-4: fewer and wider heads where a layer sees all; `layer_types` say which."""
    config = gemma4(TARGET)
    shapes = [config.attention(i) for i in range(3)]
    assert shapes[1] == config.full_attention and (shapes[1].num_kv_heads, shapes[1].head_dim) == (1, 12)
    assert shapes[0] == shapes[2] and (shapes[0].head_dim, shapes[0].rope) == (TARGET.head_dim, TARGET.rope)
    assert not shapes[0].keys_are_values
    plain = TARGET.attention(1)
    assert (plain.num_kv_heads, plain.head_dim, plain.rope) == (TARGET.num_kv_heads, TARGET.head_dim, TARGET.rope)
    with pytest.raises(ValueError, match="layer_types does not say which"):
        dataclasses.replace(config, layer_types=())
    with pytest.raises(ValueError, match="num_heads 2 is not a multiple of num_kv_heads 3"):
        dataclasses.replace(config, full_attention=dataclasses.replace(config.full_attention, num_kv_heads=3))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"block_size": 0}, "block_size must be at least 1, found 0"),
        ({"target_layer_ids": ()}, "target_layer_ids is empty"),
        ({"target_layer_ids": (0, 5)}, r"taps layer 5, the target's last.*tap one of -1\.\.4"),
        ({"target_layer_ids": (-2,)}, r"contains -2; the target has layers -1\.\.4"),
        ({"target_layer_ids": (6,)}, "contains 6"),
        ({"mask_token_id": None}, "needs mask_token_id"),
        ({"mask_token_id": 11}, "mask_token_id 11 is outside the vocabulary of 11"),
        ({"mask_token_id": -1}, "mask_token_id -1 is outside"),
        ({"kind": "eagle3"}, "EAGLE-3 has exactly one layer.*found 3"),
        ({"kind": "mtp", "target_layer_ids": ()}, "MTP has exactly one layer.*found 3"),
        ({"kind": "mtp"}, r"target_layer_ids is \(0, 2\), but MTP taps no layers"),
        ({"kind": "lm"}, r"but language model taps no layers"),
    ],
)
def test_drafter_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(DSPARK, **changes)


def test_names_and_confidence_inputs():
    plain = dataclasses.replace(DSPARK, markov_rank=0)
    assert (DSPARK.name, plain.name) == ("DSpark", "DFlash")
    assert dataclasses.replace(plain, confidence_head=True).name == "DSpark"
    one = dataclasses.replace(TARGET, num_layers=1)
    assert dataclasses.replace(DSPARK, kind="eagle3", decoder=one, mask_token_id=None).name == "EAGLE-3"
    mtp = DrafterConfig(kind="mtp", decoder=one, target_layers=6, target_layer_ids=())
    assert mtp.name == "MTP" and (mtp.feature_width, DSPARK.feature_width) == (10, 20)
    assert DSPARK.confidence_features and not plain.confidence_features
    assert not dataclasses.replace(DSPARK, confidence_with_markov=False).confidence_features


def test_spread_layer_ids():
    assert spread_layer_ids(36) == (1, 9, 17, 25, 33)
    for layers in range(6, 80):
        ids = spread_layer_ids(layers)
        assert len(set(ids)) == 5 and ids[0] >= 0 and ids[-1] < layers - 1, layers
    with pytest.raises(ValueError, match="5 layers are too few for 5 distinct taps"):
        spread_layer_ids(5)
