"""What all commands do alike at the terminal: width of tables, and errors in one line."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from rich.console import Console

LOG_WIDTH = 132
"""Tables in log files need not fit a terminal."""
EXIT_ERROR = 2


def table_console() -> Console:
    """Standard output, as wide as the terminal, and wide in log files."""
    return Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else LOG_WIDTH)


def guarded(run: Callable[[], int | None]) -> int:
    """Run a command; returns its exit status.

    Missing files and packages, refused settings and runs that diverge say what was found and what to do: they are
    printed in one line, which a traceback would bury. Anything else is a fault of ours and keeps its traceback.
    """
    try:
        return run() or 0
    except (FileNotFoundError, ModuleNotFoundError, FloatingPointError, ValueError) as error:
        Console(stderr=True).print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        return EXIT_ERROR
