"""Tokenized rows: in memory, or in a folder of flat files that is mapped into memory.

Layout of the folder:
    tokens.i32       token ids of all rows, one row after another
    loss_mask.u8     1 where the token is supervised
    rows.npz         length and source index of every row
    rows.json        id and domain of every row, and what became of the rows that were read

A folder appears under its name when it is complete.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int, UInt8

from dspark_jax.files import atomic_folder, fingerprint

TOKENS, LOSS_MASK, ROW_ARRAYS, ROW_NAMES = "tokens.i32", "loss_mask.u8", "rows.npz", "rows.json"
_BLOCK_ROWS = 4096


@dataclass(frozen=True)
class TokenizedRow:
    """One row on its way into a corpus.

    Attributes:
        id: unique name.
        domain: what it is about, or "".
        source_index: number of the row in the files as read, dropped rows included.
        tokens: token ids.
        loss_mask: 1 where the token is supervised.
    """

    id: str
    domain: str
    source_index: int
    tokens: Int[np.ndarray, "L"]
    loss_mask: UInt8[np.ndarray, "L"]


@dataclass(frozen=True)
class TokenizedCorpus:
    """Tokenized rows in flat arrays; row i is `tokens[starts[i]:starts[i] + lengths[i]]`.

    Subsets share the flat arrays, which may be larger than memory (mapped files).

    Attributes:
        tokens: token ids, `[total]`; of a subset, those of other rows too.
        loss_mask: 1 where the token is supervised, `[total]`.
        starts: first token of each row, `[rows]`.
        lengths: tokens of each row, `[rows]`.
        source_index: row number in the files as read, `[rows]`; survives splits, and is the sample id of target caches.
        ids: row ids.
        domains: row domains.
    """

    tokens: Int[np.ndarray, "total"]
    loss_mask: UInt8[np.ndarray, "total"]
    starts: Int[np.ndarray, "rows"]
    lengths: Int[np.ndarray, "rows"]
    source_index: Int[np.ndarray, "rows"]
    ids: tuple[str, ...]
    domains: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return int(self.lengths.sum())

    @property
    def fingerprint(self) -> str:
        """Short content hash: equal iff tokens, masks, boundaries and ids are."""
        contents = [fingerprint(block) for block in self.blocks()]
        return fingerprint([contents, self.lengths, self.source_index, self.ids])

    def row(self, index: int | np.integer) -> tuple[Int[np.ndarray, "L"], UInt8[np.ndarray, "L"]]:
        """Return views of the token ids and the loss mask of row `index`."""
        part = slice(self.starts[index], self.starts[index] + self.lengths[index])
        return self.tokens[part], self.loss_mask[part]

    def blocks(self) -> Iterator[tuple[Int[np.ndarray, "part"], UInt8[np.ndarray, "part"]]]:
        """Yield all rows' token ids and loss masks, some thousand rows at a time."""
        for begin in range(0, len(self), _BLOCK_ROWS):
            rows = [self.row(i) for i in range(begin, min(begin + _BLOCK_ROWS, len(self)))]
            yield np.concatenate([x for x, _ in rows]), np.concatenate([x for _, x in rows])

    def supervised_counts(self) -> Int[np.ndarray, "V"]:
        """How often each id is supervised, up to the largest one that is."""
        counts = np.zeros(0, np.int64)
        for tokens, loss_mask in self.blocks():
            more = np.bincount(tokens[loss_mask == 1], minlength=len(counts))
            more[: len(counts)] += counts
            counts = more
        return counts

    def subset(self, rows: Sequence[int] | np.ndarray) -> TokenizedCorpus:
        """Return a corpus of the given rows, in the given order."""
        chosen = np.asarray(rows, np.int64)
        return TokenizedCorpus(
            tokens=self.tokens,
            loss_mask=self.loss_mask,
            starts=self.starts[chosen],
            lengths=self.lengths[chosen],
            source_index=self.source_index[chosen],
            ids=tuple(self.ids[i] for i in chosen),
            domains=tuple(self.domains[i] for i in chosen),
        )

    @staticmethod
    def from_rows(rows: Sequence[TokenizedRow]) -> TokenizedCorpus:
        """Build a corpus in memory."""
        lengths = np.asarray([len(row.tokens) for row in rows], np.int64)
        return TokenizedCorpus(
            tokens=np.concatenate([np.zeros(0, np.int32), *(row.tokens for row in rows)]),
            loss_mask=np.concatenate([np.zeros(0, np.uint8), *(row.loss_mask for row in rows)]),
            starts=np.cumsum(lengths) - lengths,
            lengths=lengths,
            source_index=np.asarray([row.source_index for row in rows], np.int64),
            ids=tuple(row.id for row in rows),
            domains=tuple(row.domain for row in rows),
        )


def write_corpus(folder: Path, rows: Iterable[TokenizedRow], summary: Callable[[], Any]) -> None:
    """Write rows to a new folder, as they come.

    Args:
        folder: of `read_corpus`.
        rows: at least one.
        summary: called after the last row; what it returns (JSON) is kept beside the rows.
    """
    ids, domains, lengths, source_index = [], [], [], []
    with atomic_folder(folder) as unfinished:
        with open(unfinished / TOKENS, "wb") as tokens, open(unfinished / LOSS_MASK, "wb") as loss_mask:
            for row in rows:
                tokens.write(np.ascontiguousarray(row.tokens, "<i4").data)
                loss_mask.write(np.ascontiguousarray(row.loss_mask).data)
                ids.append(row.id)
                domains.append(row.domain)
                lengths.append(len(row.tokens))
                source_index.append(row.source_index)
        np.savez(
            unfinished / ROW_ARRAYS,
            lengths=np.asarray(lengths, np.int64),
            source_index=np.asarray(source_index, np.int64),
        )
        names = {"ids": ids, "domains": domains, "summary": summary()}
        (unfinished / ROW_NAMES).write_text(json.dumps(names), encoding="utf-8")


def read_corpus(folder: Path) -> tuple[TokenizedCorpus, Any]:
    """Map a written corpus into memory; returns it and the summary it was written with."""
    names = json.loads((folder / ROW_NAMES).read_text(encoding="utf-8"))
    with np.load(folder / ROW_ARRAYS) as arrays:
        lengths, source_index = arrays["lengths"], arrays["source_index"]
    corpus = TokenizedCorpus(
        tokens=np.memmap(folder / TOKENS, "<i4", "r"),
        loss_mask=np.memmap(folder / LOSS_MASK, np.uint8, "r"),
        starts=np.cumsum(lengths) - lengths,
        lengths=lengths,
        source_index=source_index,
        ids=tuple(names["ids"]),
        domains=tuple(names["domains"]),
    )
    return corpus, names["summary"]


def split_validation(corpus: TokenizedCorpus, every: int = 50) -> tuple[TokenizedCorpus, TokenizedCorpus]:
    """Split by row id, before any shuffle, into training and validation rows.

    A row is validation when the number at the end of its id is divisible by `every` (ids without a number use a hash
    of the id), so that the split survives reordering, filtering and more data.

    Args:
        corpus: all rows.
        every: one row in this many is held out.

    Returns:
        Training rows and validation rows; no id is in both.
    """
    held_out = np.asarray([row_number(x) % every == 0 for x in corpus.ids], bool)
    return corpus.subset(np.flatnonzero(~held_out)), corpus.subset(np.flatnonzero(held_out))


def row_number(row_id: str) -> int:
    """Return the number at the end of a row id, or a stable hash of the id when it has none."""
    found = re.search(r"(\d+)\s*$", row_id)
    return int(found[1]) if found else int.from_bytes(hashlib.sha256(row_id.encode()).digest()[:8], "big")


def check_token_ids(tokens: np.ndarray, vocab_size: int, where: str) -> None:
    """Refuse ids that have no row in the embedding: on the device they would read another row, or NaN, unnoticed.

    Raises:
        ValueError: naming the offending id and the size of the vocabulary.
    """
    if not tokens.size or (tokens.min() >= 0 and tokens.max() < vocab_size):
        return
    bad = np.asarray(tokens)[(tokens < 0) | (tokens >= vocab_size)]
    raise ValueError(
        f"Token id {int(bad[0])} in {where} is outside the vocabulary of {vocab_size} ({bad.size} such ids): the "
        "tokenizer does not belong to this target."
    )
