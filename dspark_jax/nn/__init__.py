"""Decoder sublayers shared by targets and drafters."""

from __future__ import annotations

from typing import Any

from flax import linen

from dspark_jax.types import Params


def run(module: linen.Module, params: Params | None, *args: Any, method: str | None = None) -> Any:
    """Call a module (or one of its methods) with parameters and no other variable collection."""
    return module.apply({"params": params or {}}, *args, method=method)
