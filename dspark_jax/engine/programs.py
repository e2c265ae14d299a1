"""Compiled programs, kept by their static facts, with the seconds spent compiling them."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Hashable
from typing import Any

import jax
from jax.sharding import Mesh

from dspark_jax.engine.layout import state_shardings


class Programs:
    """Ahead-of-time compiled programs: a call never compiles behind the caller's back.

    Attributes:
        seconds: spent compiling so far.
        count: programs compiled so far.
    """

    def __init__(self) -> None:
        self._compiled: dict[Hashable, Any] = {}
        self.seconds = 0.0
        self.count = 0

    def get(
        self,
        key: Hashable,
        function: Callable[..., Any],
        donate: tuple[int, ...],
        *args: Any,
        mesh: Mesh | None = None,
    ) -> Any:
        """Return the program for `key`, compiling `function` for the shapes of `args` where it is new.

        On a mesh, results have the layouts of `state_shardings`, so that every program takes what any other gave.
        """
        full_key = (key, mesh, jax.tree.structure(args), tuple((x.shape, x.dtype) for x in jax.tree.leaves(args)))
        if full_key not in self._compiled:
            started = time.perf_counter()
            with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
                layouts = None if mesh is None else state_shardings(mesh, jax.eval_shape(function, *args))
                program = jax.jit(function, donate_argnums=donate, out_shardings=layouts)
                self._compiled[full_key] = program.lower(*args).compile()
            self.seconds += time.perf_counter() - started
            self.count += 1
        return self._compiled[full_key]

    def clear(self) -> None:
        """Forget all programs; those that engines hold go on to work.

        A process may have 65,530 memory maps, and compiled programs take hundreds each: whoever builds engine after
        engine has to forget in between.
        """
        self._compiled.clear()
        jax.clear_caches()
        gc.collect()


PROGRAMS = Programs()
"""The process's programs: generating again with the same shapes compiles nothing."""
