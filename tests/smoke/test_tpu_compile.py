"""The engine's programs and the kernels compiled for TPUs on any machine: what they refuse, they refuse here."""

from __future__ import annotations

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dspark_jax.config import DecoderConfig, DrafterConfig, RopeConfig
from dspark_jax.draft.loading import functions_for
from dspark_jax.engine.abstract import abstract_round
from dspark_jax.nn.interval_kernel import KernelIntervals
from dspark_jax.nn.intervals import Intervals
from dspark_jax.sharding import AXES
from dspark_jax.target.loading import parameter_shapes
from dspark_jax.training.tpu import topology_devices

TARGET = DecoderConfig(
    family="qwen3", vocab_size=512, hidden_size=256, intermediate_size=512, num_layers=2, num_heads=8, num_kv_heads=2,
    head_dim=64, rms_norm_eps=1e-6, rope=RopeConfig(), max_position=1024, qk_norm=True,
)  # fmt: skip
BLOCK, SLOTS, LENGTH = 3, 8, 512


@functools.cache
def mesh_of(name, tensor):
    """A mesh over devices of a TPU slice that is not there."""
    pytest.importorskip(
        "libtpu", reason="libtpu is not installed: `pip install libtpu` compiles for TPUs on any machine"
    )
    devices = topology_devices(name)[:tensor]
    devices = np.array(devices).reshape(1, 1, tensor)
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * 3)


def drafter_config(target):
    decoder = dataclasses.replace(target, num_layers=1)
    return DrafterConfig(
        kind="dspark", decoder=decoder, target_layers=target.num_layers, target_layer_ids=(0,), block_size=BLOCK,
        mask_token_id=0, markov_rank=16, confidence_head=True,
    )  # fmt: skip


def round_on(mesh):
    """A round of the tiny pair, all abstract."""
    config = drafter_config(TARGET)
    functions = functions_for(config, jnp.bfloat16)
    draft = jax.eval_shape(lambda: functions.initialise(jax.random.key(0), config.feature_width))
    return abstract_round(TARGET, functions, (parameter_shapes(TARGET), draft), mesh, slots=SLOTS, max_length=LENGTH)


@pytest.mark.parametrize(
    ("slice_name", "tensor", "rows", "width"),
    [
        pytest.param("v5e:2x2", 1, 1, 0, id="one-row"),
        pytest.param("v5e:2x2", 1, 0, 32, id="prompt"),
        pytest.param("v5e:2x2", 2, 16, 32, id="split-heads"),
        pytest.param("v5e:2x2", 4, 16, 0, id="repeated-heads"),
    ],
)
def test_a_step_compiles(slice_name, tensor, rows, width):
    engine = round_on(mesh_of(slice_name, tensor))
    compiled = engine.lower_step(rows, width).compile()
    text = compiled.as_text()
    assert len(re.findall(r" custom-call\(.*ragged_paged_attention", text)) == TARGET.num_layers
    pages = [x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(engine.memory.caches)]
    assert compiled.memory_analysis().alias_size_in_bytes >= sum(2 * math.prod(shape) for shape in pages)
    shapes = {",".join(map(str, s)) for shape in pages for s in (shape, (shape[0] * shape[1], *shape[2:]))}
    copied = re.findall(rf"= bf16\[(?:{'|'.join(shapes)})\]\S* copy(?:-start)?\(", text)
    assert not copied, "pages are copied instead of updated in place"


def test_drafting_compiles():
    engine = round_on(mesh_of("v5e:2x2", 2))
    compiled = engine.lower_propose().compile()
    # All memory passes through where it is, in the layout it has.
    memory = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(engine.memory))
    assert compiled.memory_analysis().alias_size_in_bytes >= memory


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=lambda x: x.__name__)
def test_training_attention_compiles_forward_and_backward(dtype):
    """Sizes of a real row, heads of a width that has to be padded."""
    mesh = mesh_of("v5e:2x2", 4)
    by_head, whole = NamedSharding(mesh, P(None, None, "tensor")), NamedSharding(mesh, P())
    array = lambda *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=by_head)
    q, k = array(1, 3584, 8, 64), array(1, 4096, 4, 64)
    bounds = jax.ShapeDtypeStruct((1, 3584), jnp.int32, sharding=whole)

    def loss(q, k, v, intervals):
        out, log_mass = KernelIntervals()(q, k, v, intervals, 0.1)
        return jnp.sum(out**2) + jnp.sum(log_mass)

    with jax.set_mesh(mesh):
        compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, k, k, Intervals(bounds, bounds)).compile()
    kernels = re.findall(r'custom_call_target="tpu_custom_call".*?op_name="([^"]*)"', compiled.as_text())
    assert len(kernels) == 3
    # No [queries, keys] anything outside the kernels.
    assert compiled.memory_analysis().temp_size_in_bytes < 3584 * 4096
