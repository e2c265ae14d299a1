"""Run the frozen target once over a corpus and keep its features on disk, for trainings of many epochs or drafters."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.data.corpus import TokenizedCorpus
from dspark_jax.data.packing import hash_order
from dspark_jax.data.target_cache import BFLOAT16, TargetCacheWriter
from dspark_jax.progress import Progress
from dspark_jax.target.loading import Target
from dspark_jax.target.transformer import check_tap_ids, forward_rows

T = TypeVar("T")


def write_feature_cache(
    target: Target,
    corpus: TokenizedCorpus,
    path: Path,
    tap_ids: tuple[int, ...],
    *,
    tokens_per_batch: int = 2048,
    bucket: int = 64,
    max_minutes: float | None = None,
) -> None:
    """Write tapped states and last hidden states of every row, without padding waste.

    Rows of similar length share a batch, which pads to a multiple of `bucket` only; the batches run in hashed order, so
    that a cache cut short by `max_minutes` is a fair sample. A killed job resumes with the rows that are still missing.

    Args:
        target: the frozen target; its dtype is the type of the forward pass.
        corpus: tokenized conversations; `source_index` becomes the sample id.
        path: folder of the cache (format v2).
        tap_ids: tapped layers.
        tokens_per_batch: rows are grouped until they fill this many tokens.
        bucket: batch lengths are multiples of this.
        max_minutes: finish the cache with the rows written by then; None writes them all.
    """
    check_tap_ids(target.config, tap_ids)
    forward = jax.jit(functools.partial(forward_rows, target.config, tap_ids=tap_ids, dtype=target.dtype))

    def run(chunk: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        tokens = np.zeros((max(1, tokens_per_batch // length), length), np.int32)
        segments = np.zeros_like(tokens)
        for i, row in enumerate(chunk):
            ids, _ = corpus.row(int(row))
            tokens[i, : len(ids)], segments[i, : len(ids)] = ids, 1
        positions = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
        features = forward(target.params, target.tables, tokens, segments, positions)
        taps, hidden = (np.asarray(x).astype(BFLOAT16) for x in (features.taps, features.last_hidden))
        return chunk, taps, hidden

    metadata = {"target": target.name, "compute_dtype": jnp.dtype(target.dtype).name, "corpus": corpus.fingerprint}
    width = target.config.hidden_size
    deadline = None if max_minutes is None else time.monotonic() + 60 * max_minutes
    with TargetCacheWriter(path, target_layer_ids=tap_ids, hidden_size=width, metadata=metadata) as writer:
        missing = np.flatnonzero(~np.isin(corpus.source_index, writer.sample_ids))
        todo = missing[np.argsort(corpus.lengths[missing], kind="stable")]
        chunks = list(_length_chunks(todo, corpus.lengths, tokens_per_batch, bucket))
        chunks = [chunks[i] for i in hash_order(len(chunks), 0)]
        with (
            Progress("target features", total=int(corpus.lengths[todo].sum()), unit="tok") as progress,
            # Two forwards in flight: much of one is single-threaded on CPUs, and on accelerators one hides the writing.
            ThreadPoolExecutor(2) as pool,
        ):
            for chunk, taps, hidden in _ordered(pool, run, chunks, in_flight=3):
                for i, row in enumerate(chunk):
                    ids, mask = corpus.row(int(row))
                    n = len(ids)
                    writer.append(int(corpus.source_index[row]), ids, None, mask, taps[i, :n], hidden[i, :n])
                progress.update(int(corpus.lengths[chunk].sum()))
                if deadline is not None and time.monotonic() > deadline:
                    break


def _length_chunks(
    order: np.ndarray, lengths: np.ndarray, tokens_per_batch: int, bucket: int
) -> Iterator[tuple[np.ndarray, int]]:
    """Cut rows in order of length into batches of one padded length each."""
    while len(order):
        length = -(-int(lengths[order[0]]) // bucket) * bucket
        chunk = order[: max(1, tokens_per_batch // length)]
        chunk = chunk[lengths[chunk] <= length]
        order = order[len(chunk) :]
        yield chunk, length


def _ordered(pool: Executor, run: Callable[..., T], items: Iterable[tuple], in_flight: int) -> Iterator[T]:
    """Results in the order of the items, with a bounded number of calls under way."""
    pending: deque[Future[T]] = deque()
    for item in items:
        pending.append(pool.submit(run, *item))
        if len(pending) >= in_flight:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()
