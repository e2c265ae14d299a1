"""Interval attention as a TPU kernel, forward and backward: blocks of keys that no query of a block sees cost nothing.

Scores are kept with keys down and queries across, `[keys, queries]`: what belongs to a query (its bounds, its running
maximum and sum) is then a row of lanes, in memory and in the kernel alike. The backward pass computes the weights anew
from the log mass (Dao et al. 2022, algorithm 4); a gradient of the log mass only shifts the term that is subtracted.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from dspark_jax.nn.attention import NOTHING
from dspark_jax.nn.intervals import Intervals
from dspark_jax.sharding import current_mesh

LANES = 128
_ROWS, _AXIS = ("data", "fsdp"), "tensor"


@dataclasses.dataclass(frozen=True)
class KernelIntervals:
    """Interval attention by the kernel, rows and heads on the mesh that is set.

    Attributes:
        queries, keys: size of the blocks, multiples of 128. A block of scores (float32) and its gradient fit into the
            vector memory of every TPU from v4 on.
        interpret: run as plain JAX, for tests.
    """

    queries: int = 512
    keys: int = 512
    interpret: bool = False

    def __call__(self, q, k, v, intervals, scale):
        """See `IntervalAttention`.

        Raises:
            ValueError: heads that do not split over the mesh's tensor axis.
        """
        mesh = current_mesh()
        shards = 1 if mesh is None else int(mesh.shape[_AXIS])
        heads, kv_heads = q.shape[2], k.shape[2]
        if heads % shards or (kv_heads % shards and shards % kv_heads):
            raise ValueError(f"{heads} query and {kv_heads} K/V heads do not split over a tensor axis of {shards}")
        if shards > kv_heads:  # each shard gets a copy of the one it needs
            k, v = (jnp.repeat(x, shards // kv_heads, axis=2) for x in (k, v))
        attend = functools.partial(self._attend, scale)
        if mesh is not None:
            rows, by_head = P(_ROWS), P(_ROWS, None, _AXIS)
            attend = jax.shard_map(
                attend,
                mesh=mesh,
                in_specs=(by_head, by_head, by_head, rows),
                out_specs=(by_head, by_head),
                check_vma=False,
            )
        return attend(q, k, v, intervals)

    def _attend(self, scale: float, q: Array, k: Array, v: Array, intervals: Intervals) -> tuple[Array, Array]:
        """One shard: heads before positions, sizes padded to blocks, widths to lanes."""
        queries, keys, width = q.shape[1], k.shape[1], q.shape[3]
        sizes = _Sizes(
            queries=min(self.queries, _up(queries, LANES)), keys=min(self.keys, _up(keys, LANES)), scale=scale,
            interpret=self.interpret,
        )  # fmt: skip

        def lay_out(x: Array, block: int) -> Array:
            padding = [(0, 0), (0, _up(x.shape[1], block) - x.shape[1]), (0, 0), (0, _up(width, LANES) - width)]
            return jnp.pad(x, padding).transpose(0, 2, 1, 3)

        # Queries of the padding see nothing.
        bounds = [jnp.pad(x, [(0, 0), (0, _up(queries, sizes.queries) - queries)])[:, None] for x in
                  (intervals.begin, intervals.end)]  # fmt: skip
        out, log_mass = _attention(
            sizes, lay_out(q, sizes.queries), lay_out(k, sizes.keys), lay_out(v, sizes.keys), *bounds
        )
        return out.transpose(0, 3, 1, 2)[:, :queries, :, :width], log_mass[:, :, 0].transpose(0, 2, 1)[:, :queries]


class _Sizes(NamedTuple):
    """Static facts of a call: block sizes, factor on scores."""

    queries: int
    keys: int
    scale: float
    interpret: bool


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    sizes: _Sizes,
    q: Float[Array, "B N Q H"],
    k: Float[Array, "B K L H"],
    v: Float[Array, "B K L H"],
    begin: Int[Array, "B 1 Q"],
    end: Int[Array, "B 1 Q"],
) -> tuple[Float[Array, "B N H Q"], Float[Array, "B N 1 Q"]]:
    return _forward(sizes, q, k, v, begin, end)[0]


class _Visits(NamedTuple):
    """Which blocks meet: whether any query of a block sees any key of another, and what to fetch meanwhile.

    Attributes:
        seen: `[B, q blocks, key blocks]`, 1 where they meet.
        keys: the block of keys to hold at each turn, `[B, q blocks, key blocks]`: at turns without work the one that
            is there or comes next, so that nothing is fetched for nothing.
        queries: the block of queries to hold, in loops over queries inside keys, `[B, key blocks, q blocks]`.
    """

    seen: Int[Array, "B I J"]
    keys: Int[Array, "B I J"]
    queries: Int[Array, "B J I"]


def _visits(sizes: _Sizes, begin: Array, end: Array, length: int) -> _Visits:
    rows, blocks = begin.shape[0], length // sizes.keys
    sees = begin < end
    split = lambda x: x[:, 0].reshape(rows, -1, sizes.queries)  # noqa: E731
    low = jnp.min(split(jnp.where(sees, begin, length)), axis=-1)[..., None]
    high = jnp.max(split(jnp.where(sees, end, 0)), axis=-1)[..., None]
    first = jnp.arange(blocks, dtype=jnp.int32) * sizes.keys
    seen = (low < first + sizes.keys) & (high > first)
    return _Visits(seen.astype(jnp.int32), _held(seen), _held(seen.swapaxes(1, 2)))


def _held(seen: Array) -> Int[Array, "B I J"]:
    """Index of the block held at each turn of the last axis: the last one with work, before the first the first."""
    index = jnp.arange(seen.shape[-1], dtype=jnp.int32)
    last = jax.lax.cummax(jnp.where(seen, index, -1), axis=seen.ndim - 1)
    first = jnp.argmax(seen, axis=-1).astype(jnp.int32)[..., None]
    return jnp.where(last < 0, first, last)


def _dot(a: Array, b: Array, contract: tuple[int, int]) -> Float[Array, "I J"]:
    """Product over one axis of each, in float32."""
    # Mosaic has no float32 passes for bfloat16 products, whatever precision the process asks of its products.
    precision = jax.lax.Precision.DEFAULT if a.dtype == jnp.bfloat16 else None
    axes = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(a, b, axes, precision=precision, preferred_element_type=jnp.float32)


def _scores(sizes: _Sizes, q, k, begin, end, block) -> Float[Array, "keys queries"]:
    """Scaled scores of a block, `NOTHING` where the query does not see the key."""
    scores = _dot(k, q, (1, 1)) * sizes.scale
    key = block * sizes.keys + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0)
    return jnp.where((key >= begin) & (key < end), scores, NOTHING)


def _forward_kernel(sizes, seen, _, q, k, v, begin, end, out, log_mass, peak, mass, total):
    row, _, block, turn = (pl.program_id(i) for i in range(4))

    @pl.when(turn == 0)
    def start():
        peak[...] = jnp.full_like(peak, NOTHING / 10)
        mass[...] = jnp.zeros_like(mass)
        total[...] = jnp.zeros_like(total)

    @pl.when(seen[row, block, turn] > 0)
    def add():
        scores = _scores(sizes, q[...], k[...], begin[...], end[...], turn)
        new = jnp.maximum(peak[...], jnp.max(scores, axis=0, keepdims=True))
        weights, keep = jnp.exp(scores - new), jnp.exp(peak[...] - new)
        mass[...] = mass[...] * keep + jnp.sum(weights, axis=0, keepdims=True)
        total[...] = total[...] * keep + _dot(v[...], weights.astype(v.dtype), (0, 0))
        peak[...] = new

    @pl.when(turn == pl.num_programs(3) - 1)
    def finish():
        safe = jnp.maximum(mass[...], jnp.finfo(jnp.float32).tiny)
        out[...] = total[...] / safe
        log_mass[...] = peak[...] + jnp.log(safe)


def _query_gradient_kernel(sizes, seen, _, q, k, v, begin, end, log_mass, shift, dout, dq, total):
    row, _, block, turn = (pl.program_id(i) for i in range(4))

    @pl.when(turn == 0)
    def start():
        total[...] = jnp.zeros_like(total)

    @pl.when(seen[row, block, turn] > 0)
    def add():
        _, dscores = _block_gradients(sizes, q, k, v, begin, end, log_mass, shift, dout, turn)
        total[...] += _dot(k[...], dscores.astype(k.dtype), (0, 0))

    @pl.when(turn == pl.num_programs(3) - 1)
    def finish():
        dq[...] = (total[...] * sizes.scale).astype(dq.dtype)


def _key_gradient_kernel(sizes, seen, _, q, k, v, begin, end, log_mass, shift, dout, dk, dv, total_k, total_v):
    row, _, block, head, turn = (pl.program_id(i) for i in range(5))

    @pl.when((head == 0) & (turn == 0))
    def start():
        total_k[...] = jnp.zeros_like(total_k)
        total_v[...] = jnp.zeros_like(total_v)

    @pl.when(seen[row, turn, block] > 0)
    def add():
        weights, dscores = _block_gradients(sizes, q, k, v, begin, end, log_mass, shift, dout, block)
        total_k[...] += _dot(dscores.astype(q.dtype), q[...], (1, 0))
        total_v[...] += _dot(weights.astype(dout.dtype), dout[...], (1, 0))

    @pl.when((head == pl.num_programs(3) - 1) & (turn == pl.num_programs(4) - 1))
    def finish():
        dk[...] = (total_k[...] * sizes.scale).astype(dk.dtype)
        dv[...] = total_v[...].astype(dv.dtype)


def _block_gradients(sizes, q, k, v, begin, end, log_mass, shift, dout, block):
    """Weights of a block and the gradient by its scores (without their factor)."""
    weights = jnp.exp(_scores(sizes, q[...], k[...], begin[...], end[...], block) - log_mass[...])
    return weights, weights * (_dot(v[...], dout[...], (1, 1)) - shift[...])


class _QueryBlocks(NamedTuple):
    """What is fetched in loops over keys inside queries: grid (row, head, block of queries, block of keys).

    Attributes:
        query: queries and what has their shape, `[queries, width]`.
        key: keys and values of the head's group, `[keys, width]`.
        bound: `begin` and `end`, `[1, queries]`.
        across: by height, what lies across the queries, `[height, queries]`.
    """

    query: pl.BlockSpec
    key: pl.BlockSpec
    bound: pl.BlockSpec
    across: Callable[[int], pl.BlockSpec]


def _query_blocks(sizes: _Sizes, width: int, group: int) -> _QueryBlocks:
    def key(b, n, i, j, seen, held):
        return b, n // group, held[b, i, j], 0

    def across(height: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, height, sizes.queries), lambda b, n, i, j, *_: (b, n, 0, i))

    return _QueryBlocks(
        query=pl.BlockSpec((None, None, sizes.queries, width), lambda b, n, i, j, *_: (b, n, i, 0)),
        key=pl.BlockSpec((None, None, sizes.keys, width), key),
        bound=pl.BlockSpec((None, 1, sizes.queries), lambda b, n, i, j, *_: (b, 0, i)),
        across=across,
    )


def _forward(sizes, q, k, v, begin, end):
    rows, heads, queries, width = q.shape
    group, blocks = heads // k.shape[1], k.shape[2] // sizes.keys
    visits = _visits(sizes, begin, end, k.shape[2])
    at = _query_blocks(sizes, width, group)
    scratch = lambda size: pltpu.VMEM((size, sizes.queries), jnp.float32)  # noqa: E731
    out, log_mass = _call(
        _forward_kernel,
        sizes,
        (rows, heads, queries // sizes.queries, blocks),
        inner=1,
        products=2,
        in_specs=[at.query, at.key, at.key, at.bound, at.bound],
        out_specs=[at.across(width), at.across(1)],
        scratch=[scratch(1), scratch(1), scratch(width)],
        outputs=[_array((rows, heads, width, queries)), _array((rows, heads, 1, queries))],
    )(visits.seen, visits.keys, q, k, v, begin, end)
    return (out, log_mass), (q, k, v, begin, end, out, log_mass)


def _backward(sizes, residuals, cotangents):
    q, k, v, begin, end, out, log_mass = residuals
    dout, dlog_mass = cotangents
    rows, heads, queries, width = q.shape
    kv_heads, length = k.shape[1:3]
    group, query_blocks, key_blocks = heads // kv_heads, queries // sizes.queries, length // sizes.keys
    visits = _visits(sizes, begin, end, length)
    shift = jnp.sum(dout * out, axis=2, keepdims=True) - dlog_mass
    inputs = (q, k, v, begin, end, log_mass, shift, dout.swapaxes(2, 3).astype(q.dtype))

    at = _query_blocks(sizes, width, group)
    (dq,) = _call(
        _query_gradient_kernel,
        sizes,
        (rows, heads, query_blocks, key_blocks),
        inner=1,
        products=3,
        in_specs=[at.query, at.key, at.key, at.bound, at.bound, at.across(1), at.across(1), at.query],
        out_specs=[at.across(width)],
        scratch=[pltpu.VMEM((width, sizes.queries), jnp.float32)],
        outputs=[_array((rows, heads, width, queries), q.dtype)],
    )(visits.seen, visits.keys, *inputs)

    # Keys outside, the heads of their group and blocks of queries inside: each block of keys is written once.
    query_at = lambda b, h, j, g, i, seen, held: (b, h * group + g, held[b, j, i], 0)  # noqa: E731
    by_query = pl.BlockSpec((None, None, sizes.queries, width), query_at)
    by_key = pl.BlockSpec((None, None, sizes.keys, width), lambda b, h, j, g, i, *_: (b, h, j, 0))
    bound = pl.BlockSpec((None, 1, sizes.queries), lambda b, h, j, g, i, seen, held: (b, 0, held[b, j, i]))
    row_of = pl.BlockSpec(
        (None, None, 1, sizes.queries), lambda b, h, j, g, i, seen, held: (b, h * group + g, 0, held[b, j, i])
    )
    dk, dv = _call(
        _key_gradient_kernel,
        sizes,
        (rows, kv_heads, key_blocks, group, query_blocks),
        inner=2,
        products=4,
        in_specs=[by_query, by_key, by_key, bound, bound, row_of, row_of, by_query],
        out_specs=[by_key, by_key],
        scratch=[pltpu.VMEM((sizes.keys, width), jnp.float32)] * 2,
        outputs=[_array(k.shape, k.dtype), _array(v.shape, v.dtype)],
    )(visits.seen, visits.queries, *inputs)
    return dq.swapaxes(2, 3), dk, dv, None, None


_attention.defvjp(_forward, _backward)


def _array(shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _call(kernel, sizes, grid, *, inner, products, in_specs, out_specs, scratch, outputs):
    """A call of a kernel whose last `inner` grid axes run in order; `products` matrix products a visited block."""
    width = in_specs[0].block_shape[-1]
    turns = math.prod(grid)
    return pl.pallas_call(
        functools.partial(kernel, sizes),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=grid,
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=scratch,
        ),
        out_shape=outputs,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * (len(grid) - inner) + ("arbitrary",) * inner
        ),
        # Half of all blocks is what causal rows visit, and anchored blocks on average.
        cost_estimate=pl.CostEstimate(
            flops=turns // 2 * products * 2 * sizes.queries * sizes.keys * width,
            transcendentals=turns // 2 * sizes.queries * sizes.keys,
            bytes_accessed=turns // 2 * 2 * sizes.keys * width * 2,
        ),
        interpret=sizes.interpret,
        name=kernel.__name__.strip("_"),
    )
