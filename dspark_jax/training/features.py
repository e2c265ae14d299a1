"""Run the frozen target once over a corpus and keep its features on disk, for trainings of many epochs or drafters."""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.data.conversations import TokenizedCorpus
from dspark_jax.data.target_cache import TargetCacheWriter
from dspark_jax.progress import Progress
from dspark_jax.target.loading import Target
from dspark_jax.target.transformer import check_tap_ids, forward_rows


def write_feature_cache(
    target: Target,
    corpus: TokenizedCorpus,
    path: Path,
    tap_ids: tuple[int, ...],
    *,
    tokens_per_batch: int = 2048,
    bucket: int = 64,
) -> None:
    """Write tapped states and last hidden states of every row, without padding waste.

    Rows are run in order of length, so that a batch pads to a multiple of `bucket` only. A killed job resumes with the
    rows that are not on disk yet.

    Args:
        target: the frozen target; its dtype is the type of the forward pass.
        corpus: tokenized conversations; `source_index` becomes the sample id.
        path: folder of the cache (format v2).
        tap_ids: tapped layers.
        tokens_per_batch: rows are grouped until they fill this many tokens.
        bucket: batch lengths are multiples of this.
    """
    check_tap_ids(target.config, tap_ids)
    forward = jax.jit(functools.partial(forward_rows, target.config, tap_ids=tap_ids, dtype=target.dtype))
    order = np.argsort(corpus.lengths, kind="stable")
    metadata = {"target": target.name, "compute_dtype": jnp.dtype(target.dtype).name, "corpus": corpus.fingerprint}
    width = target.config.hidden_size
    with TargetCacheWriter(path, target_layer_ids=tap_ids, hidden_size=width, metadata=metadata) as writer:
        todo = order[writer.num_samples :]
        with Progress("target features", total=int(corpus.lengths[todo].sum()), unit="tok") as progress:
            while len(todo):
                length = _round_up(int(corpus.lengths[todo[0]]), bucket)
                rows = max(1, tokens_per_batch // length)
                chunk = todo[:rows]
                chunk = chunk[corpus.lengths[chunk] <= length]
                todo = todo[len(chunk) :]
                tokens = np.zeros((rows, length), np.int32)
                segments = np.zeros((rows, length), np.int32)
                for i, row in enumerate(chunk):
                    ids, _ = corpus.row(int(row))
                    tokens[i, : len(ids)], segments[i, : len(ids)] = ids, 1
                positions = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
                features = forward(target.params, target.tables, tokens, segments, positions)
                taps = np.asarray(features.taps.astype(jnp.bfloat16))
                hidden = np.asarray(features.last_hidden.astype(jnp.bfloat16))
                for i, row in enumerate(chunk):
                    ids, mask = corpus.row(int(row))
                    n = len(ids)
                    writer.append(int(corpus.source_index[row]), ids, None, mask, taps[i, :n], hidden[i, :n])
                progress.update(int(corpus.lengths[chunk].sum()))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
