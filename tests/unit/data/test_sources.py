"""The same conversations from JSON lines and from ArrayRecord."""

from __future__ import annotations

import json

import pytest

from dspark_jax.data.conversations import IngestSummary, read_conversations
from dspark_jax.data.sources import file_lines

array_record = pytest.importorskip("array_record.python.array_record_module")
ROWS = [{"id": f"row-{i}", "prompt": f"say {i}", "response": "yes" * i, "finish": "stop"} for i in range(5)]


def write_records(path, records):
    writer = array_record.ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()
    return path


def conversations(path):
    summary = IngestSummary()
    return [(x.id, x.messages, x.source_index) for x in read_conversations([path], summary)], summary


def test_records_and_lines_are_the_same_rows(tmp_path):
    encoded = [json.dumps(x).encode() for x in ROWS] + [b"{broken", b"\xff\xfe"]
    lines = tmp_path / "rows.jsonl"
    lines.write_bytes(b"\n".join(encoded) + b"\n")
    (ours, counted), (theirs, expected) = (
        conversations(path) for path in (write_records(tmp_path / "rows.array_record", encoded), lines)
    )
    assert ours == theirs and len(ours) == 4  # an empty answer teaches nothing
    assert counted.rows == expected.rows == 7 and counted.dropped == expected.dropped


def test_more_records_than_are_read_at_once(tmp_path):
    path = write_records(tmp_path / "many.arecord", [str(i).encode() for i in range(2500)])
    assert list(file_lines(path)) == [str(i) for i in range(2500)]


def test_another_file_with_the_ending_is_refused(tmp_path):
    path = tmp_path / "wrong.array_record"
    path.write_text("no records")
    with pytest.raises(ValueError, match=r"wrong\.array_record is no ArrayRecord file"):
        list(file_lines(path))
