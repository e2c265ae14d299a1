"""Attention over slots on TPUs: JAX's ragged paged kernel, with pages that each slot owns for good.

The kernel reads pages that hold keys and values side by side and answers the queries of many sequences at once, each
as long as it is: decoding, verification and prompts cost what they need. It only reads, so the rows' keys and
values are scattered into the pages first. Nothing is shared between slots, so a slot's pages are simply consecutive.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from dspark_jax.nn.attention import DENSE, Attend, AttentionBackend, AttentionSpec, RaggedPlan
from dspark_jax.types import RaggedTokens

LANES = 128
"""Head widths are padded to this; the kernel's strided reads of pages are not implemented for wider ones (jax 0.10)."""
_AXIS = "tensor"


@struct.dataclass
class PagedCache:
    """Keys and values of one layer by slot and position, in the kernel's layout.

    Attributes:
        pages: `[S * pages_per_slot, page_size, 2 * heads, width]`; head h's key is entry 2h, its value entry 2h + 1.
            Heads are counted over all shards, padding and repetition included (`HeadLayout`).
        pages_per_slot: slot s owns pages `s * pages_per_slot` and following (static).
    """

    pages: Float[Array, "pages page_size heads2 width"]
    pages_per_slot: int = struct.field(pytree_node=False)

    def write(self, slots: Int[Array, "T"], positions: Int[Array, "T"], k: Array, v: Array) -> PagedCache:
        """Store rows of `[heads, width]`; out-of-range slots (padding) and positions past the end are dropped."""
        pages, page_size, combined, width = self.pages.shape
        length, total = self.pages_per_slot * page_size, pages * page_size
        inside = (slots * length < total) & (positions < length)
        # Each dropped row has a place of its own past the end: no two rows then share one, which the scatter may use.
        row = jnp.where(inside, slots * length + positions, total + jnp.arange(slots.shape[0], dtype=jnp.int32))
        rows = jnp.stack([k, v], axis=2).reshape(k.shape[0], combined, width).astype(self.pages.dtype)
        flat = self.pages.reshape(total, combined, width).at[row].set(rows, mode="drop", unique_indices=True)
        return dataclasses.replace(self, pages=flat.reshape(self.pages.shape))


@struct.dataclass
class Sequences:
    """A ragged batch as the kernel wants it: the rows of each sequence side by side, without padding between them.

    Attributes:
        order: the batch's row that comes t-th, `[T]`; anything from the number of rows that count on.
        place: where each row of the batch went, `[T]`; T (out of range) for padding.
        slots: whose keys a sequence sees, `[n]`.
        starts: place of each sequence's first row, `[n + 1]`; from the last sequence on the number of rows that count.
        lengths: keys of each sequence, its own rows included, `[n]`.
        count: number of sequences, `[1]`, at least 1.
    """

    order: Int[Array, "T"]
    place: Int[Array, "T"]
    slots: Int[Array, "n"]
    starts: Int[Array, "n1"]
    lengths: Int[Array, "n"]
    count: Int[Array, "1"]


def find_sequences(batch: RaggedTokens, num_slots: int, limit: int) -> Sequences:
    """List the runs of rows that belong together; slots without rows are no sequence, segments of a prompt join.

    Args:
        batch: rows of a slot contiguous with consecutive positions; padding anywhere between slots.
        num_slots: S.
        limit: n, at least the number of runs (static).

    Example, slots [0, 2, 2, 3, 1], positions [7, 3, 4, 0, 0], S = 3, n = 4: order [0, 1, 2, 4, .], place [0, 1, 2, 5,
    3], slots [0, 2, 1, .], starts [0, 1, 3, 4, 4], lengths [8, 5, 1, .], count [3].
    """
    total = batch.slots.shape[0]
    row = jnp.arange(total, dtype=jnp.int32)
    inside = batch.slots < num_slots
    # The kernel must not be called without sequences: it fetches the first one's keys before it looks. Where all is
    # padding, row 0 stands in as the first token of slot 0; what it sees is thrown away.
    real = inside | (row == 0) & ~jnp.any(inside)
    slots, positions = jnp.where(inside, batch.slots, 0), jnp.where(inside, batch.positions, 0)
    before = lambda x: jnp.roll(x, 1)  # noqa: E731
    follows = before(real) & (before(slots) == slots) & (before(positions) + 1 == positions) & (row > 0)
    first = real & ~follows
    rank, sequence = jnp.cumsum(real) - 1, jnp.cumsum(first) - 1
    of_row, of_first = jnp.where(real, sequence, limit + 1), jnp.where(first, sequence, limit + 1)
    zeros = jnp.zeros((limit,), jnp.int32)
    return Sequences(
        order=jnp.zeros((total,), jnp.int32).at[jnp.where(real, rank, total)].set(row, mode="drop"),
        place=jnp.where(inside, rank, total).astype(jnp.int32),
        slots=zeros.at[of_first].set(slots, mode="drop"),
        starts=jnp.full((limit + 1,), jnp.sum(real), jnp.int32).at[of_first].set(rank, mode="drop"),
        lengths=zeros.at[of_row].max(positions + 1, mode="drop"),
        count=jnp.sum(first, dtype=jnp.int32)[None],
    )


@dataclasses.dataclass(frozen=True)
class HeadLayout:
    """How K/V heads lie on the mesh's tensor axis.

    Attributes:
        repeat: every head is stored so often, since there are fewer heads than shards.
        shards: size of the axis.
        local: heads of a shard.
        padded: the same with the zero heads that fill up the kernel's tiles.
    """

    repeat: int
    shards: int
    local: int
    padded: int

    @property
    def stored(self) -> int:
        """Heads of a cache over all shards."""
        return self.shards * self.padded


def head_layout(kv_heads: int, shards: int) -> HeadLayout:
    """Split K/V heads over the tensor axis; where there are fewer, give each shard a copy of the one it needs.

    Args:
        kv_heads: K.
        shards: size of the tensor axis.

    Raises:
        ValueError: neither divides the other.

    Example: 8 heads over 4 shards are 2 a shard; over 16 shards, 1 a shard, each head on 2 neighbours.
    """
    if kv_heads % shards and shards % kv_heads:
        raise ValueError(
            f"{kv_heads} K/V heads on a tensor axis of {shards}: choose an axis size that divides the number of heads "
            "or is a multiple of it"
        )
    local = max(kv_heads // shards, 1)
    # Keys and values together fill the kernel's tiles for 1, 2, 4 or a multiple of 8 heads.
    padded = next((n for n in (1, 2, 4) if local <= n), -(-local // 8) * 8)
    return HeadLayout(repeat=max(shards // kv_heads, 1), shards=shards, local=local, padded=padded)


@dataclasses.dataclass(frozen=True)
class PagedAttention:
    """Attention by `jax.experimental.pallas.ops.tpu.ragged_paged_attention`, for causal batches.

    Attributes:
        mesh: its axis `tensor` splits heads; None on one device.
        page_size: tokens of a page. Pages are moved whole, and a slot's lie side by side: large ones cost little.
        pages_per_block: pages fetched and worked on at once.
        rows_per_block: queries worked on at once; rows of several sequences share a block, each computing all of it.
        vmem_limit_bytes: what the kernel may take of a core's vector memory. The defaults need a third of it with 8
            heads of width 128 in bfloat16, and it is there on every TPU from v4 on.
    """

    mesh: Mesh | None = None
    page_size: int = 128
    pages_per_block: int = 4
    rows_per_block: int = 32
    vmem_limit_bytes: int = 16 * 2**20

    @property
    def shards(self) -> int:
        """Size of the tensor axis."""
        return 1 if self.mesh is None else int(self.mesh.shape[_AXIS])

    def create_cache(self, slots: int, length: int, kv_heads: int, head_dim: int, dtype: Any) -> PagedCache:
        """See `AttentionBackend`; the length is rounded up to whole pages.

        Raises:
            ValueError: heads that are too wide for the kernel.
        """
        if head_dim > LANES:
            raise ValueError(f"the paged kernel takes heads of up to {LANES}, found {head_dim}: use dense attention")
        per_slot = -(-length // self.page_size)
        heads = head_layout(kv_heads, self.shards).stored
        pages = jnp.zeros((slots * per_slot, self.page_size, 2 * heads, LANES), dtype)
        if self.mesh is not None:
            pages = jax.lax.with_sharding_constraint(pages, NamedSharding(self.mesh, P(None, None, _AXIS)))
        return PagedCache(pages, per_slot)

    def attend(self, plan: RaggedPlan) -> Attend:
        """See `AttentionBackend`; rows at or past a slot's end see junk.

        Raises:
            ValueError: a plan that is not causal, which the kernel cannot mask.
        """
        if not plan.causal:
            raise ValueError("paged attention is causal, this plan says what its rows see: use dense attention for it")
        limit = sum(region.row_of.shape[0] for region in plan.regions)
        sequences = find_sequences(plan.batch, plan.num_slots, limit)

        def attend(spec: AttentionSpec, q, k, v, cache: PagedCache):
            layout = head_layout(k.shape[1], self.shards)
            if q.shape[1] % self.shards:
                raise ValueError(f"{q.shape[1]} query heads do not split over a tensor axis of {self.shards}")
            k, v = (jnp.repeat(x, layout.repeat, axis=1) if layout.repeat > 1 else x for x in (k, v))
            local = functools.partial(self._update_and_attend, spec, layout)
            if self.mesh is not None:
                heads, pages = P(None, _AXIS), P(None, None, _AXIS)
                local = jax.shard_map(
                    local,
                    mesh=self.mesh,
                    in_specs=(heads, heads, heads, pages, P(), P()),
                    out_specs=(heads, pages),
                    check_vma=False,
                )
            return local(q, k, v, cache, plan.batch, sequences)

        return attend

    def _update_and_attend(
        self,
        spec: AttentionSpec,
        layout: HeadLayout,
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"],
        v: Float[Array, "T K H"],
        cache: PagedCache,
        batch: RaggedTokens,
        sequences: Sequences,
    ) -> tuple[Float[Array, "T N H"], PagedCache]:
        """One shard's heads: write the rows, then run the kernel over the sequences."""
        # Imported here: it brings all of Mosaic, which only TPUs need.
        from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

        rows, heads, head_dim = q.shape
        width, group = cache.pages.shape[-1], heads // layout.local
        spare = layout.padded - layout.local

        def pad(x: Array, extra: int) -> Array:
            return jnp.pad(x, ((0, 0), (0, extra), (0, width - head_dim)))

        cache = cache.write(batch.slots, batch.positions, pad(k, spare), pad(v, spare))
        own = jnp.arange(cache.pages_per_slot, dtype=jnp.int32)
        dtype = cache.pages.dtype
        # Mosaic has no float32 passes for bfloat16 products, whatever precision the process asks of its products.
        products = jax.default_matmul_precision("default") if dtype == jnp.bfloat16 else contextlib.nullcontext()
        with products:
            out = ragged_paged_attention(
                pad(jnp.take(q, sequences.order, axis=0), spare * group).astype(dtype),
                cache.pages,
                sequences.lengths,
                sequences.slots[:, None] * cache.pages_per_slot + own,
                sequences.starts,
                sequences.count,
                sm_scale=spec.scale,
                sliding_window=spec.window,
                num_kv_pages_per_block=min(self.pages_per_block, cache.pages_per_slot),
                num_queries_per_block=min(self.rows_per_block, rows),
                vmem_limit_bytes=self.vmem_limit_bytes,
            )
        out = out[:, :heads, :head_dim].astype(q.dtype)
        return out.at[sequences.place].get(mode="fill", fill_value=0), cache


def attention_backend(name: str | None = None, mesh: Mesh | None = None, *, head_dim: int = LANES) -> AttentionBackend:
    """The attention backend of a name.

    Args:
        name: "dense" or "paged"; None takes the paged kernel on TPUs, where no head is too wide for it, and dense
            attention elsewhere.
        mesh: devices of the paged kernel; None for one.
        head_dim: width of the model's widest head.

    Raises:
        ValueError: an unknown name.
    """
    if name is None:
        name = "paged" if jax.default_backend() == "tpu" and head_dim <= LANES else "dense"
    if name == "dense":
        return DENSE
    if name == "paged":
        return PagedAttention(mesh)
    raise ValueError(f"unknown attention backend {name!r}: expected 'dense' or 'paged'")
