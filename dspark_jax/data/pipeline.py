"""Training batches: batch k is a pure function of (corpus, settings, seed, k).

A resumed run only needs to know k. There is no iterator state to save, and the number of processes, prefetch threads
or devices cannot change what batch k holds.
"""

from __future__ import annotations

from collections.abc import Iterator

import grain
import jax
import ml_dtypes
import numpy as np
from flax import struct
from jaxtyping import Bool, Float, Int

from dspark_jax.data.corpus import TokenizedCorpus, check_token_ids
from dspark_jax.data.packing import fill_rows, hash_order, one_document_per_row, pack_documents
from dspark_jax.data.target_cache import TargetCache
from dspark_jax.files import fingerprint

_ROW_ORDER = 2  # distinguishes the order of rows in an epoch from the packing order of the same seed
ENDLESS = 1 << 40
ALL_ROWS = slice(None)


@struct.dataclass
class Batch:
    """Rows of one training step; arrays live on the host until the step puts them on devices.

    Attributes:
        tokens: token ids, `[B, L]`; 0 at padding.
        loss_mask: True at supervised tokens, `[B, L]`.
        segments: document number within the row from 1, 0 at padding, `[B, L]`.
        positions: position within the document, `[B, L]`; 0 at padding.
        row_ids: number of each row in the packing index, `[B]`: what random draws of a row are named after.
        taps: cached tapped states `[B, L, F*D]` bfloat16, zero at padding; None where the target runs in the step or
            the drafter reads none.
        last_hidden: cached output of the final norm `[B, L, D]` bfloat16; None where the target runs in the step.
    """

    tokens: Int[np.ndarray, "B L"]
    loss_mask: Bool[np.ndarray, "B L"]
    segments: Int[np.ndarray, "B L"]
    positions: Int[np.ndarray, "B L"]
    row_ids: Int[np.ndarray, "B"]
    taps: Float[np.ndarray, "B L FD"] | None = None
    last_hidden: Float[np.ndarray, "B L D"] | None = None

    def rows(self, part: slice) -> Batch:
        """Return the batch of these rows."""
        return jax.tree.map(lambda x: x[part], self)


class BatchSource:
    """Endless training batches over a corpus, reshuffled every epoch.

    Rows are fixed by (corpus, sequence_length, seed); an epoch visits them in an order hashed from (seed, epoch). The
    rows left over at the end of an epoch (fewer than a batch) are skipped; the next order leaves out others.

    Attributes:
        corpus: the documents.
        batch_size: rows of a batch, B.
        sequence_length: tokens of a row, L.
        seed: names packing and orders.
        batches_per_epoch: batches until the order changes.
        num_rows: rows of an epoch.
        fingerprint: short hash of all that decides the batches; a checkpoint stores it and a resume compares it.
    """

    def __init__(
        self,
        corpus: TokenizedCorpus,
        batch_size: int,
        sequence_length: int,
        seed: int,
        packed: bool = True,
        *,
        vocab_size: int | None = None,
        features: TargetCache | None = None,
        with_taps: bool = True,
    ):
        """Lay out the rows.

        Args:
            corpus: training documents, none longer than `sequence_length`.
            batch_size: rows of a batch.
            sequence_length: tokens of a row.
            seed: names packing and orders.
            packed: several documents share a row; False pads every document to a row of its own.
            vocab_size: when given, ids outside are refused here instead of misread on the device.
            features: target cache whose sample ids are the corpus' `source_index`; batches then carry its states.
            with_taps: whether they carry the tapped states too, or the last hidden ones only.

        Raises:
            ValueError: for documents that do not fit, ids outside the vocabulary, a corpus smaller than a batch, or a
                cache that was made from other tokens.
        """
        if vocab_size is not None:
            check_token_ids(corpus.tokens, vocab_size, "the training corpus")
        self.corpus, self.batch_size, self.sequence_length, self.seed = corpus, batch_size, sequence_length, seed
        lengths = corpus.lengths.astype(np.int64)
        if packed:
            self._index = pack_documents(lengths, sequence_length, seed)
        else:
            self._index = one_document_per_row(lengths, sequence_length)
        self.num_rows = len(self._index)
        self.batches_per_epoch = self.num_rows // batch_size
        if self.batches_per_epoch == 0:
            raise ValueError(
                f"The corpus fills {self.num_rows} rows of {sequence_length} tokens, a batch takes {batch_size}: "
                "use a smaller batch, or more data."
            )
        self._features, self._with_taps = features, with_taps
        if features is not None:
            missing = [int(x) for x in corpus.source_index if x not in features]
            if missing:
                raise ValueError(
                    f"{len(missing)} of {len(corpus)} documents are not in the target cache {features.path} "
                    f"(first: sample {missing[0]}): build it from the same conversations."
                )
        self.fingerprint = fingerprint([corpus.fingerprint, self._index.fingerprint, batch_size, seed])
        self._order: tuple[int, np.ndarray] = (-1, np.zeros(0, np.int64))

    def batch(self, k: int | np.integer, places: slice | Int[np.ndarray, "n"] = ALL_ROWS) -> Batch:
        """Return batch `k` (from 0), or some of its rows.

        Args:
            k: number of the batch.
            places: rows of the batch: those that this process feeds to its devices.

        Raises:
            ValueError: for a negative k, or cached states that belong to other tokens.
        """
        rows = self._batch_rows(k)[places]
        documents = [self._index.row(row).tolist() for row in rows]
        tokens, loss_mask, segments, positions = fill_rows(
            [[self.corpus.row(x) for x in row] for row in documents], self.sequence_length
        )
        taps = last_hidden = None
        if self._features is not None:
            taps, last_hidden = self._fill_features(self._features, documents)
        return Batch(
            tokens=tokens,
            loss_mask=loss_mask,
            segments=segments,
            positions=positions,
            row_ids=rows.astype(np.int32),
            taps=taps,
            last_hidden=last_hidden,
        )

    def num_tokens(self, k: int | np.integer) -> int:
        """Tokens of batch `k`, all rows, padding left out."""
        return sum(int(self.corpus.lengths[self._index.row(row)].sum()) for row in self._batch_rows(k))

    def prefetch(
        self,
        start_k: int,
        places: slice | Int[np.ndarray, "n"] = ALL_ROWS,
        *,
        num_threads: int = 2,
        buffer_size: int = 4,
    ) -> Iterator[tuple[int, Batch]]:
        """Yield (k, batch k) from `start_k` on, prepared ahead in threads.

        Args:
            start_k: first batch.
            places: rows of every batch, as in `batch`.
            num_threads: threads that prepare batches.
            buffer_size: batches prepared ahead.
        """
        options = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=buffer_size)
        numbers = grain.MapDataset.range(start_k, start_k + ENDLESS)
        return iter(numbers.map(lambda k: (int(k), self.batch(k, places))).to_iter_dataset(options))

    def epoch_documents(self, epoch: int) -> Int[np.ndarray, "n"]:
        """Return the documents that the batches of `epoch` hold, in order."""
        rows = self._epoch_order(epoch)[: self.batches_per_epoch * self.batch_size]
        return np.concatenate([self._index.row(x) for x in rows])

    def _batch_rows(self, k: int | np.integer) -> Int[np.ndarray, "B"]:
        """Numbers in the packing index of the rows of batch `k`."""
        if k < 0:
            raise ValueError(f"Batch {k} does not exist: batches are numbered from 0.")
        epoch, place = divmod(int(k), self.batches_per_epoch)
        return self._epoch_order(epoch)[place * self.batch_size : (place + 1) * self.batch_size]

    def _epoch_order(self, epoch: int) -> Int[np.ndarray, "rows"]:
        known, order = self._order
        if known != epoch:
            order = hash_order(self.num_rows, self.seed, _ROW_ORDER, epoch)
            self._order = (epoch, order)  # one assignment: prefetch threads see the old pair or the new one
        return order

    def _fill_features(
        self, features: TargetCache, documents: list[list[int]]
    ) -> tuple[Float[np.ndarray, "B L FD"] | None, Float[np.ndarray, "B L D"]]:
        shape = (len(documents), self.sequence_length)
        taps = np.zeros((*shape, features.features), ml_dtypes.bfloat16) if self._with_taps else None
        last_hidden = np.zeros((*shape, features.hidden_size), ml_dtypes.bfloat16)
        for row, parts in enumerate(documents):
            start = 0
            for document in parts:
                sample = features.by_id(self.corpus.source_index[document])
                if not np.array_equal(sample.input_ids, self.corpus.row(document)[0]):
                    raise ValueError(
                        f"Sample {sample.sample_id} of {features.path} was made from other tokens than document "
                        f"{self.corpus.ids[document]}: rebuild the cache from this corpus."
                    )
                stop = start + len(sample.input_ids)
                last_hidden[row, start:stop] = sample.last_hidden
                if taps is not None:
                    taps[row, start:stop] = sample.taps
                start = stop
        return taps, last_hidden
