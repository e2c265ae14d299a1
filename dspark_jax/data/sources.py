"""Conversation files: local copies of remote ones, and their lines (JSON lines, or ArrayRecord with JSON records)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import fsspec

from dspark_jax.files import CHUNK_BYTES, atomic_write, cache_dir
from dspark_jax.progress import Progress

ARRAY_RECORD = (".array_record", ".arrayrecord", ".arecord")
_RECORDS_AT_ONCE = 1024


def is_url(path: str | Path) -> bool:
    """Whether a file lies elsewhere, such as `gs://bucket/name`."""
    return "://" in str(path)


def local_file(path: str | Path) -> Path:
    """Return a local file as it is, and of a remote one a copy in `cache_dir()`, made on first use.

    The copy's name carries what the store says of the file (size, version, time): a changed file is copied anew.

    Args:
        path: a local path, or a URL of any store that fsspec has a driver for (`gs://` needs gcsfs).

    Raises:
        ModuleNotFoundError: the driver is not installed.
        FileNotFoundError: the store has no such file.
    """
    if not is_url(path):
        return Path(path)
    try:
        store, name = fsspec.core.url_to_fs(str(path))
    except ImportError as error:
        raise ModuleNotFoundError(f"{path} cannot be read: {error}") from None
    if not store.isfile(name):
        raise FileNotFoundError(f"{path} does not exist, or may not be read with these credentials")
    copy = cache_dir() / "remote" / str(store.ukey(name))[:16] / PurePosixPath(name).name
    if not copy.exists():
        size = int(store.size(name) or 0)
        with (
            store.open(name, "rb") as source,
            atomic_write(copy) as out,
            Progress(f"copying {path}", size // CHUNK_BYTES + 1, f"parts of {CHUNK_BYTES >> 20} MB") as progress,
        ):
            while part := source.read(CHUNK_BYTES):
                out.write(part)
                progress.update(1)
    return copy


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
