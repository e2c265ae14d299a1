"""Vocabulary of a drafter against its target's: padded tables are the identity, reduced ones map through offsets.

A drafter's head is the target's, and where the vocabulary is large and the model small, multiplying with it is most of
the time that drafting takes. Text uses few tokens often, so a drafter may be left with those: what it cannot draft, the
target still writes. Reducing a trained drafter changes which drafts there are, never the text's distribution.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Bool, Int

from dspark_jax.types import Params, TargetTables

if TYPE_CHECKING:
    from dspark_jax.draft.contract import Drafter

VOCABULARY = "draft_vocabulary"
"""Entry of a reduced drafter's parameters: `ids`, ascending target ids `[Vd]`, and `head`, their rows `[Vd, D]`."""


def draft_head(params: Params | None, tables: TargetTables) -> TargetTables:
    """The target's tables, with the drafter's own head where its vocabulary is reduced."""
    reduced = (params or {}).get(VOCABULARY)
    return tables if reduced is None else dataclasses.replace(tables, head=reduced["head"])


def draft_ids(params: Params | None) -> Int[Array, "Vd"] | None:
    """Target ids of a reduced vocabulary; None for the target's own."""
    reduced = (params or {}).get(VOCABULARY)
    return None if reduced is None else reduced["ids"]


def reduce_vocabulary(drafter: Drafter, ids: Iterable[int]) -> Drafter:
    """Leave a drafter with some of its target's tokens to draft.

    Args:
        drafter: DSpark, DFlash, EAGLE-3 or MTP over its target's whole vocabulary.
        ids: tokens to keep, in any order, such as the most frequent ones of the target's answers.

    Returns:
        A drafter that shares all other parameters. Its confidence head is what it was: calibrate again.

    Raises:
        ValueError: a drafter that has been reduced already or has no head, or ids that are not the target's.
    """
    config, tables = drafter.config, drafter.tables
    if config.draft_vocab_size is not None or config.kind not in ("dspark", "eagle3", "mtp") or tables is None:
        raise ValueError(
            f"drafter {drafter.name!r} ({config.name}) does not draft by its target's whole head: load a drafter that "
            "does, with its target"
        )
    kept = np.unique(np.asarray(list(ids), np.int64))
    check_ids(kept, tables.head.shape[0], drafter.name)
    params = {**drafter.params, VOCABULARY: {"ids": jnp.asarray(kept, jnp.int32), "head": tables.head[kept]}}
    if config.markov_rank:
        head = params["markov_head"]
        params["markov_head"] = {**head, "markov_w2": {"weight": head["markov_w2"]["weight"][kept]}}
    config = dataclasses.replace(config, draft_vocab_size=len(kept))
    functions = dataclasses.replace(drafter.functions, config=config)  # type: ignore[type-var]
    return dataclasses.replace(drafter, config=config, params=params, functions=functions)


def offsets_to_ids(d2t: Int[np.ndarray, "Vd"]) -> Int[np.ndarray, "Vd"]:
    """Target ids of a draft vocabulary: `target id = i + d2t[i]`, so all zeros are the identity.

    Example: offsets [5, 6, 6, 8] keep target ids [5, 7, 8, 11].
    """
    return np.arange(len(d2t), dtype=np.int64) + np.asarray(d2t, np.int64)


def ids_to_offsets(ids: Int[np.ndarray, "Vd"]) -> Int[np.ndarray, "Vd"]:
    """The inverse of `offsets_to_ids`, as checkpoints hold it: int64."""
    return np.asarray(ids, np.int64) - np.arange(len(ids))


def read_vocabulary(tensors: dict[str, np.ndarray], stated: int | None, tables: TargetTables, where: str) -> Params:
    """Take a reduced vocabulary out of a checkpoint's tensors.

    Args:
        tensors: all of them; `d2t`, `t2d` and, where the vocabulary is reduced, `lm_head.weight` are removed.
        stated: `draft_vocab_size` of the config.
        tables: the target's; a checkpoint without a head of its own uses their rows.
        where: checkpoint named in errors.

    Returns:
        The parameters' entry, or nothing where the ids are the target's own.

    Raises:
        ValueError: as `stored_ids`, or a head of another shape.
    """
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    ids = stored_ids(d2t, t2d, stated=stated, target_rows=tables.head.shape[0], where=where)
    if ids is None:
        return {}
    head, shape = tensors.pop("lm_head.weight", None), (len(ids), tables.head.shape[1])
    if head is not None and head.shape != shape:
        raise ValueError(f"{where}: tensor 'lm_head.weight' has shape {head.shape}, d2t asks for {shape}")
    rows = tables.head[ids] if head is None else jnp.asarray(head, tables.head.dtype)
    return {VOCABULARY: {"ids": jnp.asarray(ids, jnp.int32), "head": rows}}


def vocabulary_tensors(reduced: Params, drafter: Drafter, *, with_head: bool) -> dict[str, np.ndarray]:
    """A checkpoint's `d2t` and `t2d`, and the head where it is not made of the target's rows or is asked for."""
    ids, own = np.asarray(reduced["ids"]), np.asarray(reduced["head"])
    mask = np.zeros(drafter.config.decoder.vocab_size, bool)
    mask[ids] = True
    tensors: dict[str, np.ndarray] = {"d2t": ids_to_offsets(ids), "t2d": mask}
    if with_head or drafter.tables is None or not np.array_equal(own, np.asarray(drafter.tables.head[ids])):
        tensors["lm_head.weight"] = own.astype(ml_dtypes.bfloat16)
    return tensors


def stored_ids(
    d2t: Int[np.ndarray, "Vd"] | None,
    t2d: Bool[np.ndarray, "V"] | None,
    *,
    stated: int | None,
    target_rows: int,
    where: str,
) -> Int[np.ndarray, "Vd"] | None:
    """Target ids of a checkpoint's reduced vocabulary; None where its ids are the target's own.

    Args:
        d2t: the checkpoint's draft-to-target offsets, if it has any.
        t2d: its mask over the target's tokens, if it has one.
        stated: `draft_vocab_size` of its config.
        target_rows: rows of the target's tables.
        where: checkpoint named in errors.

    Raises:
        ValueError: a size without a map, or a map that contradicts the size, the mask or the target.

    Example: a drafter padded to 201024 rows serves a target of 200058 tokens; ids beyond the target's are never used.
    """
    if d2t is None:
        if stated is not None and stated < target_rows:
            raise ValueError(
                f"{where}: the drafter's vocabulary has {stated} tokens, the target's {target_rows}; a reduced "
                "vocabulary needs a d2t map, and this checkpoint has none"
            )
        return None
    ids = offsets_to_ids(d2t)
    if len(ids) >= target_rows and not np.any(d2t):
        return None
    if stated is not None and stated != len(ids):
        raise ValueError(f"{where}: d2t maps {len(ids)} tokens, draft_vocab_size is {stated}")
    check_ids(ids, target_rows, where)
    if t2d is not None and not np.array_equal(np.flatnonzero(t2d), ids):
        raise ValueError(f"{where}: t2d marks {np.count_nonzero(t2d)} tokens, which are not the {len(ids)} of d2t")
    return ids


def check_ids(ids: Int[np.ndarray, "Vd"], target_rows: int, where: str) -> None:
    """Refuse a draft vocabulary that is none.

    Raises:
        ValueError: no ids, ids that do not ascend, or one outside the target's tables.
    """
    outside = ids[(ids < 0) | (ids >= target_rows)]
    if len(outside):
        raise ValueError(f"{where}: draft vocabulary names token {outside[0]}, the target has {target_rows}")
    if not len(ids) or np.any(np.diff(ids) <= 0):
        raise ValueError(f"{where}: the draft vocabulary's {len(ids)} target ids do not ascend: its d2t is broken")
