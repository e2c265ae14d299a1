"""What a run says: sums over a window of steps, turned into means once, as JSON lines and TensorBoard scalars."""

from __future__ import annotations

import dataclasses
import json
import resource
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dspark_jax.files import atomic_write
from dspark_jax.training.losses import LossTerms
from dspark_jax.training.step import StepMetrics
from dspark_jax.training.tpu import peak_flops


class Window:
    """Sums over the steps since the last line of the log.

    A checkpoint stores it, so that a resumed run writes the same lines as an uninterrupted one.
    """

    def __init__(self, sums: dict[str, Any] | None = None):
        self._sums: dict[str, Any] = dict(sums or {})

    def add(self, metrics: StepMetrics) -> None:
        """Add the fetched metrics of one step; a step that taught nothing enters no mean."""
        applied = bool(metrics.applied)
        self._add({"steps": 1, "applied": int(applied)})
        self._sums["learning_rate"] = float(metrics.learning_rate)
        if applied:
            self._add({"loss": metrics.loss, "grad_norm": metrics.grad_norm, **_term_sums(metrics.terms)})

    def add_loss(self, loss: Any, terms: LossTerms) -> None:
        """Add one validation batch; its loss counts by the weight of its slots."""
        weight = float(terms.weight)
        self._add({"applied": weight, "loss": float(loss) * weight, **_term_sums(terms)})

    def _add(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            value = np.asarray(value, np.float64)
            self._sums[name] = (np.asarray(self._sums.get(name, 0.0)) + value).tolist()

    @property
    def steps(self) -> int:
        """Steps in the window."""
        return int(self._sums.get("steps", 0))

    def to_json(self) -> dict[str, Any]:
        """Plain values that `Window(...)` takes back exactly."""
        return dict(self._sums)

    def means(self) -> dict[str, Any]:
        """Means over the window; quantities without any case are left out.

        Returns:
            `loss`, `grad_norm` (means over steps), `ce`, `tv`, `confidence`, `confidence_error`, `confidence_bias`
            (over weighted slots), `accept_rate` and `accuracy` (lists over positions), `tau_probabilistic` (1 + mean
            drafted survival), `drafted_run` (mean leading run of top-1 agreements), `blocks`, `learning_rate`.
        """
        s = self._sums
        out = {name: s[name] for name in ("learning_rate",) if name in s}
        if s.get("applied"):
            out |= {name: s[name] / s["applied"] for name in ("loss", "grad_norm") if name in s}
        if s.get("weight"):
            out["ce"] = s["ce"] / s["weight"]
        if s.get("weight") and s.get("measured"):
            names = ("tv", "confidence", "confidence_error", "confidence_bias", "confidence_cumprod_bias")
            out |= {name: s[name] / s["weight"] for name in names}
        valid = np.maximum(np.asarray(s.get("valid", 0)), 1)
        if s.get("measured"):
            out |= {
                "accept_rate": (np.asarray(s["accept_rate"]) / valid).tolist(),
                "tau_probabilistic": 1 + s["survival"] / s["measured"],
            }
        if s.get("blocks"):
            out |= {
                "accuracy": (np.asarray(s["correct"]) / valid).tolist(),
                "drafted_run": s["accepted_run"] / s["blocks"],
                "blocks": s["blocks"],
            }
        return out


def _term_sums(terms: LossTerms) -> dict[str, Any]:
    return {name: getattr(terms, name) for name in LossTerms.__dataclass_fields__}


@dataclasses.dataclass(frozen=True)
class Speed:
    """How fast a run goes, from the costs of one step and two readings of its clocks.

    Attributes:
        flops: operations that one step's algorithm needs on all devices; None where nobody counted.
        began: when this process began, `time.monotonic()`.
        seconds_before: training time that earlier processes of the run spent.
    """

    flops: float | None
    began: float
    seconds_before: float

    def measure(self, before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
        """Rates between two readings.

        Args:
            before, after: `steps`, `seconds` (training time), `tokens`, `blocks`, `input_wait` and `saving` (seconds).

        Returns:
            `step_seconds`, `tokens_per_second`, `blocks_per_second`, `input_wait` (share of the training time),
            `saving` (seconds that saves held the run up since the last reading), `goodput` (training time over all time
            of this process: compilation, checks and saves are the rest),
            `host_gb` (most resident memory so far), and where the devices tell `device_gb` (most memory of one so far)
            and `mfu` (operations of the algorithm over the devices' peak).
        """
        passed = {name: after[name] - before[name] for name in before}
        seconds = max(passed["seconds"], 1e-9)
        out = {
            "step_seconds": seconds / max(passed["steps"], 1),
            "tokens_per_second": passed["tokens"] / seconds,
            "blocks_per_second": passed["blocks"] / seconds,
            "input_wait": passed["input_wait"] / seconds,
            "saving": passed["saving"],
            "goodput": (after["seconds"] - self.seconds_before) / max(time.monotonic() - self.began, 1e-9),
            "host_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
        }
        device = jax.local_devices()[0]
        memory = device.memory_stats()
        if memory is not None and "peak_bytes_in_use" in memory:
            out["device_gb"] = memory["peak_bytes_in_use"] / 1e9
        peak = peak_flops(device.device_kind)
        if peak is not None and self.flops is not None:
            out["mfu"] = self.flops / out["step_seconds"] / (jax.device_count() * peak)
        return out


class MetricLog:
    """Append-only `metrics.jsonl` of a run, and TensorBoard files beside it."""

    def __init__(self, output: Path, *, tensorboard: bool, resume_step: int):
        """Open the log and drop lines after `resume_step`: the run repeats those steps.

        Args:
            output: folder of the run.
            tensorboard: also write event files to `output/tensorboard`.
            resume_step: steps done before; 0 starts a new log.
        """
        self._writing = jax.process_index() == 0
        self.path = output / "metrics.jsonl"
        self._writer: Any = None
        if not self._writing:
            return
        output.mkdir(parents=True, exist_ok=True)
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        with atomic_write(self.path, "w") as file:
            file.writelines(f"{x}\n" for x in lines if _step_of(x) <= resume_step)
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (stays open across calls)
        if tensorboard:
            from tensorboardX import SummaryWriter

            self._writer = SummaryWriter(str(output / "tensorboard"), purge_step=resume_step + 1)

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Write one line.

        Args:
            kind: "train", "speed", "validation" or "decode".
            step: steps done.
            values: numbers, or lists of numbers by position.
        """
        if not self._writing:
            return
        self._file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        self._file.flush()
        if self._writer is None:
            return
        for name, value in values.items():
            items = enumerate(value, 1) if isinstance(value, (list, tuple)) else [(None, value)]
            for position, number in items:
                if isinstance(number, (int, float)):
                    tag = f"{kind}/{name}" + ("" if position is None else f"/{position}")
                    self._writer.add_scalar(tag, number, step)

    def close(self) -> None:
        """Flush and close."""
        if self._writing:
            self._file.close()
        if self._writer is not None:
            self._writer.close()


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError):
        return float("inf")  # a line cut by a crash belongs to a step that is repeated
