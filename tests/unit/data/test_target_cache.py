"""Target cache: round trip, shards, and a writer that is killed at any byte and continues."""

from __future__ import annotations

import shutil

import ml_dtypes
import numpy as np
import pytest

from dspark_jax.data.target_cache import INDEX_DTYPE, TargetCache, TargetCacheWriter, size_estimate

SETTINGS = {"target_layer_ids": [1, 3], "hidden_size": 3, "shard_bytes": 400, "metadata": {"chat_template": "toy"}}


def samples(count):
    rng = np.random.default_rng(3)
    out = []
    for i in range(count):
        length = int(rng.integers(1, 9))
        ids, mask = rng.integers(0, 99, length), rng.integers(0, 2, length)
        out.append((10 + i, ids, None, mask, rng.normal(size=(length, 6)), rng.normal(size=(length, 3))))
    return out


def write(path, rows):
    with TargetCacheWriter(path, **SETTINGS) as writer:
        for row in rows:
            writer.append(*row)


def contents(path):
    return {x.name: x.read_bytes() for x in path.iterdir()}


def test_round_trip(tmp_path):
    rows = samples(20)
    write(tmp_path / "c", rows)
    cache = TargetCache(tmp_path / "c")
    assert len(cache) == 20 and INDEX_DTYPE.itemsize == 56
    assert cache.manifest["chat_template"] == "toy" and cache.manifest["num_shards"] > 3
    for sample, (sample_id, ids, _, mask, taps, last_hidden) in zip(cache, rows, strict=True):
        assert sample.sample_id == sample_id and sample_id in cache
        assert sample.input_ids.tolist() == ids.tolist() and sample.loss_mask.tolist() == mask.tolist()
        assert sample.attention_mask.tolist() == [1] * len(ids)
        assert np.array_equal(sample.taps, taps.astype(ml_dtypes.bfloat16))
        assert np.array_equal(sample.last_hidden, last_hidden.astype(ml_dtypes.bfloat16))
        assert not sample.taps.flags.writeable
    assert cache.by_id(15).sample_id == 15 and 9 not in cache
    with pytest.raises(KeyError, match="Sample 9"):
        cache.by_id(9)
    shards = list((tmp_path / "c").glob("shard-*.bin"))
    assert all(x.stat().st_size <= 400 for x in shards)
    tokens = sum(len(x[1]) for x in rows)
    size = sum(x.stat().st_size for x in shards) + (tmp_path / "c" / "samples.idx").stat().st_size
    assert size == size_estimate(tokens, 6, 3, 20)


@pytest.mark.parametrize("killed_after", [0, 1, 7, 12])
@pytest.mark.parametrize("damage", ["none", "torn record", "torn sample", "lost bytes"])
def test_killed_writer_continues(tmp_path, killed_after, damage):
    rows = samples(12)
    write(tmp_path / "whole", rows)
    path = tmp_path / "killed"
    with pytest.raises(KeyboardInterrupt), TargetCacheWriter(path, **SETTINGS) as writer:
        for row in rows[:killed_after]:
            writer.append(*row)
        raise KeyboardInterrupt
    with pytest.raises(FileNotFoundError, match="never finished"):
        TargetCache(path)
    shard = sorted(path.glob("shard-*.bin"))[-1]
    standing = killed_after
    if damage == "torn record":
        with open(path / "samples.idx.partial", "ab") as file:
            file.write(b"\x07" * 31)
    elif damage == "torn sample":
        with open(shard, "ab") as file:
            file.write(b"\x07" * 31)
        (path / "shard-00099.bin").write_bytes(b"\x07")
    elif damage == "lost bytes" and killed_after:
        with open(shard, "r+b") as file:
            file.truncate(shard.stat().st_size - 1)
        standing -= 1
    with TargetCacheWriter(path, **SETTINGS) as writer:
        assert writer.num_samples == standing and writer.sample_ids == [x[0] for x in rows[:standing]]
        for row in rows[writer.num_samples :]:
            writer.append(*row)
    assert contents(path) == contents(tmp_path / "whole")


def test_writer_refuses_what_would_mix(tmp_path):
    rows = samples(3)
    writer = TargetCacheWriter(tmp_path / "c", **SETTINGS)
    writer.append(*rows[0])
    with pytest.raises(ValueError, match="Sample 10 is there already"):
        writer.append(*rows[0])
    with pytest.raises(ValueError, match=r"Sample 7 .* \(2, 5\).*expected"):
        writer.append(7, np.zeros(2), None, np.zeros(2), np.zeros((2, 5)), np.zeros((2, 3)))
    writer.close()
    with pytest.raises(ValueError, match=r"other settings for \['target_layer_ids'\]"):
        TargetCacheWriter(tmp_path / "c", **{**SETTINGS, "target_layer_ids": [1, 2]})
    TargetCacheWriter(tmp_path / "c", **SETTINGS).finish()
    assert len(TargetCache(tmp_path / "c")) == 1
    with pytest.raises(FileExistsError, match="finished target cache"):
        TargetCacheWriter(tmp_path / "c", **SETTINGS)


def test_reader_refuses_damaged_copies(tmp_path):
    write(tmp_path / "c", samples(6))

    def copy(name):
        return shutil.copytree(tmp_path / "c", tmp_path / name)

    index = copy("index") / "samples.idx"
    index.write_bytes(index.read_bytes()[:-56])
    with pytest.raises(ValueError, match="5 records, the manifest says 6"):
        TargetCache(index.parent)
    shard = copy("shard") / "shard-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"Shard 0 .* bytes, the index needs"):
        TargetCache(shard.parent)
    missing = copy("missing") / "shard-00001.bin"
    missing.unlink()
    with pytest.raises(ValueError, match=r"Shard 1 .* has 0 bytes"):
        TargetCache(missing.parent)
    manifest = copy("version") / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"version": 2', '"version": 1'))
    with pytest.raises(ValueError, match="has version 1, expected 2"):
        TargetCache(manifest.parent)


def test_cache_without_samples(tmp_path):
    TargetCacheWriter(tmp_path / "c", **SETTINGS).finish()
    assert len(TargetCache(tmp_path / "c")) == 0
