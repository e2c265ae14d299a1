"""Lines of conversation files: JSON lines, or ArrayRecord files with one JSON object a record."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

ARRAY_RECORD = (".array_record", ".arrayrecord", ".arecord")
_RECORDS_AT_ONCE = 1024


def file_lines(path: str | Path) -> Iterator[str]:
    """Yield the lines or records of a file in order.

    Undecodable bytes become lone surrogates: they stay inside their own line, which a reader can drop alone.

    Args:
        path: an ArrayRecord file by its ending, JSON lines otherwise.

    Raises:
        ModuleNotFoundError: an ArrayRecord file where its library is not installed.
        ValueError: a file with that ending that is no ArrayRecord.
    """
    if Path(path).suffix in ARRAY_RECORD:
        yield from _records(path)
        return
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        yield from file


def _records(path: str | Path) -> Iterator[str]:
    try:
        from array_record.python.array_record_module import ArrayRecordReader
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"{path} needs the library array_record, which {sys.platform} may not have: pip install array_record, or "
            "give JSON lines"
        ) from None
    reader = ArrayRecordReader(str(path))
    if not reader.ok():
        raise ValueError(f"{path} is no ArrayRecord file: write one with array_record, or give JSON lines")
    try:
        count = reader.num_records()
        for begin in range(0, count, _RECORDS_AT_ONCE):
            for record in reader.read(begin, min(begin + _RECORDS_AT_ONCE, count)):
                yield record.decode("utf-8", "surrogateescape")
    finally:
        reader.close()
