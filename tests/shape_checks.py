"""The type checker behind the jaxtyping import hook: beartype for functions, nothing for constructors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import beartype


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check a function's arguments and result; leave `__init__` alone.

    JAX rebuilds pytree dataclasses with whatever stands in for their arrays (abstract shapes, axis numbers, one row
    under vmap), so their constructors must accept anything. Their fields are checked where a function uses them.
    """
    return function if function.__name__ == "__init__" else beartype.beartype(function)
