"""Ladders of static sizes: a dynamic size is padded to a rung, so that the number of compiled programs is bounded."""

from __future__ import annotations

from collections.abc import Sequence


def pick(ladder: Sequence[int], size: int, what: str) -> int:
    """Smallest rung that holds `size`.

    Args:
        ladder: ascending sizes.
        size: what has to fit.
        what: name of the dimension, for the error.

    Raises:
        ValueError: `size` exceeds the last rung; nothing is ever truncated silently.

    Example: `pick((16, 32), 17, "prompt chunk") == 32`.
    """
    for rung in ladder:
        if size <= rung:
            return rung
    raise ValueError(f"{what} of {size} does not fit the largest bucket {ladder[-1]} of {tuple(ladder)}")


def rungs(limit: int, *, first: int, ratio: float) -> tuple[int, ...]:
    """Ladder from `first` to exactly `limit`, each rung at most `ratio` times the one before.

    Example: `rungs(100, first=16, ratio=2) == (16, 32, 64, 100)`.
    """
    if limit < 1 or first < 1 or ratio <= 1:
        raise ValueError(
            f"expected limit and first of at least 1 and ratio above 1, found {limit}, {first} and {ratio}"
        )
    ladder, rung = [], first
    while rung < limit:
        ladder.append(rung)
        rung = max(rung + 1, int(rung * ratio))
    return (*ladder, limit)
