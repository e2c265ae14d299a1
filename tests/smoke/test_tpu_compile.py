"""The engine's programs compiled for TPUs on a machine without one: what the kernel refuses, it refuses here."""

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
from dspark_jax.engine.compiled import prompt_chunk
from dspark_jax.engine.state import Limits, Memory, Weights
from dspark_jax.engine.steps import Steps
from dspark_jax.nn.paged import PagedAttention
from dspark_jax.sharding import AXES, tree_shardings
from dspark_jax.target.loading import parameter_shapes
from dspark_jax.training.tpu import topology_devices
from dspark_jax.types import TargetTables

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


def inputs(steps, config, mesh):
    """Abstract weights, slots and memory with their shardings."""
    target, dtype = steps.target, steps.dtype
    table = jax.ShapeDtypeStruct((target.vocab_size, target.hidden_size), dtype)
    draft = jax.eval_shape(lambda: functions_for(config).initialise(jax.random.key(0), config.feature_width))
    half = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), tree)
    weights = Weights(half(parameter_shapes(target)), TargetTables(table, table), half(draft))
    whole = NamedSharding(mesh, P())
    slots, memory = jax.eval_shape(lambda: steps.init(target.vocab_size, 4))
    pages = NamedSharding(mesh, P(None, None, "tensor"))
    place = lambda tree, shardings: jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings
    )
    everywhere = lambda tree: place(tree, jax.tree.map(lambda _: whole, tree))
    # The drafter's dense caches: heads split where they can be, as its projections give them.
    split = P(None, "tensor") if target.num_kv_heads % mesh.shape["tensor"] == 0 else P()
    heads = jax.tree.map(lambda _: NamedSharding(mesh, split), memory.draft)
    memory = Memory(place(memory.caches, jax.tree.map(lambda _: pages, memory.caches)), place(memory.draft, heads))
    return place(weights, tree_shardings(mesh, weights)), everywhere(slots), memory


def prepare(mesh):
    """Steps over a mesh and the arguments of `propose`, all abstract."""
    config = drafter_config(TARGET)
    steps = Steps(
        target=TARGET, drafter=functions_for(config, jnp.bfloat16), dtype=jnp.bfloat16, slots=SLOTS, max_length=LENGTH,
        context=LENGTH - BLOCK - 1, policy="fixed", limit=BLOCK, block_size=BLOCK, attention=PagedAttention(mesh),
    )  # fmt: skip
    number = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
    limits = Limits(number(jnp.float32), number(jnp.int32), number(jnp.float32, 1))
    return steps, (*inputs(steps, config, mesh), limits)


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
    steps, (weights, slots, memory, limits) = prepare(mesh_of(slice_name, tensor))
    draft = jax.eval_shape(steps.propose, weights, slots, memory, limits)[1] if rows else None
    chunk = prompt_chunk([], 0, 0, width) if width else None
    step = jax.jit(functools.partial(steps.step, rows=rows), donate_argnums=(1, 2))
    compiled = step.lower(weights, slots, memory, draft, chunk).compile()
    text = compiled.as_text()
    assert len(re.findall(r" custom-call\(.*ragged_paged_attention", text)) == TARGET.num_layers
    pages = [x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(memory.caches)]
    assert compiled.memory_analysis().alias_size_in_bytes >= sum(2 * math.prod(shape) for shape in pages)
    shapes = {",".join(map(str, s)) for shape in pages for s in (shape, (shape[0] * shape[1], *shape[2:]))}
    copied = re.findall(rf"= bf16\[(?:{'|'.join(shapes)})\]\S* copy(?:-start)?\(", text)
    assert not copied, "pages are copied instead of updated in place"


def test_drafting_compiles():
    steps, arguments = prepare(mesh_of("v5e:2x2", 2))
    compiled = jax.jit(steps.propose, donate_argnums=2).lower(*arguments).compile()
    # All memory passes through where it is, in the layout it has.
    memory = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(arguments[2]))
    assert compiled.memory_analysis().alias_size_in_bytes >= memory
