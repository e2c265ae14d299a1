"""Eight devices compute what one does, and exchange nothing that grows with anchors and vocabulary together."""

from __future__ import annotations

import dataclasses
import functools
import math
import re

import jax
import numpy as np
import pytest
from training_setup import KINDS, VOCAB, tiny_config, tiny_corpus, tiny_target

from dspark_jax.data.pipeline import BatchSource
from dspark_jax.sharding import activation_sharding, create_mesh, tree_shardings
from dspark_jax.training.collectives import FLOAT_TYPES, collectives, total_bytes
from dspark_jax.training.loop import create_step
from dspark_jax.training.optimizer import OptimizerConfig
from dspark_jax.training.step import init_state

# (data, fsdp, tensor)
MESHES = {"8x1x1": (8, 1, 1), "2x4x1": (2, 4, 1), "2x2x2": (2, 2, 2)}
DRAFTERS = ("dspark", "dflash", "eagle3")
ROWS, ACCUMULATION = 16, 2
# Sizes that no other axis has, so that a shape in a program says what it is of.
TARGET = {"num_heads": 4, "num_kv_heads": 2, "intermediate_size": 56}
BETA1 = 0.9


@dataclasses.dataclass(frozen=True)
class Result:
    """One update on a mesh.

    Attributes:
        gradients: clipped, read off Adam's first moments.
        parameters: parameter shapes of drafter and target, `[out, in]`.
    """

    metrics: object
    gradients: object
    params: object
    text: str
    parameters: frozenset[tuple[int, ...]]


@functools.cache
def update(kind: str, sizes: tuple[int, int, int], as_gemma4: bool = False) -> Result:
    """The program that training runs: target in the step, two accumulation parts, donated state."""
    # A large epsilon makes the update a smooth function of the gradient, which rounding cannot turn around.
    drafter = KINDS[kind][0]
    if kind == "dspark":
        # Its states, 16 + 12 wide side by side, are not as wide as half a vocabulary.
        drafter = dataclasses.replace(drafter, markov_rank=12)
    config = tiny_config(
        kind,
        drafter=drafter,
        batch_size=ROWS,
        accumulation=ACCUMULATION,
        optimizer=OptimizerConfig(learning_rate=1e-2, eps=1e-2),
    )
    target = tiny_target(as_gemma4=as_gemma4, **TARGET)
    step = create_step(config, target, 10)
    batch = BatchSource(tiny_corpus(), ROWS, config.sequence_length, 0, config.packed).batch(0)
    rows = jax.tree.map(lambda x: x.reshape(ACCUMULATION, -1, *x.shape[1:]), batch)
    data, fsdp, tensor = sizes
    mesh = create_mesh(data=data, fsdp=fsdp, tensor=tensor)
    state = init_state(step.functions, step.optimizer, 0)
    state = dataclasses.replace(state, params=moved(state.params))
    with jax.set_mesh(mesh):
        state, tables, params = (
            jax.device_put(x, tree_shardings(mesh, x)) for x in (state, target.tables, target.params)
        )
        rows = jax.device_put(rows, activation_sharding(mesh, "accumulated_rows"))
        compiled = jax.jit(step.train, donate_argnums=0).lower(state, rows, tables, params).compile()
        # Twice: the state that comes out has the layout that goes in.
        after, metrics = compiled(state, rows, tables, params)
        adam = next(x for x in after.opt_state if hasattr(x, "mu"))
        gradients, new = jax.device_get((adam.mu, after.params))
        after, _ = compiled(after, rows, tables, params)
    assert int(after.step) == 2
    shapes = {x.shape for x in jax.tree.leaves((state, tables, params)) if x.ndim == 2}
    gradients = jax.tree.map(lambda x: x / (1 - BETA1), gradients)
    return Result(jax.device_get(metrics), gradients, new, compiled.as_text(), frozenset(shapes))


def moved(params):
    """Away from initial zeros, behind which gradients are zero too."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: x + rng.normal(0, 0.1, x.shape).astype(x.dtype), params)


def assert_close(ours, theirs, **tolerances):
    paths, _ = jax.tree_util.tree_flatten_with_path(theirs)
    for (path, expected), found in zip(paths, jax.tree.leaves(ours), strict=True):
        np.testing.assert_allclose(found, expected, err_msg=jax.tree_util.keystr(path), **tolerances)


def everything():
    """All pairs; those that add little and compile as long are slow tests."""
    for kind in DRAFTERS:
        for mesh in MESHES:
            extra = kind != "dspark" and mesh != "2x2x2"
            yield pytest.param(kind, mesh, marks=[pytest.mark.slow] if extra else [], id=f"{kind}-{mesh}")


@pytest.mark.parametrize(("kind", "mesh"), everything())
def test_an_update_is_the_same_on_any_mesh(kind, mesh):
    one, many = update(kind, (1, 1, 1)), update(kind, MESHES[mesh])
    assert one.metrics.applied and one.metrics.terms.blocks > 0
    assert_close(many.metrics, one.metrics, rtol=2e-5, atol=1e-6)
    assert_close(many.gradients, one.gradients, rtol=1e-4, atol=1e-6)
    assert_close(many.params, one.params, rtol=1e-5, atol=1e-6)
    # The gradients compared are not zeros.
    assert all(np.any(x != 0) for x in jax.tree.leaves(one.gradients))


def test_an_update_for_a_gemma4_target_is_the_same_on_a_mesh():
    """Two shapes of layers, one with fewer K/V heads than the tensor axis has shards; capped logits split over it."""
    one, many = update("dspark", (1, 1, 1), True), update("dspark", MESHES["2x2x2"], True)
    assert one.metrics.applied and one.metrics.terms.blocks > 0
    assert_close(many.metrics, one.metrics, rtol=2e-5, atol=1e-6)
    assert_close(many.gradients, one.gradients, rtol=1e-4, atol=1e-6)
    assert_close(many.params, one.params, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("kind", "mesh"), everything())
def test_only_weights_are_gathered(kind, mesh):
    result, tensor = update(kind, MESHES[mesh]), MESHES[mesh][2]
    weights = {(o // a, i // b) for o, i in result.parameters for a, b in ((1, 1), (tensor, 1), (1, tensor))}
    gathered = [x for x in collectives(result.text) if x.kind == "all-gather" and x.dtype in FLOAT_TYPES]
    # Random numbers of the anchors' draw are no activations.
    other = [str(x) for x in gathered if x.shape not in weights and "top_k" not in x.where]
    assert not other
    # Nothing is stored in parts where there is no fsdp axis; where there is one, every part of the step gathers the
    # layers' weights anew, and only the tables are whole all the time.
    whole = [x for x in gathered if x.shape in weights]
    assert bool(whole) == (MESHES[mesh][1] > 1)
    assert all(x.times == ACCUMULATION for x in whole if x.shape[0] not in (VOCAB, VOCAB // tensor)), whole


@pytest.mark.parametrize(("kind", "mesh"), everything())
def test_logits_stay_where_they_are(kind, mesh):
    """Whatever has the vocabulary's width is a table: logits would have anchors and slots besides."""
    widths = {VOCAB, VOCAB // MESHES[mesh][2]}
    wide = [x for x in collectives(update(kind, MESHES[mesh]).text) if len(x.shape) > 1 and widths & {*x.shape}]
    assert all(len(x.shape) == 2 and x.shape[0] in widths for x in wide), [str(x) for x in wide]


@pytest.mark.parametrize(("kind", "mesh"), everything())
def test_the_loop_of_the_vocabulary_loss_exchanges_sums_over_the_vocabulary_alone(kind, mesh):
    tensor = MESHES[mesh][2]
    inside = [x for x in collectives(update(kind, MESHES[mesh]).text) if re.search("vocab_loss.*while", x.where)]
    if tensor == 1:
        assert not inside, [str(x) for x in inside]
    else:
        # One number a slot for each maximum and sum, and the gradient by the slot's state.
        assert {(x.kind, x.group) for x in inside} == {("all-reduce", tensor)}
        assert len([x for x in inside if math.prod(x.shape[3:]) > 1]) == 1


def test_the_list_of_collectives_follows_loops_and_calls():
    text = """
HloModule made_up

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%all-reduce-scatter.1 (p: f32[8,4]) -> f32[4,4] {
  %r = f32[8,4]{1,0:T(8,128)} all-reduce(%p), replica_groups=[4,2]<=[8], to_apply=%add
  ROOT %s = f32[4,4] dynamic-slice(%r, %i, %z), dynamic_slice_sizes={4,4}
}

%fused_computation.1 (p: bf16[2]) -> bf16[4] {
  ROOT %begin = bf16[4] all-gather(%p), channel_id=3, replica_groups=[4,2]<=[8], dimensions={0}
}

%async_collective_fusion.1 (p: bf16[2]) -> bf16[4] {
  ROOT %end = bf16[4] all-gather(%p), channel_id=3, replica_groups=[4,2]<=[8], dimensions={0}
}

%body (s: (s32[], bf16[8,4])) -> (s32[], bf16[8,4]) {
  %g = (bf16[2,4]{1,0}, bf16[8,4]{1,0:T(8,128)(2,1)}) all-gather-start(%x), replica_groups={{0,1,2,3},{4,5,6,7}}, \
metadata={op_name="jit(f)/while/body/dot_general"}
  %f = f32[4,4] fusion(%y), kind=kCustom, calls=%all-reduce-scatter.1
}

%condition (s: (s32[], bf16[8,4])) -> pred[] {
  %bound = s32[] constant(5)
  ROOT %less = pred[] compare(%i, %bound), direction=LT
}

ENTRY %main (x: bf16[8,4]) -> bf16[8,4] {
  %w = (s32[], bf16[8,4]) while(%t), condition=%condition, body=%body
  %v = (s32[], bf16[8,4]) while(%t), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"2"}}
  %a = bf16[4] fusion(%q), kind=kCustom, calls=%fused_computation.1
  %b = bf16[4] fusion(%a), kind=kCustom, calls=%async_collective_fusion.1
  %m = f32[3] all-reduce(%q), replica_groups=mesh['a'=2,'b'=4], device_ids=([8]T(0)) {'a','b'}, to_apply=%add
}
"""
    # An exchange in two pieces is one.
    assert [str(x) for x in collectives(text) if x.shape == (4,)] == ["1 x all-gather bf16[4] among 2 ()"]
    found = {x.kind: x for x in collectives(text) if x.shape != (4,)}
    assert found.keys() == {"all-gather", "reduce-scatter", "all-reduce"}
    gather = found["all-gather"]
    assert (gather.dtype, gather.shape, gather.group, gather.times, gather.size) == ("bf16", (8, 4), 4, 7, 64)
    assert gather.where == "jit(f)/while/body/dot_general"
    assert (found["reduce-scatter"].group, found["reduce-scatter"].times) == (2, 7)
    assert (found["all-reduce"].shape, found["all-reduce"].group, found["all-reduce"].times) == ((3,), 8, 1)
    assert total_bytes(collectives(text))["all-gather"] == (1 + 7, 8 + 7 * 64)
