"""Target cache, version 2: tapped states and last hidden states of a corpus on disk, written once and memory-mapped.

Layout of the folder:
    manifest.json     settings, number of samples, list of shards; written last, so its presence means "complete"
    samples.idx       one 56-byte little-endian record a sample: sample_id u64, shard_id u32, seq_len u32, then five
                      u64 byte offsets into the shard: input_ids i32, attention_mask u8, loss_mask u8,
                      tapped states bf16 [L, F*D], last hidden bf16 [L, D]
    shard-00000.bin   the arrays, sample after sample without padding

While a cache is being written, its records go to `samples.idx.partial` after the sample's bytes are on disk. A killed
writer continues after the last sample whose record and bytes are both complete.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Float, Int, UInt8

from dspark_jax.files import atomic_write

VERSION = 2
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
MANIFEST, INDEX, PARTIAL_INDEX, PARTIAL_SETTINGS = (
    "manifest.json",
    "samples.idx",
    "samples.idx.partial",
    "settings.partial.json",
)
DEFAULT_SHARD_BYTES = 1 << 30
INDEX_DTYPE = np.dtype(
    [
        ("sample_id", "<u8"),
        ("shard_id", "<u4"),
        ("seq_len", "<u4"),
        ("input_ids", "<u8"),
        ("attention_mask", "<u8"),
        ("loss_mask", "<u8"),
        ("taps", "<u8"),
        ("last_hidden", "<u8"),
    ]
)
_FIXED = {"hidden_dtype": "bfloat16", "token_dtype": "int32", "mask_dtype": "uint8", "index_record_size": 56}


@dataclass(frozen=True)
class CachedSample:
    """Arrays of one sample; those of a reader are read-only views into the shard.

    Attributes:
        sample_id: the number it was stored under.
        input_ids: `[L]` int32.
        attention_mask: `[L]`, 1 at real tokens.
        loss_mask: `[L]`, 1 at supervised tokens.
        taps: tapped states `[L, F*D]` bfloat16.
        last_hidden: output of the final norm `[L, D]` bfloat16.
    """

    sample_id: int
    input_ids: Int[np.ndarray, "L"]
    attention_mask: UInt8[np.ndarray, "L"]
    loss_mask: UInt8[np.ndarray, "L"]
    taps: Float[np.ndarray, "L FD"]
    last_hidden: Float[np.ndarray, "L D"]


def size_estimate(num_tokens: int, features: int, hidden_size: int, num_samples: int = 0) -> int:
    """Return the bytes a cache takes: 6 a token for ids and masks, 2 for every feature, 56 a sample.

    Args:
        num_tokens: tokens of all samples.
        features: width F*D of the tapped states.
        hidden_size: width D of the last hidden state.
        num_samples: number of samples.
    """
    return num_tokens * (6 + 2 * (features + hidden_size)) + num_samples * INDEX_DTYPE.itemsize


class TargetCacheWriter:
    """Write a target cache sample by sample; open it again with the same settings to continue a killed run.

    Example:
        with TargetCacheWriter(folder, target_layer_ids=[0, 2, 4], hidden_size=64) as writer:
            for row in range(writer.num_samples, len(corpus)):   # samples that are already there are skipped
                writer.append(row, ids, None, mask, taps, last_hidden)

    The folder becomes a cache (with a manifest) when the block ends without an error.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        target_layer_ids: Sequence[int],
        hidden_size: int,
        shard_bytes: int = DEFAULT_SHARD_BYTES,
        metadata: Mapping[str, Any] | None = None,
    ):
        """Open a new or unfinished cache.

        Args:
            path: folder of the cache.
            target_layer_ids: tapped layers; the tapped states are `len(target_layer_ids) * hidden_size` wide.
            hidden_size: D.
            shard_bytes: a shard is closed before it would grow beyond this.
            metadata: further entries of the manifest, such as the target's name, the chat template, `max_length`.

        Raises:
            FileExistsError: when the folder holds a finished cache.
            ValueError: when an unfinished cache there has other settings.
        """
        self.path = Path(path)
        self.hidden_size, self.features = hidden_size, len(target_layer_ids) * hidden_size
        self.shard_bytes = shard_bytes
        self._settings = {
            **dict(metadata or {}),
            **_FIXED,
            "version": VERSION,
            "target_layer_ids": [int(x) for x in target_layer_ids],
            "hidden_size": hidden_size,
        }
        if (self.path / MANIFEST).exists():
            raise FileExistsError(f"{self.path} holds a finished target cache: read it, or choose another folder.")
        self.path.mkdir(parents=True, exist_ok=True)
        self._check_settings()
        records = self._recover()
        self.sample_ids = [int(x) for x in records["sample_id"]]
        self._known = set(self.sample_ids)
        self._shard_id = int(records["shard_id"][-1]) if len(records) else 0
        self._shard = open(self._shard_path(self._shard_id), "ab")  # noqa: SIM115 (stays open across calls)
        self._index = open(self.path / PARTIAL_INDEX, "ab")  # noqa: SIM115

    @property
    def num_samples(self) -> int:
        """Samples written so far, those of earlier runs included."""
        return len(self.sample_ids)

    def append(
        self,
        sample_id: int | np.integer,
        input_ids: np.ndarray,
        attention_mask: np.ndarray | None,
        loss_mask: np.ndarray,
        taps: np.ndarray,
        last_hidden: np.ndarray,
    ) -> None:
        """Write one sample.

        Args:
            sample_id: number to find it by; unique.
            input_ids: `[L]` token ids.
            attention_mask: `[L]`, or None when every token is real.
            loss_mask: `[L]`.
            taps: `[L, F*D]`, rounded to bfloat16 here.
            last_hidden: `[L, D]`, rounded to bfloat16 here.

        Raises:
            ValueError: for a second sample of the same id or arrays of other shapes.
        """
        length = len(input_ids)
        attention_mask = np.ones(length, np.uint8) if attention_mask is None else attention_mask
        arrays = (
            np.ascontiguousarray(input_ids, "<i4"),
            np.ascontiguousarray(attention_mask, np.uint8),
            np.ascontiguousarray(loss_mask, np.uint8),
            np.ascontiguousarray(taps, BFLOAT16),
            np.ascontiguousarray(last_hidden, BFLOAT16),
        )
        expected = ((length,), (length,), (length,), (length, self.features), (length, self.hidden_size))
        if sample_id in self._known or tuple(x.shape for x in arrays) != expected:
            raise ValueError(
                f"Sample {sample_id} is there already or has shapes {[x.shape for x in arrays]}, expected a new "
                f"sample of shapes {list(expected)} (ids, attention mask, loss mask, taps, last hidden)."
            )
        start = self._shard.tell()
        if start and start + sum(x.nbytes for x in arrays) > self.shard_bytes:
            self._next_shard()
            start = 0
        record = np.zeros((), INDEX_DTYPE)
        record["sample_id"], record["shard_id"], record["seq_len"] = sample_id, self._shard_id, length
        for name, array in zip(INDEX_DTYPE.names[3:], arrays, strict=True):  # type: ignore[index]
            record[name] = start
            self._shard.write(array.tobytes())
            start += array.nbytes
        # The record follows its bytes, so a record that can be read vouches for a sample that can be read.
        self._shard.flush()
        self._index.write(record.tobytes())
        self._index.flush()
        self.sample_ids.append(int(sample_id))
        self._known.add(int(sample_id))

    def finish(self) -> None:
        """Sync everything and write index and manifest: from here on the folder is a cache."""
        self.close()
        records = np.fromfile(self.path / PARTIAL_INDEX, INDEX_DTYPE)
        with atomic_write(self.path / INDEX) as file:
            file.write(records.tobytes())
        shards = [{"shard_id": i, "file_name": self._shard_path(i).name} for i in range(self._shard_id + 1)]
        manifest = {**self._settings, "num_samples": len(records), "num_shards": len(shards), "shards": shards}
        with atomic_write(self.path / MANIFEST, "w") as file:
            json.dump(manifest, file, indent=2, sort_keys=True)
        for name in (PARTIAL_INDEX, PARTIAL_SETTINGS):
            (self.path / name).unlink()

    def close(self) -> None:
        """Sync and close the files without finishing the cache; a later writer continues here."""
        for file in (self._shard, self._index):
            if not file.closed:
                file.flush()
                os.fsync(file.fileno())
                file.close()

    def __enter__(self) -> TargetCacheWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
        else:
            self.close()

    def _shard_path(self, shard_id: int) -> Path:
        return self.path / f"shard-{shard_id:05d}.bin"

    def _next_shard(self) -> None:
        self._shard.flush()
        os.fsync(self._shard.fileno())
        self._shard.close()
        self._shard_id += 1
        self._shard = open(self._shard_path(self._shard_id), "wb")  # noqa: SIM115

    def _check_settings(self) -> None:
        """Keep the settings of an unfinished cache next to it, so that a restart cannot mix two kinds of features."""
        file_path = self.path / PARTIAL_SETTINGS
        if file_path.exists():
            found = json.loads(file_path.read_text())
            wanted = json.loads(json.dumps(self._settings))
            differing = sorted(k for k in found.keys() | wanted.keys() if found.get(k) != wanted.get(k))
            if differing:
                raise ValueError(
                    f"The unfinished cache in {self.path} was begun with other settings for {differing}: "
                    f"{ {k: found.get(k) for k in differing} }. Use these, or choose another folder."
                )
        else:
            with atomic_write(file_path, "w") as file:
                json.dump(self._settings, file, indent=2, sort_keys=True)

    def _recover(self) -> np.ndarray:
        """Cut index and shards back to the last complete sample and return the records that stand."""
        index = self.path / PARTIAL_INDEX
        whole = index.stat().st_size // INDEX_DTYPE.itemsize if index.exists() else 0
        records = np.fromfile(index, INDEX_DTYPE, count=whole) if whole else np.zeros(0, INDEX_DTYPE)
        sizes = {x.name: x.stat().st_size for x in self.path.glob("shard-*.bin")}
        ends = records["last_hidden"] + records["seq_len"].astype(np.uint64) * np.uint64(2 * self.hidden_size)
        complete = [
            int(end) <= sizes.get(self._shard_path(int(shard)).name, 0)
            for end, shard in zip(ends, records["shard_id"], strict=True)
        ]
        # After a crash of the machine (not only of the process) a record may have reached the disk before its bytes.
        standing = complete.index(False) if False in complete else len(complete)
        records = records[:standing]
        with open(index, "ab") as file:
            file.truncate(standing * INDEX_DTYPE.itemsize)
        last = int(records["shard_id"][-1]) if standing else -1
        for name in sizes:
            shard = int(name.removeprefix("shard-").removesuffix(".bin"))
            if shard > last:
                (self.path / name).unlink()
            elif shard == last:
                os.truncate(self.path / name, int(ends[standing - 1]))
        return records


class TargetCache:
    """Read a finished target cache through memory maps.

    Attributes:
        manifest: parsed manifest.json.
        records: the index, one record a sample.
        hidden_size: D.
        features: width F*D of the tapped states.
        sample_ids: `[samples]` ids in file order.
    """

    def __init__(self, path: str | Path):
        """Open a cache.

        Args:
            path: its folder.

        Raises:
            FileNotFoundError: when there is no manifest (no cache, or one that was never finished).
            ValueError: for another version or data type, or files shorter than the index says.
        """
        self.path = Path(path)
        if not (self.path / MANIFEST).exists():
            raise FileNotFoundError(
                f"{self.path} holds no {MANIFEST}: it is no target cache, or writing it was never finished."
            )
        self.manifest: dict[str, Any] = json.loads((self.path / MANIFEST).read_text())
        for key, value in {"version": VERSION, **_FIXED}.items():
            if self.manifest.get(key) != value:
                raise ValueError(f"{self.path} has {key} {self.manifest.get(key)!r}, expected {value!r}: rebuild it.")
        self.hidden_size = int(self.manifest["hidden_size"])
        self.features = len(self.manifest["target_layer_ids"]) * self.hidden_size
        self.records = np.fromfile(self.path / INDEX, INDEX_DTYPE)
        if len(self.records) != self.manifest["num_samples"]:
            raise ValueError(
                f"{self.path / INDEX} has {len(self.records)} records, the manifest says "
                f"{self.manifest['num_samples']} samples: the copy is incomplete."
            )
        self._shards: dict[int, np.ndarray] = {}
        self._names = {int(x["shard_id"]): x["file_name"] for x in self.manifest["shards"]}
        self._check_sizes()
        self._places = {int(x): i for i, x in enumerate(self.records["sample_id"])}

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[CachedSample]:
        return (self[i] for i in range(len(self)))

    def __contains__(self, sample_id: int | np.integer) -> bool:
        return int(sample_id) in self._places

    @property
    def sample_ids(self) -> Int[np.ndarray, "samples"]:
        """Ids in file order."""
        return self.records["sample_id"].astype(np.int64)

    def __getitem__(self, index: int | np.integer) -> CachedSample:
        """Return sample number `index` in file order."""
        record = self.records[index]
        length = int(record["seq_len"])
        shard = self._shard(int(record["shard_id"]))

        def view(name: str, dtype: Any, *shape: int) -> np.ndarray:
            start, dtype = int(record[name]), np.dtype(dtype)
            # Offsets need not be aligned: 9 tokens are followed by two masks of 9 bytes.
            return shard[start : start + dtype.itemsize * int(np.prod(shape))].view(dtype).reshape(shape)

        return CachedSample(
            sample_id=int(record["sample_id"]),
            input_ids=view("input_ids", "<i4", length),
            attention_mask=view("attention_mask", np.uint8, length),
            loss_mask=view("loss_mask", np.uint8, length),
            taps=view("taps", BFLOAT16, length, self.features),
            last_hidden=view("last_hidden", BFLOAT16, length, self.hidden_size),
        )

    def by_id(self, sample_id: int | np.integer) -> CachedSample:
        """Return the sample stored under `sample_id`.

        Raises:
            KeyError: when there is none.
        """
        if int(sample_id) not in self._places:
            raise KeyError(f"Sample {sample_id} is not in {self.path} ({len(self)} samples): rebuild the cache.")
        return self[self._places[int(sample_id)]]

    def _shard(self, shard_id: int) -> np.ndarray:
        if shard_id not in self._shards:
            self._shards[shard_id] = np.memmap(self.path / self._names[shard_id], np.uint8, mode="r")
        return self._shards[shard_id]

    def _check_sizes(self) -> None:
        ends = self.records["last_hidden"] + self.records["seq_len"].astype(np.uint64) * np.uint64(2 * self.hidden_size)
        for shard_id in np.unique(self.records["shard_id"]):
            name = self._names.get(int(shard_id))
            size = (self.path / name).stat().st_size if name and (self.path / name).exists() else 0
            needed = int(ends[self.records["shard_id"] == shard_id].max())
            if size < needed:
                raise ValueError(
                    f"Shard {int(shard_id)} of {self.path} has {size} bytes, the index needs {needed}: "
                    "the copy is incomplete."
                )
