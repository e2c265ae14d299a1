"""Files of a store elsewhere: copied once, again when they change, and named where they cannot be had."""

from __future__ import annotations

import fsspec
import pytest

from dspark_jax.data.conversations import IngestSummary, read_conversations
from dspark_jax.data.sources import is_url, local_file

ROW = b'{"id": "row-1", "prompt": "a", "response": "b", "finish": "stop"}\n'


@pytest.fixture
def store(monkeypatch, tmp_path):
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "cache"))
    store = fsspec.filesystem("memory")
    store.pipe("/bucket/rows.jsonl", ROW)
    yield store
    store.rm("/bucket", recursive=True)


def test_a_remote_file_is_copied_once_and_again_when_it_changes(store, monkeypatch):
    first = local_file("memory://bucket/rows.jsonl")
    assert first.name == "rows.jsonl" and first.read_bytes() == ROW
    assert [x.id for x in read_conversations([first], IngestSummary())] == ["row-1"]
    with monkeypatch.context() as patch:
        patch.setattr(type(store), "open", None)
        assert local_file("memory://bucket/rows.jsonl") == first
    store.pipe("/bucket/rows.jsonl", 2 * ROW)
    second = local_file("memory://bucket/rows.jsonl")
    assert second != first and second.read_bytes() == 2 * ROW and first.exists()


def test_a_local_file_is_itself(tmp_path):
    assert local_file(tmp_path / "a") == tmp_path / "a" == local_file(str(tmp_path / "a"))
    assert not is_url(tmp_path / "gs" / "a") and is_url("gs://bucket/a")


def test_what_cannot_be_had_is_named(store):
    with pytest.raises(FileNotFoundError, match="memory://bucket/other does not exist"):
        local_file("memory://bucket/other")
    with pytest.raises(ValueError, match="nowhere"):
        local_file("nowhere://bucket/rows.jsonl")


def test_a_store_without_its_driver_is_named(store, monkeypatch):
    def missing(name):
        raise ImportError("Please install gcsfs to access Google Storage")

    monkeypatch.setattr(fsspec.core, "get_filesystem_class", missing)
    with pytest.raises(ModuleNotFoundError, match=r"gs://bucket/rows\.jsonl cannot be read: Please install gcsfs"):
        local_file("gs://bucket/rows.jsonl")
