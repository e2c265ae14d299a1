"""A measurement as JSON: machine, versions, settings, fingerprints, every number, and one row a prompt and system."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.evaluation.lossless import LosslessCheck
from dspark_jax.evaluation.measure import Measurement, System
from dspark_jax.evaluation.summary import Row, Summary
from dspark_jax.evaluation.tasks import Prompt
from dspark_jax.files import atomic_write, fingerprint
from dspark_jax.spec.metrics import Interval
from dspark_jax.target.loading import Target

FORMAT = 1
_PACKAGES = ("dspark-jax", "jax", "jaxlib", "flax", "numpy", "transformers", "tokenizers")


def report(
    target: Target,
    prompts: Sequence[Prompt],
    measurement: Measurement,
    summary: Summary,
    lossless: LosslessCheck,
) -> dict[str, Any]:
    """Collect everything that is known about a measurement.

    Args:
        target: what was decoded; its weights are hashed, which takes a second per gigabyte or so.
        prompts: all prompts.
        measurement: what came out.
        summary: its numbers.
        lossless: its comparison with plain decoding.

    Returns:
        Plain values; undefined numbers are None.
    """
    weights = {"params": target.params, "embed": target.tables.embed, "head": target.tables.head}
    content = {
        "format": FORMAT,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "settings": {**dataclasses.asdict(measurement.settings), "dtype": jnp.dtype(target.dtype).name},
        "chat": dataclasses.asdict(target.chat),
        "target": {"name": target.name, "fingerprint": fingerprint(weights)},
        "prompts": {
            "count": len(prompts),
            "domains": list(measurement.domains),
            "fingerprint": fingerprint([[p.domain, p.text] for p in prompts]),
        },
        "systems": [_system(system) for system in measurement.systems],
        "lossless": {
            "statement": lossless.statement(),
            "compared": lossless.compared,
            "differences": [dataclasses.asdict(d) for d in lossless.differences],
            "faults": len(lossless.faults),
        },
        "rows": [row_numbers(row) for row in summary.rows],
        "comparisons": [
            {"system": c.system, "baseline": c.baseline, "macro_tau_ratio": _interval(c.ratio)}
            for c in summary.comparisons
        ],
        "samples": [row for system in measurement.systems for row in _samples(measurement, system.name)],
    }
    return _plain(content)


def write_report(content: dict[str, Any], path: str | Path) -> None:
    """Write a report; the file appears complete or not at all."""
    with atomic_write(path, "w") as file:
        # NaN is not JSON: `_plain` has made every undefined number null.
        json.dump(content, file, indent=1, allow_nan=False)
        file.write("\n")


def machine() -> dict[str, Any]:
    """The processor, the memory and the devices that JAX runs on."""
    devices = jax.devices()
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gb": _memory_gb(),
        "system": f"{platform.system()} {platform.release()}",
        "devices": f"{len(devices)} x {devices[0].device_kind}",
    }


def versions(packages: Sequence[str] = _PACKAGES) -> dict[str, str]:
    """Versions of Python and of the packages that influence the numbers."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def row_numbers(row: Row) -> dict[str, Any]:
    """One row of the summary as plain values."""
    s = row.statistics
    return {
        "system": row.system,
        "domain": row.domain,
        "prompts": row.prompts,
        "tau": _interval(row.tau),
        "macro_tau": None if row.macro_tau is None else _interval(row.macro_tau),
        "emitted_per_round": row.emitted_per_round,
        "rounds": s.rounds,
        "accepted_length": s.accepted_length,
        "drafted": s.proposed,
        "accepted": int(s.accepted_at.sum()),
        "accepted_before_stop_cut": s.accepted_raw,
        "emitted": s.emitted,
        "mean_drafted": s.mean_proposed,
        "mean_accepted": s.mean_accepted,
        "verify_rate": s.verify_rate,
        "conditional_acceptance": s.conditional_acceptance.tolist(),
        "acceptance_by_position": s.acceptance_by_position.tolist(),
        "drafted_at": s.proposed_at.tolist(),
        "accepted_at": s.accepted_at.tolist(),
        "reached_at": s.reached_at.tolist(),
        **{k: v for k, v in dataclasses.asdict(row.speed).items() if k != "speedup"},
        "speedup": None if row.speed.speedup is None else _interval(row.speed.speedup),
    }


def _system(system: System) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": system.name, "block_size": system.block_size}
    if system.drafter is not None:
        entry["kind"] = system.drafter.config.name
        entry["confidence_threshold"] = system.confidence_threshold
        entry["fingerprint"] = fingerprint(system.drafter.params)
        entry["parameters"] = sum(int(x.size) for x in jax.tree.leaves(system.drafter.params))
    return entry


def _samples(measurement: Measurement, system: str) -> list[dict[str, Any]]:
    return [
        {
            "system": system,
            "prompt": sample.prompt.id,
            "domain": sample.prompt.domain,
            "batch": sample.batch,
            "prompt_tokens": len(sample.generation.prompt),
            "tokens": list(sample.generation.tokens),
            "finish_reason": sample.generation.finish_reason,
            "drafted": [r.proposed for r in sample.generation.rounds],
            "accepted": [r.accepted for r in sample.generation.rounds],
            "stopped": any(r.stopped for r in sample.generation.rounds),
            "emitted": [r.emitted for r in sample.generation.rounds],
            "batch_seconds": dataclasses.asdict(sample.generation.timings),
        }
        for sample in measurement.samples[system]
    ]


def _interval(interval: Interval) -> list[float]:
    """Estimate, low and high end of the 95 % interval."""
    return [interval.estimate, interval.low, interval.high]


def _plain(value: Any) -> Any:
    """Replace NumPy scalars by Python's and undefined numbers by None."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _memory_gb() -> float | None:
    if not hasattr(os, "sysconf"):
        return None
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1)


def _processor() -> str:
    """The processor's marketing name where the system tells it."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
