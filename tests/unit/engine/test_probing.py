"""How often a scheduler drafts where drafting does not pay."""

from __future__ import annotations

import numpy as np
import pytest

from dspark_jax.engine.probing import LONGEST_WAIT, Probing


def drafted(probing: Probing, shortfalls: list[float]) -> list[int]:
    return [i for i, shortfall in enumerate(shortfalls) if probing.drafts(shortfall)]


@pytest.mark.parametrize(
    ("shortfall", "wait"), [(0.09, 1), (0.49, 25), (0.99, 99), (2.0, LONGEST_WAIT), (np.inf, LONGEST_WAIT)]
)
def test_a_probe_waits_by_the_square_of_what_is_missing(shortfall, wait):
    steps = drafted(Probing(), [shortfall] * 1000)
    assert {b - a - 1 for a, b in zip([-1, *steps], steps, strict=False)} == {wait}


def test_drafting_that_pays_is_never_skipped_and_begins_a_new_wait():
    probing = Probing()
    assert drafted(probing, [0.49] * 100) == [25, 51, 77]
    assert drafted(probing, [0.0, -1.0, -np.inf]) == [0, 1, 2]
    assert drafted(probing, [0.49] * 26) == [25]
