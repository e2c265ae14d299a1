"""A run of several processes, one a host: joining them, and agreeing on when to stop."""

from __future__ import annotations

from collections import deque

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dspark_jax.training.config import ProcessConfig


def join(config: ProcessConfig) -> None:
    """Connect this process to the others, before anything asks for devices.

    Raises:
        ValueError: an address without this process's number and their count.
    """
    if config.coordinator is None:
        return
    if config.coordinator == "auto":
        jax.distributed.initialize()
        return
    if config.index is None or config.count is None:
        raise ValueError(
            f"processes.coordinator is {config.coordinator!r}: give processes.index and processes.count as well, or "
            "'auto' where the cluster tells (TPU slices, Slurm, GKE)"
        )
    jax.distributed.initialize(config.coordinator, config.count, config.index)


class Agreement:
    """The largest of all processes' wishes, known to all of them at the same step.

    A process that is told to stop must not stop alone: the others would wait for it in their next sum. Every step
    carries the wishes along; nobody waits for them, so an answer is as old as the metrics that are read beside it.
    """

    def __init__(self, lag: int):
        """Take the devices of all processes.

        Args:
            lag: steps between a wish and its answer; a single process has its own at once.
        """
        self._lag = lag if jax.process_count() > 1 else 0
        self._pending: deque[jax.Array] = deque()
        mesh = Mesh(np.array(jax.devices()), ("all",))
        self._wishes = NamedSharding(mesh, P("all"))
        self._largest = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, P()))

    def __call__(self, wish: int) -> int:
        """Submit this process's wish; returns the largest of all, of `lag` calls ago (0 before the first)."""
        if self._lag == 0:
            return wish
        mine = np.full(1, wish, np.int32)
        wishes = jax.make_array_from_callback((jax.device_count(),), self._wishes, lambda _: mine)
        self._pending.append(self._largest(wishes))
        return int(self._pending.popleft()) if len(self._pending) > self._lag else 0
