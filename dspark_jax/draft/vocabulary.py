"""Vocabulary of a drafter against its target's: padded tables are the identity, pruned ones map through offsets."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int


def offsets_to_ids(d2t: Int[np.ndarray, "V"]) -> Int[np.ndarray, "V"]:
    """Target ids of a draft vocabulary: `target id = i + d2t[i]`, so all zeros are the identity.

    Example: offsets [5, 6, 6, 8] keep target ids [5, 7, 8, 11].
    """
    return np.arange(len(d2t), dtype=np.int64) + np.asarray(d2t, np.int64)


def check_vocabulary(draft_rows: int, target_rows: int, d2t: Int[np.ndarray, "V"] | None, where: str) -> None:
    """Accept a drafter whose ids are the target's own; refuse any other by name.

    Args:
        draft_rows: tokens of the drafter's vocabulary.
        target_rows: rows of the target's embedding table.
        d2t: the checkpoint's draft-to-target offsets, if it has any.
        where: checkpoint named in errors.

    Raises:
        ValueError: a reduced vocabulary, with or without its map.

    Example: a drafter padded to 201024 rows serves a target of 200058 tokens; ids beyond the target's are never used.
    """
    if d2t is not None:
        ids = offsets_to_ids(d2t)
        moved = np.flatnonzero(ids != np.arange(len(ids)))
        if len(moved):
            raise ValueError(
                f"{where}: d2t maps draft token {moved[0]} to target token {ids[moved[0]]} (a reduced draft "
                "vocabulary), which is not supported; use a full-vocabulary drafter"
            )
    if draft_rows < target_rows:
        raise ValueError(
            f"{where}: the drafter's vocabulary has {draft_rows} tokens, the target's {target_rows}; a reduced "
            "vocabulary needs a d2t map, and this checkpoint has none"
        )
