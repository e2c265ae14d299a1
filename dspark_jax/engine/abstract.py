"""The engine's round over shapes alone: no weights, no requests, for devices that need not be there."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dspark_jax.config import DecoderConfig
from dspark_jax.draft.dspark import DSparkFunctions
from dspark_jax.draft.eagle3 import Eagle3Functions
from dspark_jax.engine.compiled import prompt_chunk
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
        weights, slots, memory: as shapes with shardings: heads and widths over the mesh's tensor axis.
    """

    steps: Steps
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
        return jax.jit(self.steps.propose, donate_argnums=2).lower(self.weights, self.slots, self.memory, self.limits)

    def lower_step(self, rows: int, chunk: int) -> jax.stages.Lowered:
        """Verify so many rows (0 for none) beside so many prompt tokens (0 for none)."""
        draft = jax.eval_shape(self.steps.propose, self.weights, self.slots, self.memory, self.limits)[1]
        step = jax.jit(functools.partial(self.steps.step, rows=rows), donate_argnums=(1, 2))
        prompt = prompt_chunk([], 0, 0, chunk) if chunk else None
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
    """
    block = drafter.config.block_size
    paged = target.widest_head <= LANES
    steps = Steps(
        target=target,
        drafter=drafter,
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

    def everywhere(tree: Any, spec: P) -> Any:
        return place(tree, jax.tree.map(lambda _: NamedSharding(mesh, spec), tree))

    table: Any = jax.ShapeDtypeStruct((target.vocab_size, target.hidden_size), dtype)
    target_params, draft_params = (
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), tree) for tree in params
    )
    tables = TargetTables(embed=table, head=table, embed_scale=target.embed_scale, soft_cap=target.soft_cap)
    weights = Weights(target_params, tables, draft_params)
    empty, memory = jax.eval_shape(lambda: steps.init(target.vocab_size, MAX_STOP_TOKENS))

    def dense(tree: Any, decoder: DecoderConfig, layer: int) -> Any:
        """Dense caches: heads split where they can be, as the projections give them."""
        heads = decoder.attention(layer).num_kv_heads
        return everywhere(tree, P() if heads % mesh.shape["tensor"] else P(None, "tensor"))

    if paged:
        caches = everywhere(memory.caches, P(None, None, "tensor"))
    else:
        caches = tuple(dense(cache, target, i) for i, cache in enumerate(memory.caches))
    return AbstractRound(
        steps=steps,
        weights=place(weights, tree_shardings(mesh, weights)),
        slots=everywhere(empty, P()),
        # All layers of a drafter that this package trains are alike.
        memory=Memory(caches, dense(memory.draft, drafter.config.decoder, 0)),
    )
