"""How decoder layers attend, and attention over a slot cache for ragged batches; `intervals` has that over whole rows.

Layers receive an `attend` function (DESIGN's attention contract) that is already bound to its mask or plan; they do
not know whether they run whole rows or a ragged batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.types import RaggedTokens


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Static facts of one layer's attention.

    Attributes:
        scale: factor on query-key products.
        window: a query at position p sees keys in (p - window, ...) only; None sees all.
    """

    scale: float
    window: int | None = None


NOTHING = -1e30
"""Score of a key that is not seen."""

Attend = Callable[[AttentionSpec, Array, Array, Array, Any], tuple[Array, Any]]
"""`attend(spec, q[..., N, H], k[..., K, H], v[..., K, H], cache) -> (out[..., N, H], cache)`."""


def heads_first_attention(
    q: Float[Array, "... Q N H"],
    k: Float[Array, "... K M H"],
    v: Float[Array, "... K M H"],
    mask: Bool[Array, "... Q M"],
    scale: float,
) -> Float[Array, "... Q N H"]:
    """Grouped-query softmax attention in float32; a query that sees no key yields 0.

    Args:
        q: queries; the N heads are K groups of N/K neighbours.
        k, v: keys and values, heads first, as caches are stored.
        mask: True where a query may see a key; broadcast over heads.
        scale: factor on the scores.
    """
    lead, (queries, heads, width) = q.shape[:-3], q.shape[-3:]
    kv_heads, group = k.shape[-3], heads // k.shape[-3]
    # Heads stay a dimension of their own: merged with others they could not stay split over devices.
    grouped = jnp.moveaxis(q.reshape(*lead, queries, kv_heads, group, width), -4, -2)
    grouped = grouped.reshape(*lead, kv_heads, group * queries, width)
    scores = jnp.einsum("...kqh,...kmh->...kqm", grouped, k, preferred_element_type=jnp.float32) * scale
    scores = scores.reshape(*lead, kv_heads, group, queries, -1)
    weights, total, _ = masked_exponentials(scores, mask[..., None, None, :, :])
    weights = weights.astype(v.dtype).reshape(*lead, kv_heads, group * queries, -1)
    out = jnp.einsum("...kqm,...kmh->...kqh", weights, v, preferred_element_type=jnp.float32)
    out = out.reshape(*lead, kv_heads, group, queries, width) / total
    return jnp.moveaxis(out, -2, -4).reshape(q.shape).astype(q.dtype)


def masked_exponentials(
    scores: Float[Array, "*lead M"], mask: Bool[Array, "*#lead #M"]
) -> tuple[Float[Array, "*lead M"], Float[Array, "*lead 1"], Float[Array, "*lead 1"]]:
    """Softmax before its division.

    Returns:
        Stabilised exponentials, their sum, and the score they are relative to (zeros, tiny and a large negative number
        where nothing is visible).
    """
    scores = jnp.where(mask, scores, NOTHING)
    peak = jax.lax.stop_gradient(jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), NOTHING / 10))
    weights = jnp.exp(scores - peak)
    return weights, jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny), peak


@struct.dataclass
class KVCache:
    """Keys (normed and rotated) and values of one layer by slot, head and absolute position, `[S, K, C, H]`.

    Heads come before positions so that attention reads the cache as it lies; the other order costs a transposed copy of
    it in every layer of every step. Rolling back is not writing: whoever attends says how many positions are visible,
    later rows overwrite.
    """

    k: Float[Array, "S K C H"]
    v: Float[Array, "S K C H"]

    @classmethod
    def create(cls, slots: int, length: int, kv_heads: int, head_dim: int, dtype: Any = jnp.float32) -> KVCache:
        """Return an empty cache."""
        shape = (slots, kv_heads, length, head_dim)
        return cls(k=jnp.zeros(shape, dtype), v=jnp.zeros(shape, dtype))

    def write(self, slots: Int[Array, "T"], positions: Int[Array, "T"], k: Array, v: Array) -> KVCache:
        """Store rows; out-of-range slots (padding) and positions past the end are dropped."""
        if slots.shape[0] == 1:
            return self._write_row(slots[0], positions[0], k, v)
        return KVCache(
            k=self.k.at[slots, :, positions].set(k.astype(self.k.dtype), mode="drop"),
            v=self.v.at[slots, :, positions].set(v.astype(self.v.dtype), mode="drop"),
        )

    def _write_row(self, slot: Int[Array, ""], position: Int[Array, ""], k: Array, v: Array) -> KVCache:
        """Store one row in a loop of at most one turn.

        XLA turns a one-row scatter into a dynamic-update-slice, fuses that into attention a second time, and then has
        to copy the whole cache four times a layer: a third of a one-token step on CPUs. It leaves a loop alone.
        """

        def store(_, cache: KVCache) -> KVCache:
            def update(to: Array, row: Array) -> Array:
                return jax.lax.dynamic_update_slice(to, row[:, :, None].astype(to.dtype), (slot, 0, position, 0))

            return KVCache(k=update(cache.k, k), v=update(cache.v, v))

        inside = (slot < self.k.shape[0]) & (position < self.k.shape[2])
        return jax.lax.fori_loop(0, inside.astype(jnp.int32), store, self)


@struct.dataclass
class Region:
    """A run of rows that attend together, as the `[s, Q]` rectangle of their slots.

    Attributes:
        slots: cache slot of each line of the rectangle, `[s]`; None where the lines are all slots in order.
        row_of: row index of the q-th query of a line, `[s, Q]`; T (out of range) where there is none.
        line: line of each row of the region; out of range for padding.
        offset: q of each row of the region.
    """

    slots: Int[Array, "s"] | None
    row_of: Int[Array, "s Q"]
    line: Int[Array, "t"]
    offset: Int[Array, "t"]


@struct.dataclass
class RaggedPlan:
    """Where the rows of a ragged batch sit in the rectangles that attention works on, and what they see.

    Attributes:
        batch: the batch the plan was made for.
        regions: rectangles; their rows side by side are the batch's rows in order.
        visible: a row sees its slot's cache positions `< visible[row]`, `[T]`.
        num_slots: S (static).
        causal: each row sees itself and all before it (static).
    """

    batch: RaggedTokens
    regions: tuple[Region, ...]
    visible: Int[Array, "T"]
    num_slots: int = struct.field(pytree_node=False)
    causal: bool = struct.field(pytree_node=False)


def make_plan(
    batch: RaggedTokens,
    num_slots: int,
    rows_per_slot: int,
    visible: Int[Array, "T"] | None = None,
    *,
    chunk: int = 0,
) -> RaggedPlan:
    """Compute the rectangles of a ragged batch once per forward.

    Args:
        batch: rows of a slot contiguous, consecutive positions, padding last (before the chunk and in it).
        num_slots: S.
        rows_per_slot: Q, at least the number of rows of any slot (static: part of the bucket).
        visible: override of what each row sees; by default a row sees itself and all before it.
        chunk: the last so many rows are a prompt chunk of one slot, a rectangle of its own: S x chunk queries for the
            sake of one slot would be wasted.

    Example, slots [0, 1, 1, 2] with S = 2 and Q = 2 gives row_of [[0, 4], [1, 2]] and offset [0, 0, 1, 0].
    """
    total = batch.slots.shape[0]
    regions: list[Region] = []
    if total > chunk:
        regions.append(_slots_region(batch.slots[: total - chunk], num_slots, rows_per_slot, total))
    if chunk:
        slots, q = batch.slots[total - chunk :], jnp.arange(chunk, dtype=jnp.int32)
        inside = slots < num_slots
        regions.append(
            Region(
                slots=slots[:1],
                row_of=jnp.where(inside, total - chunk + q, total)[None],
                line=jnp.where(inside, 0, 1),
                offset=q,
            )
        )
    causal = visible is None
    return RaggedPlan(batch, tuple(regions), batch.positions + 1 if visible is None else visible, num_slots, causal)


def _slots_region(slots: Int[Array, "t"], num_slots: int, rows_per_slot: int, total: int) -> Region:
    rows = jnp.arange(slots.shape[0], dtype=jnp.int32)
    # The first row of each slot; the scatter drops padding.
    start = jnp.full((num_slots,), total, jnp.int32).at[slots].min(rows, mode="drop")
    count = jnp.zeros((num_slots,), jnp.int32).at[slots].add(1, mode="drop")
    q = jnp.arange(rows_per_slot, dtype=jnp.int32)
    row_of = jnp.where(q[None, :] < count[:, None], start[:, None] + q[None, :], total)
    offset = rows - jnp.take(start, slots, mode="fill", fill_value=0)
    return Region(slots=None, row_of=row_of, line=slots, offset=jnp.where(slots < num_slots, offset, 0))


def cache_attend(plan: RaggedPlan) -> Attend:
    """Attention of ragged rows over the slot cache; writes the rows' keys and values first."""
    positions = plan.batch.positions

    def attend_region(region: Region, spec: AttentionSpec, q: Array, cache: KVCache) -> Array:
        lines = region.slots
        if lines is not None:
            cache = jax.tree.map(lambda x: jnp.take(x, lines, axis=0, mode="clip"), cache)
        rectangle = jnp.take(q, region.row_of, axis=0, mode="fill", fill_value=0)
        until = jnp.take(plan.visible, region.row_of, mode="fill", fill_value=0)
        key = jnp.arange(cache.k.shape[2], dtype=jnp.int32)
        mask = key[None, None, :] < until[:, :, None]
        if spec.window is not None:
            at = jnp.take(positions, region.row_of, mode="fill", fill_value=0)
            mask &= key[None, None, :] > at[:, :, None] - spec.window
        out = heads_first_attention(rectangle, cache.k, cache.v, mask, spec.scale)
        return out.at[region.line, region.offset].get(mode="fill", fill_value=0)

    def attend(spec: AttentionSpec, q, k, v, cache: KVCache):
        cache = cache.write(plan.batch.slots, positions, k, v)
        outs = [attend_region(region, spec, q, cache) for region in plan.regions]
        return outs[0] if len(outs) == 1 else jnp.concatenate(outs), cache

    return attend


@runtime_checkable
class AttentionBackend(Protocol):
    """How ragged rows attend over slots: what a layer's cache is, and the `attend` that works on it; hashable."""

    def create_cache(self, slots: int, length: int, kv_heads: int, head_dim: int, dtype: Any) -> Any:
        """Empty cache of one layer for `slots` sequences of up to `length` tokens: a pytree, donated and passed on."""

    def attend(self, plan: RaggedPlan) -> Attend:
        """Bind a batch: write the rows' keys and values, then attend."""


@dataclasses.dataclass(frozen=True)
class DenseAttention:
    """Masked products with the whole cache: any device, any mask."""

    def create_cache(self, slots: int, length: int, kv_heads: int, head_dim: int, dtype: Any) -> KVCache:
        """See `AttentionBackend`."""
        return KVCache.create(slots, length, kv_heads, head_dim, dtype)

    def attend(self, plan: RaggedPlan) -> Attend:
        """See `AttentionBackend`."""
        return cache_attend(plan)


DENSE = DenseAttention()
