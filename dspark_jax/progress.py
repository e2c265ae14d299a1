"""Progress bars with rate and time left that turn into occasional plain lines in log files."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from types import TracebackType
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

T = TypeVar("T")

LOG_SECONDS = 15.0


class Progress:
    """Report how far a loop has come, how fast it goes and how long it still takes.

    On a terminal this is a bar. Elsewhere (log files, CI) it is one plain line every `log_seconds`, and one at the
    end, because a bar redrawn into a file makes the file unreadable.

    Attributes:
        completed: units done so far.
    """

    def __init__(
        self,
        description: str,
        total: int | None = None,
        unit: str = "it",
        *,
        console: Console | None = None,
        log_seconds: float = LOG_SECONDS,
    ):
        self.description, self.total, self.unit = description, total, unit
        self.completed = 0.0
        self._console = console or Console(file=sys.stderr)
        self._log_seconds = log_seconds
        self._fields: dict[str, Any] = {}
        self._started = self._last_line = time.monotonic()
        self._bar: RichProgress | None = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        self._started = self._last_line = time.monotonic()
        if self._console.is_terminal:
            self._bar = RichProgress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[status]}"),
                console=self._console,
            )
            self._bar.start()
            self._task = self._bar.add_task(self.description, total=self.total, status="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        else:
            self._line("stopped" if kind else "done")

    def update(self, n: int | float = 1, **fields: Any) -> None:
        """Advance by `n` units and show `fields` (name=value) next to the rate.

        Args:
            n: units completed since the last call; 0 only refreshes the fields.
            **fields: latest values to show; earlier ones stay until replaced.
        """
        self.completed += n
        self._fields.update(fields)
        if self._bar is not None:
            self._bar.update(self._task, advance=n, status=self._status())
        elif time.monotonic() - self._last_line >= self._log_seconds:
            self._line()

    def _rate(self) -> float:
        return self.completed / max(time.monotonic() - self._started, 1e-9)

    def _status(self) -> str:
        values = [f"{self._rate():,.4g} {self.unit}/s"]
        values += [f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in self._fields.items()]
        return "  ".join(values)

    def _line(self, state: str = "") -> None:
        self._last_line = time.monotonic()
        elapsed = self._last_line - self._started
        parts = [f"{self.description}:", f"{self.completed:,g}" + (f"/{self.total:,}" if self.total else "")]
        parts += [self.unit, f"in {_clock(elapsed)}", self._status()]
        if state:
            parts.append(state)
        elif self.total and self.completed:
            parts.append(f"{_clock((self.total - self.completed) / self._rate())} left")
        self._console.print(" ".join(parts), highlight=False, markup=False, soft_wrap=True)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def track(iterable: Iterable[T], description: str, total: int | None = None, unit: str = "it") -> Iterator[T]:
    """Yield the items of `iterable` while reporting progress.

    Args:
        iterable: what to go through.
        description: shown in front.
        total: number of items; taken from `len(iterable)` when it has one.
        unit: name of one item, for the rate.

    Yields:
        The items, unchanged.
    """
    if total is None and isinstance(iterable, Sized):
        total = len(iterable)
    with Progress(description, total, unit) as progress:
        for item in iterable:
            yield item
            progress.update()
