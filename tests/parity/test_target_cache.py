"""The reference's own target cache: read it, and write the same bytes."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np

from dspark_jax.data.target_cache import TargetCache, TargetCacheWriter

NAMES = {"taps": "target_hidden_states", "last_hidden": "target_last_hidden_states"}


def test_reader_returns_the_reference_values(goldens):
    cache = TargetCache(goldens / "target_cache" / "cache")
    expected = np.load(goldens / "target_cache" / "expected.npz")
    assert len(cache) == 5 and cache.sample_ids.tolist() == [0, 1, 2, 3, 4]
    for i, sample in enumerate(cache):
        np.testing.assert_array_equal(sample.input_ids, expected[f"s{i}/input_ids"])
        np.testing.assert_array_equal(sample.loss_mask, expected[f"s{i}/loss_mask"])
        for ours, theirs in NAMES.items():
            values = getattr(sample, ours)
            np.testing.assert_array_equal(values.astype(np.float32), expected[f"s{i}/{theirs}"])
            exact = expected[f"s{i}/{theirs}_f32_before_rounding"]
            np.testing.assert_array_equal(values, exact.astype(ml_dtypes.bfloat16))


def test_index_fields(goldens):
    cache = TargetCache(goldens / "target_cache" / "cache")
    meta = json.loads((goldens / "target_cache" / "meta.json").read_text())
    ours = {"taps": "target_hidden_states_offset", "last_hidden": "target_last_hidden_states_offset"}
    for record, expected in zip(cache.records, meta["index_records"], strict=True):
        for name in cache.records.dtype.names:
            key = ours.get(name, name if name in expected else f"{name}_offset")
            assert int(record[name]) == expected[key], name


def test_writer_writes_the_reference_bytes(goldens, tmp_path):
    folder = goldens / "target_cache"
    source, expected = TargetCache(folder / "cache"), np.load(folder / "expected.npz")
    largest = max(x.stat().st_size for x in (folder / "cache").glob("shard-*.bin"))
    own = {"version", "target_layer_ids", "hidden_size", "num_samples", "num_shards", "shards", "hidden_dtype"}
    own |= {"token_dtype", "mask_dtype", "index_record_size"}
    metadata = {k: v for k, v in source.manifest.items() if k not in own}
    with TargetCacheWriter(
        tmp_path / "cache",
        target_layer_ids=source.manifest["target_layer_ids"],
        hidden_size=source.hidden_size,
        shard_bytes=largest,
        metadata=metadata,
    ) as writer:
        for i, sample in enumerate(source):
            features = [expected[f"s{i}/{x}_f32_before_rounding"] for x in NAMES.values()]
            writer.append(i, sample.input_ids, sample.attention_mask, sample.loss_mask, *features)
    assert {x.name for x in (tmp_path / "cache").iterdir()} == {x.name for x in (folder / "cache").iterdir()}
    for file in (folder / "cache").iterdir():
        if file.name == "manifest.json":
            assert json.loads(file.read_text()) == json.loads((tmp_path / "cache" / file.name).read_text())
        else:
            assert file.read_bytes() == (tmp_path / "cache" / file.name).read_bytes(), file.name
