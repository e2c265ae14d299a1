from __future__ import annotations

import itertools

import pytest

from dspark_jax import buckets


def test_br36_prompts_around_the_rungs():
    ladder = (16, 32)
    assert [buckets.pick(ladder, n, "prompt") for n in (1, 15, 16, 17, 32)] == [16, 16, 16, 32, 32]


def test_br36_the_largest_rung_is_the_limit_itself():
    """Not the next power of two: 16640 must not be padded to 32768."""
    assert buckets.rungs(16640, first=16, ratio=2.0)[-1] == 16640
    assert buckets.rungs(100, first=16, ratio=2.0) == (16, 32, 64, 100)
    assert buckets.rungs(8, first=1, ratio=1.5) == (1, 2, 3, 4, 6, 8)
    assert buckets.rungs(1, first=1, ratio=1.5) == (1,)
    assert buckets.rungs(3, first=16, ratio=2.0) == (3,)


@pytest.mark.parametrize("limit", range(1, 40))
def test_rungs_rise_to_the_limit(limit):
    ladder = buckets.rungs(limit, first=1, ratio=1.5)
    assert list(ladder) == sorted(set(ladder)) and ladder[-1] == limit
    assert all(b <= max(a + 1, 1.5 * a) for a, b in itertools.pairwise(ladder))


def test_nothing_is_truncated_silently():
    with pytest.raises(ValueError, match=r"prompt chunk of 33 does not fit the largest bucket 32"):
        buckets.pick((16, 32), 33, "prompt chunk")


@pytest.mark.parametrize("limit, first, ratio", [(0, 1, 2.0), (4, 0, 2.0), (4, 1, 1.0)])
def test_impossible_ladders(limit, first, ratio):
    with pytest.raises(ValueError, match="at least 1 and ratio above 1"):
        buckets.rungs(limit, first=first, ratio=ratio)
