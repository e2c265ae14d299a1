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


KEY_BLOCK = 128
"""Keys that attention over a cache works on at once."""


def cache_attention(
    q: Float[Array, "s Q N H"],
    cache: KVCache,
    lines: Int[Array, "s"] | None,
    begin: Int[Array, "s Q"],
    end: Int[Array, "s Q"],
    scale: float,
) -> Float[Array, "s Q N H"]:
    """Grouped-query softmax attention in float32 over runs of cached keys; a query that sees no key yields 0.

    A loop over blocks of keys, from the first that anyone sees to the last: what a cache holds room for costs nothing.
    Blocks that a query does not see leave its result as it is, to the last bit.

    Args:
        q: queries; the N heads are K groups of N/K neighbours.
        cache: keys and values.
        lines: slot of each line of queries; None where they are all slots in order.
        begin, end: a query sees its slot's keys from `begin` up to and not including `end`.
        scale: factor on the scores.
    """
    count, queries, heads, width = q.shape
    kv_heads, length = cache.k.shape[1:3]
    group, block = heads // kv_heads, min(KEY_BLOCK, length)
    # Heads stay a dimension of their own: merged with others they could not stay split over devices.
    grouped = jnp.moveaxis(q.reshape(count, queries, kv_heads, group, width), 1, 3)
    grouped = grouped.reshape(count, kv_heads, group * queries, width)

    def read(x: Array, at: Array) -> Array:
        x = jax.lax.dynamic_slice_in_dim(x, at, block, axis=2)
        return x if lines is None else jnp.take(x, lines, axis=0, mode="clip")

    def turn(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        peak, total, out = carry
        at = jnp.minimum(i * block, length - block)  # the last block may begin inside the one before
        k, v = read(cache.k, at), read(cache.v, at)
        key = at + jnp.arange(block, dtype=jnp.int32)
        mask = (key >= jnp.maximum(begin, i * block)[..., None]) & (key < end[..., None])
        scores = jnp.einsum("skqh,skmh->skqm", grouped, k, preferred_element_type=jnp.float32) * scale
        scores = scores.reshape(count, kv_heads, group, queries, block)
        scores = jnp.where(mask[:, None, None], scores, NOTHING)
        highest = jnp.maximum(peak, jnp.max(scores, axis=-1, keepdims=True))
        weights, shrink = jnp.exp(scores - highest), jnp.exp(peak - highest)
        part = weights.astype(v.dtype).reshape(count, kv_heads, group * queries, block)
        part = jnp.einsum("skqm,skmh->skqh", part, v, preferred_element_type=jnp.float32)
        total = total * shrink + jnp.sum(weights, axis=-1, keepdims=True)
        return highest, total, out * shrink + part.reshape(out.shape)

    nothing = jnp.zeros((count, kv_heads, group, queries, 1), jnp.float32)
    start = (nothing + NOTHING / 10, nothing, jnp.zeros((*nothing.shape[:-1], width), jnp.float32))
    if block == length:
        _, total, out = turn(jnp.int32(0), start)
    else:
        first, last = jnp.min(jnp.where(begin < end, begin, length)) // block, -(-jnp.max(end) // block)
        _, total, out = jax.lax.fori_loop(first, last, turn, start)
    out = out / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    return jnp.moveaxis(out, 3, 1).reshape(q.shape).astype(q.dtype)


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
    segments: tuple[int, int] = (0, 0),
) -> RaggedPlan:
    """Compute the rectangles of a ragged batch once per forward.

    Args:
        batch: rows of a slot contiguous, consecutive positions, padding last (before the segments and in each).
        num_slots: S.
        rows_per_slot: Q, at least the number of rows of any slot (static: part of the bucket).
        visible: override of what each row sees; by default a row sees itself and all before it.
        segments: (n, W): the last n W rows are prompt segments of W rows, each of one slot and each a line of a second
            rectangle: the first would need as many queries for every slot.

    Example, slots [0, 1, 1, 2] with S = 2 and Q = 2 gives row_of [[0, 4], [1, 2]] and offset [0, 0, 1, 0].
    """
    total, (count, width) = batch.slots.shape[0], segments
    begin = total - count * width
    regions: list[Region] = []
    if begin:
        regions.append(_slots_region(batch.slots[:begin], num_slots, rows_per_slot, total))
    if count:
        slots, q = batch.slots[begin:], jnp.arange(count * width, dtype=jnp.int32)
        inside = slots < num_slots
        regions.append(
            Region(
                slots=slots[::width],
                row_of=jnp.where(inside, begin + q, total).reshape(count, width),
                line=jnp.where(inside, q // width, count),
                offset=q % width,
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
        rectangle = jnp.take(q, region.row_of, axis=0, mode="fill", fill_value=0)
        end = jnp.take(plan.visible, region.row_of, mode="fill", fill_value=0)
        begin = jnp.zeros_like(end)
        if spec.window is not None:
            at = jnp.take(positions, region.row_of, mode="fill", fill_value=0)
            begin = jnp.maximum(at - spec.window + 1, 0)
        out = cache_attention(rectangle, cache, region.slots, begin, end, spec.scale)
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
