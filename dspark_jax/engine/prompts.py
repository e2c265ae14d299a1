"""Prompts on their way into the slots: what of which prompt the next step takes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from dspark_jax import buckets
from dspark_jax.engine.requests import Request
from dspark_jax.engine.state import Chunk

CHUNK_LADDER = (32, 64, 128)
"""Prompt tokens of a step."""
SEGMENT = 16
"""Tokens of a segment, where every rung is a multiple of it."""


def empty_chunk(ladder: Sequence[int], width: int, nobody: int) -> Chunk:
    """A chunk of `width` prompt tokens in which all segments are free.

    Args:
        ladder: all widths a chunk may have: what divides them all and 16 is the width of a segment.
        width: this one's.
        nobody: number of slots.
    """
    segment = math.gcd(SEGMENT, *ladder)
    count = width // segment
    fields: dict[str, Any] = {
        "tokens": np.zeros((count, segment), np.int32),
        "following": np.zeros((count, segment), np.int32),
        "slots": np.full(count, nobody, np.int32),
        "starts": np.zeros(count, np.int32),
        "counts": np.zeros(count, np.int32),
        "ends": np.zeros(count, bool),
    }
    return Chunk(**fields)


def next_chunk(
    waiting: Sequence[tuple[int, Request]], ladder: Sequence[int], nobody: int
) -> tuple[Chunk, frozenset[int]]:
    """Take the next parts of waiting prompts, those of the first before those of the next, as many as a step may carry.

    Args:
        waiting: slots and requests whose prompts are not through; their cursors move on.
        ladder: prompt tokens of a step.
        nobody: number of slots.

    Returns:
        Fresh arrays, since the device may still read the last ones, and the slots whose prompts end.
    """
    segment = math.gcd(SEGMENT, *ladder)
    wanted = sum(-(-(len(r.prompt) - r.cursor) // segment) * segment for _, r in waiting)
    chunk = empty_chunk(ladder, buckets.pick(ladder, min(wanted, ladder[-1]), "prompt chunk"), nobody)
    rest, firsts = deque(waiting), set()
    for i in range(len(chunk.slots)):
        if not rest:
            break
        slot, request = rest[0]
        begin, prompt = request.cursor, request.prompt
        part, following = prompt[begin : begin + segment], prompt[begin + 1 : begin + segment + 1]
        chunk.tokens[i, : len(part)], chunk.following[i, : len(following)] = part, following
        chunk.slots[i], chunk.starts[i], chunk.counts[i] = slot, begin, len(part)
        request.cursor += len(part)
        chunk.ends[i] = request.prompt_done
        if request.prompt_done:
            firsts.add(slot)
            rest.popleft()
    return chunk, frozenset(firsts)
