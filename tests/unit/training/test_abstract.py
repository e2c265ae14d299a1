"""Steps over shapes: sizes of known targets, operations counted by hand, and what is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from training_setup import tiny_config, tiny_target

from dspark_jax.sharding import create_mesh
from dspark_jax.training.abstract import KNOWN_TARGETS, abstract_step, abstract_target, parameter_count
from dspark_jax.training.flops import layer_weights, model_flops, traced_flops
from dspark_jax.training.tpu import chip_of, out_of_memory, topology_devices


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("smollm2-135m", 134_515_008),
        ("Qwen/Qwen3-4B", 4_022_468_096),
        ("Qwen/Qwen3-8B", 8_190_735_360),
        ("Qwen/Qwen3-14B", 14_768_307_200),
    ],
)
def test_known_targets_have_their_published_sizes(name, published):
    config = KNOWN_TARGETS[name]
    target = abstract_target(name, config, jnp.bfloat16)
    table = parameter_count(target.tables.embed)
    assert parameter_count(target.params) + table * (1 if config.tie_word_embeddings else 2) == published


@pytest.mark.parametrize("as_gemma4", [False, True], ids=["llama", "gemma4"])
@pytest.mark.parametrize("kind", ["dspark", "dflash", "eagle3", "mtp"])
def test_a_step_over_shapes_is_laid_out_like_a_run(kind, as_gemma4):
    config, target = tiny_config(kind, accumulation=2, batch_size=8), tiny_target(as_gemma4=as_gemma4)
    mesh = create_mesh(data=2, fsdp=2)
    step = abstract_step(config, abstract_target("tiny", target.config, jnp.float32), mesh)
    assert step.batch.tokens.shape == (2, 4, 16) and step.batch.row_ids.shape == (2, 4)
    assert step.batch.tokens.sharding.shard_shape((2, 4, 16)) == (2, 1, 16)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), step.target_params) == jax.tree.map(
        lambda x: (x.shape, x.dtype), target.params
    )
    assert (step.tables.embed_scale, step.tables.soft_cap) == (target.tables.embed_scale, target.tables.soft_cap)
    # What is traced is what runs: every product of the model is in it.
    assert traced_flops(step.trace()) >= model_flops(config, target.config).total * 0.9


def test_cached_features_take_the_targets_place(tmp_path):
    config, target = tiny_config(features_cache=tmp_path), tiny_target()
    step = abstract_step(config, abstract_target("tiny", target.config, jnp.float32), create_mesh(data=1))
    assert step.target_params is None and step.batch.taps.shape == (1, 4, 16, 2 * 16)
    assert step.batch.last_hidden.shape == (1, 4, 16, 16)
    assert model_flops(config, target.config).target == 0


def test_rows_must_divide_over_the_mesh():
    with pytest.raises(ValueError, match=r"2 rows an accumulation step .* do not divide over 8 shards"):
        abstract_step(tiny_config(accumulation=2), tiny_target(), create_mesh(data=8))


def test_model_flops_by_hand():
    """Every product of a tiny DSpark run, written out: 4 rows of 16 tokens, 4 anchors of 3 slots."""
    d, f, q, k, v, rank = 16, 16, 16, 8, 40, 4
    found = model_flops(tiny_config(), tiny_target().config)
    tokens, slots = 4 * 16, 4 * 4 * 3
    target_layer = d * (q + 2 * k) + q * d + 3 * d * 24
    assert found.target == 2 * tokens * 4 * (target_layer + 2 * q * 8)
    layer = d * (q + 2 * k) + q * d + 3 * d * f
    drafter = slots * (layer + 2 * q * (8 + 3)) + tokens * (2 * d * d + 2 * d * k)
    assert found.drafter == 6 * drafter
    assert found.loss == 2 * slots * v * (3 * d + 3 * rank)
    assert layer_weights(KNOWN_TARGETS["Qwen/Qwen3-4B"]) == 100_925_440


def test_model_flops_of_two_kinds_of_layers_by_hand():
    """Gemma-4, rows of 16 tokens: two layers with a window of 5, two with one wide head whose keys are its values."""
    found = model_flops(tiny_config(), tiny_target(as_gemma4=True).config)
    tokens, slots, d, mlp = 4 * 16, 4 * 4 * 3, 16, 3 * 16 * 24
    sliding = d * (16 + 2 * 8) + 16 * d + mlp + 2 * 16 * (5 - 25 / 32)
    full = d * (32 + 16) + 32 * d + mlp + 2 * 32 * 8
    assert found.target == 2 * tokens * 2 * (sliding + full)
    drafted = d * (32 + 16) + 32 * d + 3 * d * 16 + 2 * 32 * (8 + 3)
    assert found.drafter == 6 * (slots * drafted + tokens * (2 * d * d + d * 16))


def test_dflash_asks_the_target_for_no_logits():
    both = [model_flops(tiny_config(kind), tiny_target().config) for kind in ("dspark", "dflash")]
    assert both[1].loss == 2 * 48 * 40 * 2 * 16 < both[0].loss


def test_traced_flops_follow_loops_and_branches():
    x, w = jnp.ones((2, 3)), jnp.ones((3, 3))

    def program(x):
        x, _ = jax.lax.scan(lambda c, _: (jax.jit(jnp.dot)(c, w), None), x, None, length=5)
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ w @ w, lambda x: x, x)

    assert traced_flops(jax.make_jaxpr(program)(x)) == (5 + 2) * 2 * 2 * 3 * 3


def test_topologies_are_named_by_chip_and_shape(monkeypatch):
    assert chip_of("v5e:4x4").memory == 16 << 30
    for wrong in ("v5e", "v5e:16", "h100:2x2"):
        with pytest.raises(ValueError, match="expected one of v4, v5e"):
            chip_of(wrong)
    monkeypatch.setattr("dspark_jax.training.tpu.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'dspark_jax\[tpu\]'"):
        topology_devices("v5e:2x2")


def test_the_compilers_words_on_memory():
    text = (
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. "
        "Used 23.08G of 15.75G hbm. Exceeded hbm capacity by 7.33G.\n\nTotal hbm usage >= 23.33G:\n"
    )
    assert out_of_memory(RuntimeError(text)) == "Used 23.08G of 15.75G hbm. Exceeded hbm capacity by 7.33G."
    recent = (
        "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (19.99G) exceeds available HBM (15.75G). HLO module: jit_train."
    )
    assert out_of_memory(RuntimeError(recent)) == (
        "total memory required for HLO temporaries (19.99G) exceeds available HBM (15.75G)"
    )
    assert out_of_memory(RuntimeError("RESOURCE_EXHAUSTED: vmem")) == "RESOURCE_EXHAUSTED: vmem"
    assert out_of_memory(RuntimeError("INTERNAL: Mosaic failed")) is None
