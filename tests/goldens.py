"""Where the reference numbers lie: `$DSPARK_GOLDENS`, by default `../shared/goldens` beside the repository."""

from __future__ import annotations

import fnmatch
import os
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
GOLDENS = Path(os.environ.get("DSPARK_GOLDENS", REPOSITORY.parent / "shared" / "goldens"))
TINY = REPOSITORY / "tests" / "parity" / "tiny"
ABSENT = f"reference numbers not found at {GOLDENS}: set DSPARK_GOLDENS to their folder"


def golden_root() -> Path | None:
    """The folder of reference numbers, or None where it is absent."""
    return GOLDENS if GOLDENS.is_dir() else None


def golden_cases(pattern: str, without: tuple[str, ...] = ()) -> list[Path]:
    """Folders whose name matches, from the reference numbers and from the tiny cases kept in the repository."""
    roots = [root for root in (GOLDENS, TINY) if root.exists()]
    found = {p.name: p for root in reversed(roots) for p in root.iterdir() if fnmatch.fnmatch(p.name, pattern)}
    return [found[name] for name in sorted(found) if name not in without]
