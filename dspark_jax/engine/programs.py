"""Compiled programs, kept by their static facts, with the seconds spent compiling them."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Any

import jax


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

    def get(self, key: Hashable, function: Callable[..., Any], donate: tuple[int, ...], *args: Any) -> Any:
        """Return the program for `key`, compiling `function` for the shapes of `args` where it is new."""
        full_key = (key, jax.tree.structure(args), tuple((x.shape, x.dtype) for x in jax.tree.leaves(args)))
        if full_key not in self._compiled:
            started = time.perf_counter()
            self._compiled[full_key] = jax.jit(function, donate_argnums=donate).lower(*args).compile()
            self.seconds += time.perf_counter() - started
            self.count += 1
        return self._compiled[full_key]

    def clear(self) -> None:
        """Forget all programs; those that engines hold go on to work."""
        self._compiled.clear()


PROGRAMS = Programs()
"""The process's programs: generating again with the same shapes compiles nothing."""
