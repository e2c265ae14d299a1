"""What benchmarks write: their numbers with date, device and settings, as JSON."""

from __future__ import annotations

import dataclasses
import json
from datetime import date
from pathlib import Path
from typing import Any

import jax

from dspark_jax.files import atomic_write


def write_numbers(command: Any, results: dict[str, Any]) -> None:
    """Write the numbers of a command to its `output`, atomically; without one, nothing."""
    if command.output is not None:
        with atomic_write(command.output, "w") as file:
            json.dump({**_facts(), "settings": _settings(command), "results": results}, file, indent=2)


def earlier_numbers(command: Any, free: tuple[str, ...]) -> dict[str, Any]:
    """Results that the same command has written before; empty where there are none.

    Args:
        command: the command.
        free: settings that may differ; dots lead into parts.

    Raises:
        ValueError: the file is from another device, version or setting; the differing ones are named.
    """
    path: Path | None = command.output
    if path is None or not path.exists():
        return {}
    content = json.loads(path.read_text())
    here = {**_flat(_facts()), **_flat(_settings(command))}
    there = {**_flat({k: content.get(k) for k in _facts()}), **_flat(content.get("settings", {}))}
    ignored = ("date", "output", *free)
    differing = {k: (there.get(k), v) for k, v in here.items() if k not in ignored and there.get(k) != v}
    if differing:
        raise ValueError(
            f"{path} has numbers of other conditions, (there, here): {differing}. Remove it or choose another --output"
        )
    return content["results"]


def _facts() -> dict[str, Any]:
    return {"date": str(date.today()), "device": jax.devices()[0].device_kind, "jax": jax.__version__}


def _settings(command: Any) -> dict[str, Any]:
    return json.loads(json.dumps(dataclasses.asdict(command), default=str))


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
