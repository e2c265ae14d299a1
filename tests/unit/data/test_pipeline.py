"""Batches as pure functions of k: epochs, resume, held-out rows, prefetching, cached features."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from dspark_jax.data.corpus import TokenizedCorpus, TokenizedRow, split_validation
from dspark_jax.data.pipeline import BatchSource
from dspark_jax.data.target_cache import TargetCache, TargetCacheWriter

VOCAB = 101


def corpus_of(count, seed=0):
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        length = int(rng.integers(3, 14))
        mask = (np.arange(length) >= length // 2).astype(np.uint8)
        rows.append(TokenizedRow(f"d-{i:05d}", "toy", i, rng.integers(0, VOCAB, length).astype(np.int32), mask))
    return TokenizedCorpus.from_rows(rows)


def equal(one, other):
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


@pytest.mark.parametrize("packed", [True, False])
def test_batch_is_a_pure_function_of_k(packed):
    corpus = corpus_of(60)
    source = BatchSource(corpus, 3, 16, 5, packed)
    forwards = [source.batch(k) for k in range(2 * source.batches_per_epoch + 1)]
    fresh = BatchSource(corpus, 3, 16, 5, packed)
    for k in reversed(range(len(forwards))):
        assert equal(fresh.batch(k), forwards[k])
    assert fresh.fingerprint == source.fingerprint
    others = [
        BatchSource(corpus, 3, 16, 6, packed),
        BatchSource(corpus, 4, 16, 5, packed),
        BatchSource(corpus, 3, 17, 5, packed),
        BatchSource(corpus, 3, 16, 5, not packed),
        BatchSource(corpus_of(60, seed=1), 3, 16, 5, packed),
    ]
    assert len({x.fingerprint for x in [source, *others]}) == 6
    assert not equal(source.batch(0).tokens, source.batch(source.batches_per_epoch).tokens)
    with pytest.raises(ValueError, match="Batch -1"):
        source.batch(-1)


def test_batches_hold_the_documents():
    corpus = corpus_of(60)
    source = BatchSource(corpus, 3, 16, 5)
    for epoch in range(3):
        seen = []
        for k in range(epoch * source.batches_per_epoch, (epoch + 1) * source.batches_per_epoch):
            batch = source.batch(k)
            assert batch.tokens.shape == batch.segments.shape == (3, 16) and batch.row_ids.shape == (3,)
            assert not batch.loss_mask[batch.segments == 0].any()
            assert source.num_tokens(k) == (batch.segments > 0).sum()
            for row in range(3):
                for segment in range(1, batch.segments[row].max() + 1):
                    where = batch.segments[row] == segment
                    seen.append((tuple(batch.tokens[row, where]), tuple(batch.loss_mask[row, where])))
                    assert batch.positions[row, where].tolist() == list(range(where.sum()))
        documents = source.epoch_documents(epoch)
        assert len(set(documents.tolist())) == len(documents)
        expected = [(tuple(t), tuple(m.astype(bool))) for t, m in map(corpus.row, documents)]
        assert seen == expected
    left_out = [set(range(60)) - set(source.epoch_documents(e).tolist()) for e in range(6)]
    assert not set.intersection(*left_out)


def test_br39_no_validation_row_enters_training_in_any_epoch():
    corpus = corpus_of(200)
    train, validation = split_validation(corpus, every=10)
    source = BatchSource(train, 4, 16, 42)
    seen = [train.ids[i] for epoch in range(20) for i in source.epoch_documents(epoch)]
    assert not set(seen) & set(validation.ids) and set(seen) == set(train.ids)
    assert max(seen.count(x) for x in set(seen)) <= 20


def test_br19_ids_outside_the_vocabulary_do_not_reach_the_model():
    corpus = corpus_of(20)
    for bad in (-1, 10):
        corpus.tokens[:] = 9
        BatchSource(corpus, 2, 16, 0, vocab_size=10)
        corpus.tokens[3] = bad
        with pytest.raises(ValueError, match=rf"Token id {bad} .* vocabulary of 10"):
            BatchSource(corpus, 2, 16, 0, vocab_size=10)


def test_prefetch_resumes_anywhere():
    source = BatchSource(corpus_of(60), 3, 16, 5)
    start = source.batches_per_epoch - 1
    got = list(itertools.islice(source.prefetch(start), 4))
    assert [k for k, _ in got] == list(range(start, start + 4))
    assert all(equal(batch, source.batch(k)) for k, batch in got)


def test_rows_of_processes_make_up_the_batch():
    source = BatchSource(corpus_of(60), 4, 16, 5)
    batch = source.batch(2)
    assert equal(source.batch(2, np.asarray([1, 3])), batch.rows(np.s_[1::2]))
    assert equal(source.batch(2, slice(0, 2)), batch.rows(slice(0, 2)))
    (k, ahead), *_ = itertools.islice(source.prefetch(2, np.asarray([3])), 1)
    assert k == 2 and equal(ahead, batch.rows(slice(3, 4)))


def test_small_corpus_is_refused():
    with pytest.raises(ValueError, match=r"fills 2 rows of 16 tokens, a batch takes 3"):
        BatchSource(corpus_of(2), 3, 16, 0, packed=False)


def test_cached_features_follow_their_documents(tmp_path):
    corpus = corpus_of(40)
    train, _ = split_validation(corpus, every=10)
    with TargetCacheWriter(tmp_path / "cache", target_layer_ids=[0, 2], hidden_size=3) as writer:
        for i in range(len(corpus)):
            tokens, mask = corpus.row(i)
            feature = np.stack([tokens, np.full(len(tokens), i), np.arange(len(tokens))], -1).astype(np.float32)
            writer.append(
                int(corpus.source_index[i]), tokens, None, mask, np.concatenate([feature, -feature], -1), feature
            )
    cache = TargetCache(tmp_path / "cache")
    source = BatchSource(train, 3, 16, 5, features=cache)
    assert source.fingerprint == BatchSource(train, 3, 16, 5).fingerprint
    batch = source.batch(1)
    assert batch.taps.shape == (3, 16, 6) and batch.last_hidden.shape == (3, 16, 3)
    hidden, real = batch.last_hidden.astype(np.float32), batch.segments > 0
    assert np.array_equal(hidden[..., 0][real], batch.tokens[real])
    assert np.array_equal(hidden[..., 2][real], batch.positions[real])
    assert not hidden[~real].any() and np.array_equal(batch.taps[..., 3:].astype(np.float32), -hidden)
    assert equal(source.batch(1, np.asarray([2])), batch.rows(slice(2, 3)))

    changed = dataclasses.replace(corpus, tokens=(corpus.tokens + 1) % VOCAB)
    with pytest.raises(ValueError, match="made from other tokens"):
        BatchSource(changed, 3, 16, 5, features=cache).batch(0)
    with pytest.raises(ValueError, match=r"10 of 50 documents are not in the target cache"):
        BatchSource(corpus_of(50), 3, 16, 5, features=cache)


def test_supervised_tokens_are_counted_over_all_blocks(monkeypatch):
    monkeypatch.setattr("dspark_jax.data.corpus._BLOCK_ROWS", 1)
    rows = [([4, 4, 2, 3], [1, 1, 1, 0]), ([9, 7, 9, 11], [1, 1, 1, 0]), ([4, 1], [1, 0])]
    corpus = TokenizedCorpus.from_rows(
        [TokenizedRow(str(i), "", i, np.int32(tokens), np.uint8(mask)) for i, (tokens, mask) in enumerate(rows)]
    )
    assert corpus.supervised_counts().tolist() == [0, 0, 1, 0, 3, 0, 0, 1, 0, 2]
