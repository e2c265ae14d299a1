"""Where arrays live on a device mesh: one table from parameter paths and activation names to axes.

The mesh has three axes. `data` splits batches only; `fsdp` splits batches and stores each parameter once; `tensor`
splits heads, MLP width and vocabulary. Axis types are Auto: the compiler propagates what the table fixes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

AXES = ("data", "fsdp", "tensor")

# First match wins. Weights are [out, in]: what splits heads or MLP width is split by output on the way in and by input
# on the way out, so that one sum over `tensor` ends each sublayer.
PARAMETERS: tuple[tuple[str, P], ...] = (
    (r"(bias|norm/weight|layernorm/weight|layer_scalar)$", P()),
    (r"markov_head/markov_w[12]/weight$", P("tensor", "fsdp")),
    (r"markov_head/\w+/weight$", P(None, "fsdp")),
    (r"confidence_head/proj/weight$", P()),
    (r"(q|k|v|gate|up)_proj/weight$", P("tensor", "fsdp")),
    (r"(o|down)_proj/weight$", P("fsdp", "tensor")),
    (r"fc/weight$", P("fsdp", "tensor")),
    (r"(embed|head)$", P("tensor", "fsdp")),
    (r"draft_vocabulary/ids$", P()),
)

# For drafting: nothing is exchanged inside the sequential head's scan, for whole tables on every device.
REPLICATED_MARKOV = ((r"markov_head/markov_w[12]/weight$", P()), *PARAMETERS)

ACTIVATIONS: dict[str, P] = {
    "whole": P(),
    "block_logits": P(None, None, "tensor"),
    "rows": P(("data", "fsdp")),
    "accumulated_rows": P(None, ("data", "fsdp")),
    "head": P("tensor", None),
    # Sums over each shard's own rows, `[shards, V, ...]`.
    "partial_tables": P(("data", "fsdp"), "tensor"),
}


def create_mesh(
    *, data: int | None = None, fsdp: int = 1, tensor: int = 1, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """Create the mesh over this job's devices.

    Args:
        data: size of the data axis; None takes all devices that `fsdp * tensor` leaves.
        fsdp: size of the axis that stores parameters.
        tensor: size of the axis that splits heads, MLP width and vocabulary.
        devices: other devices than this job's, such as those of a slice to compile for.

    Raises:
        ValueError: the sizes do not fit the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    count = len(devices)
    if data is None:
        if count % (fsdp * tensor):
            raise ValueError(f"fsdp {fsdp} x tensor {tensor} does not divide {count} devices: choose sizes that do")
        data = count // (fsdp * tensor)
    needed = data * fsdp * tensor
    if needed > count:
        raise ValueError(f"mesh data {data} x fsdp {fsdp} x tensor {tensor} needs {needed} devices, found {count}")
    return jax.make_mesh((data, fsdp, tensor), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices[:needed])


def row_shards(mesh: Mesh | AbstractMesh) -> int:
    """Number of parts the rows of a batch are split into."""
    return int(mesh.shape["data"] * mesh.shape["fsdp"])


def current_mesh() -> AbstractMesh | None:
    """The mesh that the code being traced runs on; None outside one."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh


def parameter_spec(
    path: str, shape: Sequence[int], mesh: Mesh | AbstractMesh, rules: Sequence[tuple[str, P]] = PARAMETERS
) -> P:
    """Axes of one parameter, or of an optimizer moment whose path ends like the parameter's.

    A dimension that its axis does not divide stays whole (fewer K/V heads than the axis, odd tiny widths).

    Args:
        path: `layers_0/self_attn/q_proj/weight`; anything may precede it.
        shape: of the array.
        mesh: gives the axis sizes.
        rules: the table.

    Raises:
        ValueError: a path that no rule knows, or a rule that uses an axis twice.
    """
    if not shape:
        return P()
    found = next((spec for pattern, spec in rules if re.search(pattern, path)), None)
    if found is None:
        raise ValueError(f"no sharding rule for parameter {path!r} {tuple(shape)}: add one to sharding.PARAMETERS")
    check_collisions(found, path)
    pairs = zip(found, shape, strict=False)
    return P(*(axis if axis and size % _axis_size(mesh, axis) == 0 else None for axis, size in pairs))


def tree_shardings(mesh: Mesh, tree: Any, rules: Sequence[tuple[str, P]] = PARAMETERS) -> Any:
    """NamedShardings of a tree of parameters, or of any tree that holds parameter-shaped trees (optimizer state)."""

    def sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, parameter_spec(_path_text(path), leaf.shape, mesh, rules))

    return jax.tree_util.tree_map_with_path(sharding, tree)


def place(mesh: Mesh, tree: Any, rules: Sequence[tuple[str, P]] = PARAMETERS) -> Any:
    """Lay a tree of parameters out on the mesh; of several processes each holds all of it and gives its parts.

    An array that occurs twice (tied embedding and head) stays one.
    """
    placed: dict[tuple[int, NamedSharding], jax.Array] = {}

    def put(x: Any, sharding: NamedSharding) -> jax.Array:
        if isinstance(x, jax.Array) and (not x.is_fully_addressable or jax.process_count() == 1):
            return jax.device_put(x, sharding)
        host = np.asarray(x)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    def put_once(x: Any, sharding: NamedSharding) -> jax.Array:
        if (id(x), sharding) not in placed:
            placed[id(x), sharding] = put(x, sharding)
        return placed[id(x), sharding]

    return jax.tree.map(put_once, tree, tree_shardings(mesh, tree, rules))


def gather(mesh: Mesh, tree: Any) -> Any:
    """Give every device, and so every process, whole copies of a tree of sharded arrays; all processes call it."""
    return jax.jit(lambda x: jax.tree.map(jnp.copy, x), out_shardings=NamedSharding(mesh, P()))(tree)


def activation_sharding(mesh: Mesh, name: str) -> NamedSharding:
    """NamedSharding of a named activation.

    Raises:
        ValueError: an unknown name.
    """
    return NamedSharding(mesh, _activation_spec(name))


def constrain(x: Array, name: str) -> Array:
    """Fix the layout of an activation inside a jitted function.

    Args:
        x: the activation.
        name: its entry in `ACTIVATIONS`.

    Raises:
        RuntimeError: no mesh is set; a constraint that silently does nothing is worse than none.
        ValueError: an unknown name.
    """
    if current_mesh() is None:
        raise RuntimeError(f"constrain({name!r}) outside a mesh: wrap the call in `with jax.set_mesh(mesh):`")
    return jax.lax.with_sharding_constraint(x, _activation_spec(name))


def constrain_parameters(tree: Any) -> Any:
    """Fix the layout in which parameters, gradients and moments are stored, inside a jitted function.

    Raises:
        RuntimeError: no mesh is set.
        ValueError: a path that no rule knows.
    """

    def store(path: str, leaf: Array, mesh: AbstractMesh) -> Array:
        return jax.lax.with_sharding_constraint(leaf, parameter_spec(path, leaf.shape, mesh))

    return _map_parameters(tree, store)


def gather_parameters(tree: Any) -> Any:
    """Fix the layout in which parameters are computed with, inside a jitted function: whole along `fsdp`.

    Without it compilers may as well split activations by width and sum them over `fsdp` after every product. Gradients
    go back in the layout that parameters are stored in, so that each device receives the sum of its own part only.

    Raises:
        RuntimeError: no mesh is set.
        ValueError: a path that no rule knows.
    """

    def gather(path: str, leaf: Array, mesh: AbstractMesh) -> Array:
        @jax.custom_vjp
        def whole(x):
            return jax.lax.with_sharding_constraint(x, computing_spec(path, leaf.shape, mesh))

        def back(_, gradient):
            return (jax.lax.with_sharding_constraint(gradient, parameter_spec(path, leaf.shape, mesh)),)

        whole.defvjp(lambda x: (whole(x), None), back)
        return whole(leaf)

    return _map_parameters(tree, gather)


def computing_spec(path: str, shape: Sequence[int], mesh: Mesh | AbstractMesh) -> P:
    """Axes of one parameter where it enters a product: those it is stored with, but for `fsdp`."""
    return P(*(None if axis == "fsdp" else axis for axis in parameter_spec(path, shape, mesh)))


def _map_parameters(tree: Any, change: Callable[[str, Array, AbstractMesh], Array]) -> Any:
    mesh = current_mesh()
    if mesh is None:
        raise RuntimeError("parameters are laid out inside a mesh: wrap the call in `with jax.set_mesh(mesh):`")
    return jax.tree_util.tree_map_with_path(lambda path, leaf: change(_path_text(path), leaf, mesh), tree)


def check_collisions(spec: P, where: str) -> None:
    """Refuse a spec that lays two dimensions along one mesh axis.

    Raises:
        ValueError: naming the axis.
    """
    used: list[str] = []
    for entry in spec:
        used += [entry] if isinstance(entry, str) else list(entry or ())
    for axis in used:
        if axis not in AXES:
            raise ValueError(f"{where}: unknown mesh axis {axis!r}; axes are {AXES}")
        if used.count(axis) > 1:
            raise ValueError(f"{where}: mesh axis {axis!r} occurs twice in {spec}: each may split one dimension only")


def _activation_spec(name: str) -> P:
    if name not in ACTIVATIONS:
        raise ValueError(f"no sharding for activation {name!r}: known are {sorted(ACTIVATIONS)}")
    check_collisions(ACTIVATIONS[name], name)
    return ACTIVATIONS[name]


def _axis_size(mesh: Mesh | AbstractMesh, axis: str | tuple[str, ...]) -> int:
    size = 1
    for name in (axis,) if isinstance(axis, str) else axis:
        size *= mesh.shape[name]
    return size


def _path_text(path: tuple[Any, ...]) -> str:
    return "/".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)
