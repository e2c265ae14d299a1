"""A trace of some steps, for xprof or Perfetto."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import jax


class Trace:
    """Traces the steps from `steps[0]` to `steps[1]`; ended with its block where a run stops between them."""

    def __init__(self, steps: tuple[int, int] | None, output: Path):
        """Plan a trace.

        Args:
            steps: first and last; None traces nothing.
            output: folder of the trace.

        Raises:
            ValueError: the last comes before the first.
        """
        if steps is not None and not 1 <= steps[0] <= steps[1]:
            raise ValueError(f"profile_steps {steps}: expected a first step (from 1) and a last one that follows it")
        self._steps, self._output, self._running = steps, output, False

    def __enter__(self) -> Trace:
        return self

    def before(self, step: int) -> None:
        """Begin where this step is the first."""
        if self._steps is not None and step == self._steps[0]:
            jax.profiler.start_trace(str(self._output))
            self._running = True

    def after(self, step: int, wait: Callable[[], None]) -> None:
        """End where this step was the last; `wait` returns when the device has done it."""
        if self._running and self._steps is not None and step == self._steps[1]:
            wait()
            self._stop()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
