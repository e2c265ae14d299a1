"""The table of layouts: every drafter parameter has a rule, no axis is used twice, nothing is silent without a mesh."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from training_setup import tiny_config, tiny_target

from dspark_jax.sharding import (
    ACTIVATIONS,
    PARAMETERS,
    activation_sharding,
    check_collisions,
    computing_spec,
    constrain,
    constrain_parameters,
    create_mesh,
    gather,
    gather_parameters,
    parameter_spec,
    row_shards,
    tree_shardings,
)
from dspark_jax.training.setup import create_step
from dspark_jax.training.step import init_state


@pytest.fixture(scope="module")
def mesh():
    return create_mesh(data=2, fsdp=2, tensor=2)


@pytest.mark.parametrize("as_gemma4", [False, True], ids=["llama", "gemma4"])
@pytest.mark.parametrize("kind", ["dspark", "dflash", "eagle3"])
def test_every_parameter_and_moment_has_a_layout(kind, as_gemma4, mesh):
    target = tiny_target(as_gemma4=as_gemma4)
    step = create_step(tiny_config(kind), target, 10)
    state = jax.eval_shape(lambda: init_state(step.functions, step.optimizer, 0))
    shardings = tree_shardings(mesh, state)
    adam = next(x for x in shardings.opt_state if hasattr(x, "mu"))
    assert jax.tree.leaves(adam.mu) == jax.tree.leaves(adam.nu) == jax.tree.leaves(shardings.params)
    assert shardings.step.spec == P()
    assert tree_shardings(mesh, target.tables).embed.spec == P("tensor", "fsdp")
    tree_shardings(mesh, target.params)


def test_weights_are_split_so_that_one_sum_ends_a_sublayer(mesh):
    assert parameter_spec("layers_0/self_attn/q_proj/weight", (16, 8), mesh) == P("tensor", "fsdp")
    assert parameter_spec("layers_0/self_attn/o_proj/weight", (16, 8), mesh) == P("fsdp", "tensor")
    assert parameter_spec("0/mu/markov_head/markov_w2/weight", (40, 4), mesh) == P("tensor", "fsdp")
    assert parameter_spec("markov_head/gate_proj/weight", (4, 20), mesh) == P(None, "fsdp")
    assert parameter_spec("layers_0/self_attn/q_norm/weight", (8,), mesh) == P()
    # What an axis does not divide stays whole.
    assert parameter_spec("layers_0/self_attn/k_proj/weight", (3, 8), mesh) == P(None, "fsdp")


def test_unknown_names_are_refused(mesh):
    with pytest.raises(ValueError, match="no sharding rule for parameter 'router/weight_in'"):
        parameter_spec("router/weight_in", (4, 4), mesh)
    with pytest.raises(ValueError, match="no sharding for activation 'logit'"):
        activation_sharding(mesh, "logit")


def test_no_rule_uses_an_axis_twice():
    for pattern, spec in PARAMETERS:
        check_collisions(spec, pattern)
    for name, spec in ACTIVATIONS.items():
        check_collisions(spec, name)
    with pytest.raises(ValueError, match="'tensor' occurs twice"):
        check_collisions(P("tensor", ("data", "tensor")), "bad")
    with pytest.raises(ValueError, match="unknown mesh axis 'model'"):
        check_collisions(P("model"), "bad")


def test_a_constraint_needs_a_mesh(mesh):
    with pytest.raises(RuntimeError, match="outside a mesh"):
        constrain(jnp.zeros((4, 2)), "rows")
    with jax.set_mesh(mesh):
        x = jax.jit(lambda x: constrain(x, "rows"))(jnp.zeros((4, 2)))
    assert x.addressable_shards[0].data.shape == (1, 2)
    for layout in (constrain_parameters, gather_parameters):
        with pytest.raises(RuntimeError, match="laid out inside a mesh"):
            layout({"norm": {"weight": jnp.zeros(4)}})


def test_parameters_are_whole_along_fsdp_where_they_are_used(mesh):
    assert computing_spec("layers_0/self_attn/q_proj/weight", (16, 8), mesh) == P("tensor", None)
    assert computing_spec("layers_0/mlp/down_proj/weight", (16, 8), mesh) == P(None, "tensor")
    assert computing_spec("layers_0/self_attn/q_norm/weight", (8,), mesh) == P()


def test_meshes_that_do_not_fit_are_refused():
    assert row_shards(create_mesh(tensor=2)) == 4
    with pytest.raises(ValueError, match="does not divide 8 devices"):
        create_mesh(fsdp=3)
    with pytest.raises(ValueError, match="needs 16 devices, found 8"):
        create_mesh(data=16)


def test_gathered_trees_are_whole_copies(mesh):
    x = jax.device_put(jnp.arange(8.0), jax.sharding.NamedSharding(mesh, P("fsdp")))
    y = gather(mesh, {"x": x})["x"]
    assert y.is_fully_replicated
    x.delete()
    assert y.tolist() == list(range(8))
