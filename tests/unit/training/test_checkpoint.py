"""Checkpoints beside donated buffers: what is saved, what a restored state may be used for, what a failed save does."""

from __future__ import annotations

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from training_setup import tiny_config, tiny_corpus, tiny_target

from dspark_jax.data.pipeline import BatchSource
from dspark_jax.sharding import activation_sharding, create_mesh, gather, place, tree_shardings
from dspark_jax.training.checkpoint import Checkpoints
from dspark_jax.training.config import to_json
from dspark_jax.training.setup import create_step
from dspark_jax.training.step import init_state


@pytest.fixture(scope="module")
def run():
    """A mesh, a compiled step with its arguments, and a maker of fresh states."""
    config, target = tiny_config(), tiny_target()
    step, mesh = create_step(config, target, 20), create_mesh(data=1, fsdp=2, tensor=1)
    source = BatchSource(tiny_corpus(), config.batch_size, config.sequence_length, 0, config.packed)
    batch = jax.device_put(
        jax.tree.map(lambda x: x[None], source.batch(0)), activation_sharding(mesh, "accumulated_rows")
    )

    create = lambda: init_state(step.functions, step.optimizer, 0)
    fresh = jax.jit(create, out_shardings=tree_shardings(mesh, jax.eval_shape(create)))
    with jax.set_mesh(mesh):
        frozen = (place(mesh, target.tables), place(mesh, target.params))
        compiled = step.jit_train(mesh, fresh()).lower(fresh(), batch, *frozen).compile()
    return config, step, mesh, fresh, lambda state: compiled(state, batch, *frozen)[0]


def checkpoints(run, folder):
    config, step, *_ = run
    return Checkpoints(folder, step.functions, 2, to_json(config))


def abstract(run):
    *_, fresh, _ = run
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), fresh())


def save(run, found, state):
    found.save(state, {"data": "here"}, gather(run[2], state.params))


def test_br37_a_save_in_the_background_keeps_what_the_next_steps_overwrite(run, tmp_path):
    *_, fresh, train = run
    state, found = fresh(), checkpoints(run, tmp_path)
    for _ in range(3):
        state = train(state)
    expected = jax.device_get(state)
    save(run, found, state)
    for _ in range(5):
        state = train(state)
    found.close()
    restored, _ = checkpoints(run, tmp_path).restore(abstract(run), "here")
    for ours, theirs in zip(jax.tree.leaves(restored), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert int(state.step) == 8 and int(restored.step) == 3


def test_br37_a_restored_state_is_donated_like_a_fresh_one(run, tmp_path):
    *_, fresh, train = run
    found = checkpoints(run, tmp_path)
    save(run, found, train(fresh()))
    found.close()
    restored, _ = checkpoints(run, tmp_path).restore(abstract(run), "here")
    began = fresh()
    train(began)
    after = train(restored)
    for old, new in zip(jax.tree.leaves(restored), jax.tree.leaves(began), strict=True):
        assert old.is_deleted() == new.is_deleted()
    assert all(x.is_deleted() for x in jax.tree.leaves(restored.params))
    assert int(after.step) == 2


def test_br37_a_failed_save_is_reported_by_the_next(run, tmp_path, monkeypatch):
    """Orbax keeps what a save in the background failed with until it is asked."""
    *_, fresh, train = run
    state, found = train(fresh()), checkpoints(run, tmp_path)

    def failed(self):
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(ocp.CheckpointManager, "check_for_errors", failed)
        with pytest.raises(OSError, match="No space left"):
            save(run, found, state)
    assert found.latest() is None and not (tmp_path / "export").exists()
    found.close()
