"""Command line of the benchmarks."""

from __future__ import annotations

import platform
import sys
from datetime import date
from typing import Annotated, Any

import jax
import tyro
from rich.console import Console
from rich.table import Table

from dspark_jax import bench
from dspark_jax.bench.decode import Decode, bench_decode
from dspark_jax.bench.numbers import write_numbers
from dspark_jax.bench.serve import Replay, Serve, bench_replay, bench_serve
from dspark_jax.bench.train import Train, bench_train
from dspark_jax.terminal import guarded


def main(command: Decode | Train | Serve | Replay) -> None:
    """Run a benchmark, print its table, and write the numbers."""
    console = Console()
    if isinstance(command, Serve):
        results = bench_serve(command)
    elif isinstance(command, Replay):
        results = bench_replay(command)
    else:
        results = bench_decode(command) if isinstance(command, Decode) else bench_train(command)
        _print(console, type(command).__name__.lower(), results)
    write_numbers(command, results)


def _print(console: Console, name: str, results: dict[str, Any]) -> None:
    device = jax.devices()[0].device_kind
    table = Table(title=f"{name} on {platform.processor() or device}, {date.today()}")
    table.add_column("what")
    table.add_column("measured")
    for label, value in _flat(results):
        table.add_row(label, f"{value:.4g}")
    console.print(table)


def _flat(values: dict[Any, Any], prefix: str = "") -> list[tuple[str, float]]:
    rows = []
    for name, value in values.items():
        label = f"{prefix}{name}"
        rows += _flat(value, f"{label} / ") if isinstance(value, dict) else [(label, float(value))]
    return rows


if __name__ == "__main__":
    commands: Any = (
        Annotated[Decode, tyro.conf.subcommand("decode")]
        | Annotated[Train, tyro.conf.subcommand("train")]
        | Annotated[Serve, tyro.conf.subcommand("serve")]
        | Annotated[Replay, tyro.conf.subcommand("replay")]
    )
    arguments = tyro.cli(commands, prog="python -m dspark_jax.bench", description=bench.__doc__)
    sys.exit(guarded(lambda: main(arguments)))
