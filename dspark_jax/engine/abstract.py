"""The engine's round over shapes alone: no weights, no requests, for devices that need not be there."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dspark_jax.config import DecoderConfig
from dspark_jax.draft.dspark import DSparkFunctions
from dspark_jax.draft.eagle3 import Eagle3Functions
from dspark_jax.engine.layout import MarkovTables, check_mesh, drafting_layout, state_shardings
from dspark_jax.engine.prompts import empty_chunk
from dspark_jax.engine.requests import MAX_STOP_TOKENS
from dspark_jax.engine.state import Limits, Memory, Slots, Weights
from dspark_jax.engine.steps import Steps
from dspark_jax.nn.attention import DENSE
from dspark_jax.nn.paged import LANES, PagedAttention
from dspark_jax.sharding import tree_shardings
from dspark_jax.types import TargetTables


@dataclasses.dataclass(frozen=True)
class AbstractRound:
    """The two programs of a round and the shapes and layouts of their arguments.

    Attributes:
        steps: the functions.
        mesh: of the devices.
        weights, slots, memory: as shapes with shardings: heads and widths over the mesh's tensor axis.
    """

    steps: Steps
    mesh: Mesh
    weights: Weights
    slots: Slots
    memory: Memory

    @property
    def limits(self) -> Limits:
        """Arguments of drafting that change from step to step."""
        shape = jax.ShapeDtypeStruct
        values: dict[str, Any] = {
            "threshold": shape((), jnp.float32),
            "capacity": shape((), jnp.int32),
            "seconds": shape((1,), jnp.float32),
        }
        return Limits(**values)

    def lower_propose(self) -> jax.stages.Lowered:
        """Draft a block in every slot."""
        with jax.set_mesh(self.mesh):
            propose = jax.jit(self.steps.propose, donate_argnums=2)
            return propose.lower(self.weights, self.slots, self.memory, self.limits)

    def lower_step(self, rows: int, chunk: int) -> jax.stages.Lowered:
        """Verify so many rows (0 for none) beside so many prompt tokens (0 for none)."""
        step = jax.jit(functools.partial(self.steps.step, rows=rows), donate_argnums=(1, 2))
        prompt = empty_chunk((chunk,), chunk, self.steps.slots) if chunk else None
        with jax.set_mesh(self.mesh):
            draft = jax.eval_shape(self.steps.propose, self.weights, self.slots, self.memory, self.limits)[1]
            return step.lower(self.weights, self.slots, self.memory, draft if rows else None, prompt)


def abstract_round(
    target: DecoderConfig,
    drafter: DSparkFunctions | Eagle3Functions,
    params: tuple[Any, Any],
    mesh: Mesh,
    *,
    slots: int,
    max_length: int,
    dtype: Any = jnp.bfloat16,
    markov_tables: MarkovTables = "split",
) -> AbstractRound:
    """Describe rounds that verify whole blocks, with paged attention where no head is too wide for it.

    Args:
        target: shape of the target.
        drafter: the drafter.
        params: shapes of the target's and the drafter's parameters.
        mesh: of the devices to compile for; its tensor axis splits heads, widths and vocabulary.
        slots: requests at a time.
        max_length: tokens that a slot holds.
        dtype: of weights, products and caches.
        markov_tables: whether the sequential head's tables are split by vocabulary or whole on every device.

    Raises:
        ValueError: a mesh with other axes than `tensor`, or tables of a drafter that has none.
    """
    check_mesh(mesh)
    rules, functions = drafting_layout(drafter, markov_tables)
    block = drafter.config.block_size
    paged = target.widest_head <= LANES
    steps = Steps(
        target=target,
        drafter=functions,
        dtype=dtype,
        slots=slots,
        max_length=max_length + block + 1,
        context=max_length,
        policy="fixed",
        limit=block,
        block_size=block,
        attention=PagedAttention(mesh) if paged else DENSE,
    )

    def place(tree: Any, shardings: Any) -> Any:
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)

    table: Any = jax.ShapeDtypeStruct((target.vocab_size, target.hidden_size), dtype)
    target_params, draft_params = (
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), tree) for tree in params
    )
    tables = TargetTables(embed=table, head=table, embed_scale=target.embed_scale, soft_cap=target.soft_cap)
    weights = Weights(target_params, tables, draft_params)
    empty = jax.eval_shape(lambda: steps.init(target.vocab_size, MAX_STOP_TOKENS))
    empty, memory = place(empty, state_shardings(mesh, empty))
    return AbstractRound(
        steps=steps,
        mesh=mesh,
        weights=place(weights, tree_shardings(mesh, weights, rules)),
        slots=empty,
        memory=memory,
    )
