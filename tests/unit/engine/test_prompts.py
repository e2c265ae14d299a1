from __future__ import annotations

import numpy as np
import pytest

from dspark_jax.engine.prompts import empty_chunk, next_chunk
from dspark_jax.engine.requests import Request

LADDER, SLOTS = (32, 64), 8


def request(length, first=0):
    return Request(0, list(range(first, first + length)), 1, {}, "greedy", 0, np.full(1, -1, np.int32))


def test_prompts_share_a_chunk_in_the_order_they_wait():
    long, short, late = request(40), request(5, first=100), request(20, first=200)
    waiting = [(2, long), (0, short), (7, late)]
    chunk, firsts = next_chunk(waiting, LADDER, SLOTS)
    assert chunk.tokens.shape == (4, 16) and firsts == {0, 2}
    assert chunk.slots.tolist() == [2, 2, 2, 0] and chunk.starts.tolist() == [0, 16, 32, 0]
    assert chunk.counts.tolist() == [16, 16, 8, 5] and chunk.ends.tolist() == [False, False, True, True]
    assert chunk.tokens[1].tolist() == list(range(16, 32)) and chunk.following[1].tolist() == list(range(17, 33))
    assert chunk.tokens[3, :5].tolist() == [100, 101, 102, 103, 104] and chunk.following[3, :4].tolist() == [
        101, 102, 103, 104,
    ]  # fmt: skip
    assert (long.cursor, short.cursor, late.cursor) == (40, 5, 0)
    chunk, firsts = next_chunk([(7, late)], LADDER, SLOTS)
    assert chunk.slots.tolist() == [7, 7] and chunk.counts.tolist() == [16, 4] and firsts == {7}


def test_a_prompt_longer_than_a_chunk_goes_on_in_the_next():
    long, other = request(70), request(3)
    chunk, firsts = next_chunk([(1, long), (3, other)], LADDER, SLOTS)
    assert chunk.counts.tolist() == [16] * 4 and not firsts and not chunk.ends.any()
    assert chunk.following[-1].tolist() == list(range(49, 65)), "the next chunk's first token follows"
    chunk, firsts = next_chunk([(1, long), (3, other)], LADDER, SLOTS)
    assert chunk.slots.tolist() == [1, 3] and chunk.starts.tolist() == [64, 0] and firsts == {1, 3}


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33, 64, 65, 200])
def test_every_token_comes_once_and_in_place(length):
    """Whatever the length, the smallest rung that holds what is left, whole segments counted."""
    one, seen = request(length), []
    while not one.prompt_done:
        left = length - one.cursor
        chunk, firsts = next_chunk([(4, one)], LADDER, SLOTS)
        assert chunk.tokens.size == (32 if left <= 32 else 64)
        for tokens, start, count, slot in zip(chunk.tokens, chunk.starts, chunk.counts, chunk.slots, strict=True):
            assert slot == (4 if count else SLOTS)
            seen += [(start + i, t) for i, t in enumerate(tokens[:count])]
        assert firsts == ({4} if one.prompt_done else set())
    assert seen == [(i, i) for i in range(length)]


def test_segments_divide_every_rung():
    assert empty_chunk((4,), 4, SLOTS).tokens.shape == (1, 4)
    assert empty_chunk((24, 36), 36, SLOTS).tokens.shape == (9, 4)
    assert (empty_chunk((32,), 32, SLOTS).slots == SLOTS).all()
