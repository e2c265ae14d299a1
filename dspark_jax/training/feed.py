"""A run's batches on its devices; each process prepares the rows of its own devices and no others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from dspark_jax.data.pipeline import Batch, BatchSource
from dspark_jax.sharding import activation_sharding


class Feed:
    """Batches of a source, cut into accumulation parts and laid out over the mesh.

    Attributes:
        source: where batches come from.
        places: rows of every batch that this process prepares, `[parts * columns]`.
    """

    def __init__(self, source: BatchSource, mesh: Mesh, parts: int):
        """Find out which rows are this process's.

        Args:
            source: batches, the same on every process.
            mesh: of all processes.
            parts: accumulation parts of a batch; they divide its rows.
        """
        self.source = source
        self._layout = activation_sharding(mesh, "accumulated_rows")
        self._numbers = np.arange(source.batch_size).reshape(parts, -1)
        indices: Any = self._layout.addressable_devices_indices_map(self._numbers.shape).values()
        # The same columns of every part: a part's rows lie on the devices as those of any other.
        self._columns = np.unique(np.concatenate([self._numbers[0][index[1]] for index in indices]))
        self.places = self._numbers[:, self._columns].reshape(-1)

    def batch(self, k: int) -> Batch:
        """Batch `k` on the devices, `[parts, rows, ...]`."""
        return self._put(self.source.batch(k, self.places))

    def batches(self, start: int) -> Iterator[tuple[int, Batch]]:
        """Yield (k, batch k) on the devices from `start` on, prepared ahead in threads."""
        for k, batch in self.source.prefetch(start, self.places):
            yield k, self._put(batch)

    def _put(self, batch: Batch) -> Batch:
        def put(x: np.ndarray) -> jax.Array:
            parts = x.reshape(len(self._numbers), len(self._columns), *x.shape[1:])

            def read(index: Any) -> np.ndarray:
                # A device's rows are neighbours, so this is a view.
                wanted = self._numbers[0][index[1]]
                first = int(np.searchsorted(self._columns, wanted[0]))
                return parts[index[0], first : first + len(wanted)][(slice(None), slice(None), *index[2:])]

            return jax.make_array_from_callback((*self._numbers.shape, *x.shape[1:]), self._layout, read)

        return jax.tree.map(put, batch)
