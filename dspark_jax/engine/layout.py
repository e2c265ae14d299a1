"""Where an engine's weights and state live on a mesh: heads, widths and vocabulary over its `tensor` axis."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dspark_jax.draft.contract import DrafterFunctions
from dspark_jax.draft.dspark import DSparkFunctions
from dspark_jax.nn.attention import KVCache
from dspark_jax.nn.paged import PagedCache
from dspark_jax.sharding import PARAMETERS, REPLICATED_MARKOV
from dspark_jax.types import Proposal

MarkovTables = Literal["split", "replicated"]
_AXIS = "tensor"


def check_mesh(mesh: Mesh) -> None:
    """Refuse a mesh that splits requests.

    Raises:
        ValueError: axes other than `tensor` with more than one device.
    """
    if mesh.size != mesh.shape[_AXIS]:
        raise ValueError(f"an engine's mesh has one axis, tensor: found {dict(mesh.shape)}; run one engine a replica")


def drafting_layout(
    functions: DrafterFunctions | None, markov_tables: MarkovTables
) -> tuple[Sequence[tuple[str, P]], DrafterFunctions | None]:
    """How parameters are split, and the drafter's functions for parameters that lie so.

    Args:
        functions: the drafter's; None for plain decoding.
        markov_tables: whether the sequential head's tables are split by vocabulary, with two small gathers and a row
            sum for every draft token, or whole on every device, with one gather of a block's logits.

    Raises:
        ValueError: whole tables of a drafter that has none.
    """
    if markov_tables == "split":
        return PARAMETERS, functions
    if not isinstance(functions, DSparkFunctions) or not functions.config.markov_rank:
        raise ValueError("markov_tables is 'replicated', but there is no drafter with a sequential head")
    return REPLICATED_MARKOV, dataclasses.replace(functions, gather_logits=True)


def state_shardings(mesh: Mesh, tree: Any) -> Any:
    """NamedShardings of what the device programs take and give besides weights.

    Caches are split by K/V heads and a proposal's distributions by vocabulary, where the axis divides them; all else,
    which is small, is whole on every device.

    Args:
        mesh: its `tensor` axis splits.
        tree: any nesting of slots, memory, drafts and reports, as arrays or shapes.
    """

    whole = NamedSharding(mesh, P())

    def split(x: Any, axis: int) -> NamedSharding:
        divides = x.shape[axis] % mesh.shape[_AXIS] == 0
        return NamedSharding(mesh, P(*(None,) * axis, _AXIS)) if divides else whole

    def of(x: Any) -> Any:
        if isinstance(x, KVCache):
            return jax.tree.map(lambda y: split(y, 1), x)
        if isinstance(x, PagedCache):
            return jax.tree.map(lambda y: split(y, 2), x)
        if isinstance(x, Proposal):
            return jax.tree.map(lambda y: split(y, 2) if y.ndim == 3 else whole, x)
        return whole

    return jax.tree.map(of, tree, is_leaf=lambda x: isinstance(x, (KVCache, PagedCache, Proposal)))
