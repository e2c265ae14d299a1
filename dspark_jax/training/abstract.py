"""A run's train step over shapes alone: no weights, no data, for any mesh, also one of devices that are not there."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh

from dspark_jax.config import DecoderConfig, RopeConfig
from dspark_jax.data.pipeline import Batch
from dspark_jax.sharding import activation_sharding, row_shards, tree_shardings
from dspark_jax.target.loading import Target, parameter_shapes
from dspark_jax.training.columns import SampledVocabulary
from dspark_jax.training.config import TrainConfig, drafter_config
from dspark_jax.training.setup import create_step, frequent_columns
from dspark_jax.training.step import Step, init_state
from dspark_jax.types import TargetTables

# A schedule's length is a constant of the program: any number gives the same one.
_SCHEDULE = 1000


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, *, tied: bool) -> DecoderConfig:
    return DecoderConfig(
        family="qwen3",
        vocab_size=151_936,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=1_000_000.0),
        max_position=40_960,
        qk_norm=True,
        tie_word_embeddings=tied,
    )


KNOWN_TARGETS: dict[str, DecoderConfig] = {
    "smollm2-135m": DecoderConfig(
        family="llama",
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=100_000.0),
        max_position=8192,
        tie_word_embeddings=True,
    ),
    "Qwen/Qwen3-4B": _qwen3(2560, 9728, 36, 32, tied=True),
    "Qwen/Qwen3-8B": _qwen3(4096, 12_288, 36, 32, tied=False),
    "Qwen/Qwen3-14B": _qwen3(5120, 17_408, 40, 40, tied=False),
}
"""Shapes of the targets of `configs/`, as in the models' own config.json."""


def abstract_target(name: str, config: DecoderConfig, dtype: Any) -> Target:
    """A target whose arrays are shapes."""
    table: Any = jax.ShapeDtypeStruct((config.vocab_size, config.hidden_size), dtype)
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), parameter_shapes(config))
    tables = TargetTables(embed=table, head=table, embed_scale=config.embed_scale, soft_cap=config.soft_cap)
    return Target(name, config, params, tables, None, (), dtype)


@dataclasses.dataclass(frozen=True)
class AbstractStep:
    """A train step and the shapes and layouts of its arguments.

    Attributes:
        step: the pure functions.
        mesh: what the layouts refer to.
        state, batch, tables, target_params: arguments of `step.train`, as shapes with shardings; without target
            parameters where the batch carries the target's features.
    """

    step: Step
    mesh: Mesh
    state: Any
    batch: Any
    tables: Any
    target_params: Any

    def lower(self) -> jax.stages.Lowered:
        """Trace and lower the step as training runs it."""
        with jax.set_mesh(self.mesh):
            train = self.step.jit_train(self.mesh, self.state)
            return train.lower(self.state, self.batch, self.tables, self.target_params)

    def trace(self) -> ClosedJaxpr:
        """The step's program before any compiler has seen it, over whole (global) arrays."""
        with jax.set_mesh(self.mesh):
            return jax.make_jaxpr(self.step.train)(self.state, self.batch, self.tables, self.target_params)


def abstract_step(config: TrainConfig, target: Target, mesh: Mesh) -> AbstractStep:
    """Build a run's train step over shapes.

    Args:
        config: the run; its own mesh is not read.
        target: from `abstract_target`, or a real one.
        mesh: of the devices to compile for.

    Raises:
        ValueError: the rows of a part do not divide over the mesh, or settings that do not fit the target.
    """
    rows, shards = config.batch_size // config.accumulation, row_shards(mesh)
    if rows % shards:
        raise ValueError(
            f"{rows} rows an accumulation step (batch_size {config.batch_size} / accumulation {config.accumulation}) "
            f"do not divide over {shards} shards of the mesh"
        )
    step = create_step(config, target, config.steps or _SCHEDULE, _sampled(config))
    state = jax.eval_shape(lambda: init_state(step.functions, step.optimizer, config.seed))
    online = config.features_cache is None
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=activation_sharding(mesh, "accumulated_rows")),
        _batch(config, target.config, rows, with_features=not online),
    )
    return AbstractStep(
        step=step,
        mesh=mesh,
        state=_laid_out(mesh, state),
        batch=batch,
        tables=_laid_out(mesh, target.tables),
        target_params=_laid_out(mesh, target.params) if online else None,
    )


def _laid_out(mesh: Mesh, tree: Any) -> Any:
    shardings = tree_shardings(mesh, tree)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)


def _batch(config: TrainConfig, target: DecoderConfig, rows: int, *, with_features: bool) -> Batch:
    lead, length, width = (config.accumulation, rows), config.sequence_length, target.hidden_size

    def array(*dims: int, dtype: Any = np.int32) -> Any:
        return jax.ShapeDtypeStruct((*lead, *dims), dtype)

    taps = len(drafter_config(config, target).target_layer_ids) if with_features else 0
    return Batch(
        tokens=array(length),
        loss_mask=array(length, dtype=np.bool_),
        segments=array(length),
        positions=array(length),
        row_ids=array(),
        taps=array(length, taps * width, dtype=jnp.bfloat16) if taps else None,
        last_hidden=array(length, width, dtype=jnp.bfloat16) if with_features else None,
    )


def _sampled(config: TrainConfig) -> SampledVocabulary | None:
    """A sampled vocabulary of the run's size; which tokens are frequent does not change the program."""
    if config.vocab_columns is None:
        return None
    return SampledVocabulary(config.vocab_columns, tuple(range(frequent_columns(config))), config.seed)


def parameter_count(tree: Any) -> int:
    """Elements of a tree of arrays or shapes."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))
