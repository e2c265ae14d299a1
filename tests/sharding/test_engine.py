"""An engine whose models are split over devices serves the text of one device, out of caches that stay split."""

from __future__ import annotations

import dataclasses
import functools

import jax
import pytest
from jax.sharding import PartitionSpec as P
from training_setup import tiny_config, tiny_target

from dspark_jax.draft.contract import Drafter
from dspark_jax.draft.loading import functions_for
from dspark_jax.draft.vocabulary import reduce_vocabulary
from dspark_jax.engine.engine import Engine
from dspark_jax.engine.programs import PROGRAMS
from dspark_jax.sharding import create_mesh
from dspark_jax.spec.schedule import Fixed, NoDraft, Threshold
from dspark_jax.training.config import drafter_config

TARGET = tiny_target(num_heads=4, num_kv_heads=2)
PROMPTS = [[1, 2, 3], list(range(4, 30)), [7], [9, 9, 8, 1, 2], [30, 31]]
POLICIES = {"none": NoDraft(), "fixed": Fixed(3), "threshold": Threshold(0.5)}


@functools.cache
def drafter(kind):
    if kind == "reduced":
        whole = dataclasses.replace(drafter("dspark"), tables=TARGET.tables)
        return reduce_vocabulary(whole, range(0, TARGET.config.vocab_size, 2))
    config = drafter_config(tiny_config(kind), TARGET.config)
    functions = functions_for(config)
    params = functions.initialise(jax.random.key(1), config.feature_width)
    return Drafter(kind, config, params, functions)


def engine(kind, policy, tensor=None, markov_tables="split"):
    mesh = None if tensor is None else create_mesh(data=1, tensor=tensor)
    return Engine(
        TARGET, None if kind is None else drafter(kind), slots=3, max_length=48, policy=POLICIES[policy], mesh=mesh,
        row_ladder=(3, 12), mixed_ladder=(12,), chunk_ladder=(16,),
        markov_tables=markov_tables,
    )  # fmt: skip


def texts(served, temperature):
    for i, prompt in enumerate(PROMPTS):
        served.submit(prompt, max_new_tokens=14, temperature=temperature, seed=i, stop_token_ids=())
    answers = served.run()
    return [answers[i].tokens for i in range(len(PROMPTS))]


@pytest.mark.parametrize(
    ("kind", "policy", "tensor", "markov_tables"),
    [
        (None, "none", 2, "split"), ("dspark", "fixed", 2, "replicated"), ("dspark", "threshold", 4, "split"),
        ("reduced", "fixed", 2, "replicated"),
        pytest.param("dspark", "fixed", 2, "split", marks=pytest.mark.slow),
        pytest.param("eagle3", "fixed", 2, "split", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_text_does_not_depend_on_the_mesh(kind, policy, tensor, markov_tables):
    split = engine(kind, policy, tensor, markov_tables)
    temperature = 0.0 if kind is None else 1.0
    split.warm_up(("greedy",) if kind is None else ("plain",))
    before = PROGRAMS.count
    ours = texts(split, temperature)
    assert PROGRAMS.count == before
    assert ours == texts(engine(kind, policy), temperature)
    # Two K/V heads split over two devices; four devices each hold both.
    heads = P(None, "tensor") if tensor == 2 else P()
    for cache in split.memory.caches:
        assert cache.k.sharding.spec == cache.v.sharding.spec == heads
    tables = split.programs.weights.tables
    assert tables.embed is tables.head  # tied
    q = split.programs.weights.target["layers_0"]["self_attn"]["q_proj"]["weight"]
    assert q.addressable_shards[0].data.shape[0] * tensor == q.shape[0]
    if kind == "dspark":
        head = split.programs.weights.draft["markov_head"]
        whole = markov_tables == "replicated"
        assert all(head[name]["weight"].sharding.is_fully_replicated == whole for name in ("markov_w1", "markov_w2"))


def test_whole_tables_want_a_sequential_head():
    with pytest.raises(ValueError, match="no drafter with a sequential head"):
        engine("eagle3", "fixed", 2, "replicated")
    with pytest.raises(ValueError, match="'replicated' without a mesh"):
        engine("dspark", "fixed", None, "replicated")


def test_a_mesh_that_splits_requests_is_refused():
    with pytest.raises(ValueError, match=r"one axis, tensor: found .*'data': 2.*one engine a replica"):
        Engine(TARGET, None, slots=2, max_length=48, mesh=create_mesh(data=2, tensor=2))


def test_a_target_on_the_mesh_is_not_copied():
    split = engine(None, "none", 2)
    again = Engine(
        dataclasses.replace(TARGET, params=split.programs.weights.target), None, slots=1, max_length=16,
        mesh=create_mesh(data=1, tensor=2),
    )  # fmt: skip
    for ours, given in zip(
        jax.tree.leaves(again.programs.weights.target), jax.tree.leaves(split.programs.weights.target), strict=True
    ):
        assert ours.addressable_shards[0].data.unsafe_buffer_pointer() == (
            given.addressable_shards[0].data.unsafe_buffer_pointer()
        )
