"""How benchmarks time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np


def seconds(call: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Median and minimum wall-clock seconds of a call whose result is waited for; the first call does not count."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - started)
    return {"median": float(np.median(times)), "minimum": float(np.min(times))}
