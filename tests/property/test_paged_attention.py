"""The paged backend against the dense one, its kernel interpreted on the CPU: rows in order, heads on a mesh."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import literals
from jax.experimental.pallas import tpu as pltpu
from random_models import random_drafter, random_target

from dspark_jax.engine.engine import Engine
from dspark_jax.nn.attention import DENSE, AttentionSpec, DenseAttention, make_plan
from dspark_jax.nn.paged import PagedAttention, attention_backend, find_sequences, head_layout
from dspark_jax.spec.schedule import Fixed
from dspark_jax.types import RaggedTokens

SLOTS, LENGTH, WIDTH = 3, 13, 6
PAGED = PagedAttention(page_size=4, pages_per_block=2, rows_per_block=4)
# Each batch: the slots of eight rows and of two prompt segments of two, and the first position of each run of a slot.
BATCHES = (
    ([0, 0, 0, 0, 0, 3, 2, 2], [1, 1, 1, 1], [0, 0, 0]),
    ([3, 3, 3, 3, 3, 3, 3, 3], [1, 1, 1, 3], [4]),
    ([0, 0, 0, 2, 3, 3, 3, 3], [1, 1, 3, 3], [5, 2, 7]),
    ([3, 3, 3, 3, 3, 3, 3, 3], [3, 3, 3, 3], []),
    ([3, 3, 1, 3, 3, 3, 3, 3], [3, 3, 3, 3], [9]),
    ([2, 2, 3, 3, 3, 3, 3, 3], [0, 3, 1, 1], [3, 8, 9]),
    ([3, 3, 3, 3, 3, 3, 3, 3], [2, 2, 0, 3], [5, 9]),
)


def ragged(slots, firsts):
    """The batch whose runs of a slot begin at these positions."""
    positions, firsts = np.zeros(len(slots), np.int32), list(firsts)
    for i, slot in enumerate(slots):
        if slot < SLOTS:
            positions[i] = positions[i - 1] + 1 if i and slots[i - 1] == slot else firsts.pop(0)
    slots = jnp.asarray(slots, jnp.int32)
    return RaggedTokens(jnp.zeros_like(slots), slots, jnp.asarray(positions))


@pytest.fixture
def interpreted(monkeypatch):
    """Run Pallas kernels for TPUs as plain JAX programs.

    With `True`, since the simulator of a TPU (`InterpretParams`) cannot read reshaped buffers, as this kernel does. The
    plain interpreter asks the indices of masked stores for their shapes, those that are Python integers too.
    """
    monkeypatch.setattr(literals.TypedInt, "shape", (), raising=False)
    with pltpu.force_tpu_interpret_mode(True):
        yield


def outputs(backend, heads, kv_heads, spec, dtype=jnp.float32):
    """What the rows of every batch get, one batch after another over one cache."""

    @jax.jit
    def create():
        return backend.create_cache(SLOTS, LENGTH, kv_heads, WIDTH, dtype)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(cache, batch, *qkv):
        return backend.attend(make_plan(batch, SLOTS, 5, segments=(2, 2)))(spec, *qkv, cache)

    rng, cache, outs = np.random.default_rng(0), create(), []
    for rows, chunk, firsts in BATCHES:
        batch = ragged(rows + chunk, firsts)
        qkv = [jnp.asarray(rng.normal(size=(12, n, WIDTH)), dtype) for n in (heads, kv_heads, kv_heads)]
        out, cache = step(cache, batch, *qkv)
        outs.append(np.asarray(out, np.float32))
    return outs


@pytest.mark.parametrize(
    ("heads", "kv_heads", "window", "dtype"),
    [
        pytest.param(4, 2, None, jnp.float32, id="grouped"),
        pytest.param(3, 1, 3, jnp.float32, id="window"),
        pytest.param(9, 3, None, jnp.float32, id="padded-heads"),
        pytest.param(4, 2, None, jnp.bfloat16, id="bfloat16"),
    ],
)
def test_paged_equals_dense(interpreted, heads, kv_heads, window, dtype):
    spec = AttentionSpec(scale=0.4, window=window)
    dense = outputs(DENSE, heads, kv_heads, spec, dtype)
    paged = outputs(PAGED, heads, kv_heads, spec, dtype)
    for number, (a, b) in enumerate(zip(dense, paged, strict=True)):
        np.testing.assert_allclose(a, b, atol=1e-5 if dtype == jnp.float32 else 0.03, err_msg=f"batch {number}")
    assert np.abs(dense[2][:4]).min() > 0 and not dense[3].any()


@pytest.mark.parametrize(("kv_heads", "shards"), [(4, 2), (2, 4)], ids=["split", "repeated"])
def test_sharded_heads_equal_dense(interpreted, kv_heads, shards):
    spec = AttentionSpec(scale=0.4)
    mesh = jax.make_mesh((2, shards), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    backend = PagedAttention(mesh, page_size=4, pages_per_block=2, rows_per_block=4)
    pages = jax.jit(lambda: backend.create_cache(SLOTS, LENGTH, kv_heads, WIDTH, jnp.float32))().pages
    assert pages.shape == (SLOTS * 4, 4, 2 * max(kv_heads, shards), 128)
    assert pages.sharding.shard_shape(pages.shape)[2] == 2 * max(kv_heads // shards, 1)
    paged = outputs(backend, 8, kv_heads, spec)
    for a, b in zip(outputs(DENSE, 8, kv_heads, spec), paged, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_sequences_of_the_docstring():
    batch = RaggedTokens(
        tokens=jnp.zeros(5, jnp.int32), slots=jnp.asarray([0, 2, 2, 3, 1]), positions=jnp.asarray([7, 3, 4, 0, 0])
    )
    found = find_sequences(batch, 3, 4)
    np.testing.assert_array_equal(found.order[:4], [0, 1, 2, 4])
    np.testing.assert_array_equal(found.place, [0, 1, 2, 5, 3])
    np.testing.assert_array_equal(found.slots[:3], [0, 2, 1])
    np.testing.assert_array_equal(found.starts, [0, 1, 3, 4, 4])
    np.testing.assert_array_equal(found.lengths[:3], [8, 5, 1])
    np.testing.assert_array_equal(found.count, [3])


def test_a_batch_of_padding_is_one_sequence_that_nobody_reads():
    batch = RaggedTokens(
        tokens=jnp.zeros(4, jnp.int32), slots=jnp.full(4, 3, jnp.int32), positions=jnp.asarray([0, 0, 8, 9])
    )
    found = find_sequences(batch, 3, 4)
    np.testing.assert_array_equal(found.place, [4] * 4)
    assert (int(found.count[0]), int(found.starts[1]), int(found.lengths[0])) == (1, 1, 1)


def test_a_slots_decoding_rows_and_its_chunk_are_two_sequences():
    batch = RaggedTokens(
        tokens=jnp.zeros(4, jnp.int32), slots=jnp.asarray([1, 1, 1, 1]), positions=jnp.asarray([4, 5, 0, 1])
    )
    found = find_sequences(batch, 2, 3)
    np.testing.assert_array_equal(found.starts, [0, 2, 4, 4])
    np.testing.assert_array_equal(found.lengths[:2], [6, 2])


def test_rows_past_the_end_are_dropped():
    cache = PAGED.create_cache(2, 4, 1, 1, jnp.float32)
    one = jnp.ones((3, 1, 128))
    cache = cache.write(jnp.asarray([0, 2, 0]), jnp.asarray([1, 0, 4]), one, 2 * one)
    np.testing.assert_array_equal(cache.pages[:, :, :, 0], [[[0, 0], [1, 2], [0, 0], [0, 0]], np.zeros((4, 2))])


def test_head_layouts():
    layouts = {(k, n): head_layout(k, n) for k, n in ((8, 1), (8, 4), (8, 16), (3, 1), (12, 2), (1, 8))}
    found = {key: (x.repeat, x.local, x.padded, x.stored) for key, x in layouts.items()}
    assert found == {
        (8, 1): (1, 8, 8, 8),
        (8, 4): (1, 2, 2, 8),
        (8, 16): (2, 1, 1, 16),
        (3, 1): (1, 3, 4, 4),
        (12, 2): (1, 6, 8, 16),
        (1, 8): (8, 1, 1, 8),
    }
    with pytest.raises(ValueError, match="6 K/V heads on a tensor axis of 4: choose"):
        head_layout(6, 4)


def test_backends_by_name(monkeypatch):
    assert attention_backend("dense") == attention_backend() == DenseAttention()
    assert attention_backend("paged") == PagedAttention()
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert attention_backend(head_dim=128) == PagedAttention()
    assert attention_backend(head_dim=256) == DenseAttention(), "the kernel cannot read such heads"
    with pytest.raises(ValueError, match="unknown attention backend 'flash'"):
        attention_backend("flash")


def test_a_plan_that_is_not_causal_is_refused():
    batch = ragged([0, 0, 1], [0, 0])
    with pytest.raises(ValueError, match="paged attention is causal"):
        PAGED.attend(make_plan(batch, SLOTS, 2, visible=jnp.full(3, 4)))


@pytest.mark.slow
@pytest.mark.parametrize("as_gemma4", [False, True], ids=["llama", "gemma4"])
def test_the_engines_text_does_not_depend_on_the_backend(interpreted, as_gemma4):
    """Prompts in chunks, admission while others decode, verification: the whole engine over pages."""
    drafter = random_drafter("gemma4" if as_gemma4 else "vanilla")
    prompts = [[1, 2, 3, 4, 5, 6], [7], [8, 9]]

    def texts(attention):
        engine = Engine(
            random_target(as_gemma4=as_gemma4), drafter, slots=2, max_length=32, policy=Fixed(2), row_ladder=(6,),
            mixed_ladder=(6,), chunk_ladder=(4,), attention=attention,
        )  # fmt: skip
        numbers = [engine.submit(p, max_new_tokens=8, stop_token_ids=()) for p in prompts]
        results = engine.run()
        return [results[n].tokens for n in numbers]

    assert texts(PAGED) == texts(DENSE)
