"""Every device gets its own rows of every accumulation part, whatever the mesh."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest
from training_setup import tiny_corpus

from dspark_jax.data.pipeline import BatchSource
from dspark_jax.sharding import create_mesh
from dspark_jax.training.feed import Feed


@pytest.mark.parametrize("sizes", [(1, 1, 1), (8, 1, 1), (2, 2, 2)])
def test_devices_hold_their_rows(sizes):
    data, fsdp, tensor = sizes
    source = BatchSource(tiny_corpus(120), 16, 16, 3)
    feed = Feed(source, create_mesh(data=data, fsdp=fsdp, tensor=tensor), 2)
    assert feed.places.tolist() == list(range(16))
    whole = source.batch(1)
    (k, ahead), *_ = itertools.islice(feed.batches(1), 1)
    assert k == 1
    for batch in (feed.batch(1), ahead):
        for ours, expected in zip(jax.tree.leaves(batch), jax.tree.leaves(whole), strict=True):
            np.testing.assert_array_equal(np.asarray(ours).reshape(expected.shape), expected)
            assert ours.shape[:2] == (2, 8) and ours.addressable_shards[0].data.shape[1] == 8 // (data * fsdp)


def test_a_process_prepares_the_rows_of_its_devices(monkeypatch):
    """Four of eight devices are this process's: half of every part."""
    source, mesh = BatchSource(tiny_corpus(120), 16, 16, 3), create_mesh(data=8)
    mine = mesh.devices.flatten()[4:].tolist()
    layout = jax.sharding.NamedSharding
    every = layout.devices_indices_map
    monkeypatch.setattr(
        layout,
        "addressable_devices_indices_map",
        lambda self, shape: {d: i for d, i in every(self, shape).items() if d in mine},
    )
    assert Feed(source, mesh, 2).places.tolist() == [4, 5, 6, 7, 12, 13, 14, 15]
