"""Which documents share a training row: a deterministic index built from lengths alone.

Documents are taken in an order given by a hash of (seed, document) and put, one after another, into the fullest row
that still has room (best fit). The index depends on nothing but lengths and seed: not on the process count, the batch
size or how far a run has come.

Example, `sequence_length = 8`, documents of 5, 4, 3 and 3 tokens taken in this order:

    row 0: [0 0 0 0 0 2 2 2]      segments [1 1 1 1 1 2 2 2]   positions [0 1 2 3 4 0 1 2]
    row 1: [1 1 1 1 3 3 3 .]      segments [1 1 1 1 2 2 2 0]   positions [0 1 2 3 0 1 2 0]
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int, UInt64

from dspark_jax.files import fingerprint


@dataclass(frozen=True)
class PackingIndex:
    """Row i holds the documents `documents[offsets[i]:offsets[i + 1]]`, in this order.

    Attributes:
        documents: document numbers; each occurs once, `[documents]`.
        offsets: row boundaries, `[rows + 1]`.
        sequence_length: tokens a row has room for.
    """

    documents: Int[np.ndarray, "documents"]
    offsets: Int[np.ndarray, "rows_plus_1"]
    sequence_length: int

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, index: int | np.integer) -> Int[np.ndarray, "n"]:
        """Return the documents of row `index`."""
        return self.documents[self.offsets[index] : self.offsets[index + 1]]

    @property
    def fingerprint(self) -> str:
        """Short content hash."""
        return fingerprint([self.documents, self.offsets, self.sequence_length])


def hash_order(count: int, *keys: int) -> Int[np.ndarray, "count"]:
    """Return a permutation of `range(count)` that is a pure function of `keys`.

    Items are sorted by a 64-bit mix of the keys and their number, which is the same with every NumPy version, unlike
    the draws of a generator object.

    Args:
        count: number of items.
        *keys: integers such as seed and epoch.
    """
    state = np.uint64(0)
    for key in keys:
        state = _mix(np.asarray([state ^ np.uint64(key % 2**64)], np.uint64))[0]
    items = _mix(np.arange(count, dtype=np.uint64) ^ state)
    return np.argsort(items, kind="stable").astype(np.int64)


def _mix(x: UInt64[np.ndarray, "n"]) -> UInt64[np.ndarray, "n"]:
    """Finalizer of the splitmix64 generator: a bijection in which every input bit moves about half of the output."""
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def pack_documents(lengths: Int[np.ndarray, "documents"], sequence_length: int, seed: int) -> PackingIndex:
    """Pack whole documents into rows of `sequence_length` tokens, best fit in hash order.

    Args:
        lengths: tokens of every document.
        sequence_length: tokens a row has room for.
        seed: decides the order in which documents are placed.

    Returns:
        The index; every document occurs exactly once.

    Raises:
        ValueError: when a document is empty or longer than a row (cut it when reading, where it is counted).
    """
    _check_lengths(lengths, sequence_length)
    rows: list[list[int]] = []
    # Rows by free room: `room` holds the sorted distinct amounts, `open_rows` the rows with each amount.
    room: list[int] = []
    open_rows: dict[int, list[int]] = {}
    for document in hash_order(len(lengths), seed, _PACKING):
        length = int(lengths[document])
        at = bisect_left(room, length)
        if at == len(room):
            free, row = sequence_length, len(rows)
            rows.append([])
        else:
            free = room[at]
            row = open_rows[free].pop()
            if not open_rows[free]:
                del open_rows[free], room[at]
        rows[row].append(int(document))
        left = free - length
        if left > 0:
            if left not in open_rows:
                insort(room, left)
                open_rows[left] = []
            open_rows[left].append(row)
    return _index(rows, sequence_length)


def one_document_per_row(lengths: Int[np.ndarray, "documents"], sequence_length: int) -> PackingIndex:
    """Give every document a padded row of its own.

    Args:
        lengths: tokens of every document.
        sequence_length: tokens a row has room for.

    Raises:
        ValueError: when a document is empty or longer than a row.
    """
    _check_lengths(lengths, sequence_length)
    return _index([[i] for i in range(len(lengths))], sequence_length)


def fill_rows(
    documents: Sequence[Sequence[tuple[np.ndarray, np.ndarray]]], sequence_length: int
) -> tuple[Int[np.ndarray, "B L"], Bool[np.ndarray, "B L"], Int[np.ndarray, "B L"], Int[np.ndarray, "B L"]]:
    """Lay out rows of documents as arrays.

    Args:
        documents: for every row its (token ids, loss mask) pairs.
        sequence_length: width L of the arrays.

    Returns:
        tokens (padding 0), loss mask, segments (1, 2, … per document; 0 is padding), and positions, which restart at 0
        in every segment; all `[B, L]`.
    """
    shape = (len(documents), sequence_length)
    tokens, segments, positions = (np.zeros(shape, np.int32) for _ in range(3))
    loss_mask = np.zeros(shape, bool)
    for row, parts in enumerate(documents):
        start = 0
        for number, (ids, mask) in enumerate(parts, 1):
            where = (row, slice(start, start + len(ids)))
            tokens[where], loss_mask[where] = ids, mask
            segments[where], positions[where] = number, np.arange(len(ids))
            start += len(ids)
    return tokens, loss_mask, segments, positions


_PACKING = 1  # distinguishes the placing order from other permutations of the same seed


def _check_lengths(lengths: Int[np.ndarray, "documents"], sequence_length: int) -> None:
    if len(lengths) == 0:
        raise ValueError("There is no document to pack: the corpus is empty.")
    shortest, longest = int(lengths.min()), int(lengths.max())
    if shortest < 1 or longest > sequence_length:
        raise ValueError(
            f"Documents have {shortest} to {longest} tokens, rows have room for 1 to {sequence_length}: "
            "read them with max_length equal to the sequence length."
        )


def _index(rows: Sequence[Sequence[int]], sequence_length: int) -> PackingIndex:
    offsets = np.concatenate([[0], np.cumsum([len(x) for x in rows])]).astype(np.int64)
    return PackingIndex(np.concatenate([np.asarray(x, np.int64) for x in rows]), offsets, sequence_length)
