"""`python -m dspark_jax.train --config configs/smollm2_dspark.py`: train a drafter.

Every field of the config can be overridden: `--steps 100 --output runs/try --drafter.layers 3`. The same command
continues an interrupted run. Exit status: 0 when the run is done (or `max_minutes` is spent), 75 when SIGTERM ended it
early and it wants to be started again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import jax.numpy as jnp
import tyro
from rich.console import Console

from dspark_jax.data.conversations import IngestOptions, load_corpus
from dspark_jax.target.loading import load_target
from dspark_jax.training.config import TrainConfig, load_config
from dspark_jax.training.loop import train

EXIT_INTERRUPTED = 75
"""EX_TEMPFAIL: try again."""


def parse(arguments: Sequence[str]) -> TrainConfig:
    """Read `--config FILE` and apply the remaining arguments on top."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config")
    known, rest = first.parse_known_args(arguments)
    if known.config is None:
        return tyro.cli(TrainConfig, args=rest, description=__doc__)
    return tyro.cli(TrainConfig, args=rest, default=load_config(known.config), description=__doc__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    config = parse(sys.argv[1:] if arguments is None else arguments)
    console = Console(stderr=True)
    target = load_target(config.target, dtype=jnp.dtype(config.dtype))
    options = IngestOptions(max_length=config.sequence_length, min_loss_tokens=config.min_loss_tokens)
    corpus, summary = load_corpus(config.data, target.tokenizer, options, vocab_size=target.config.vocab_size)
    console.print(summary.table())
    result = train(config, target, corpus, console=console)
    console.print(
        f"{result.reason} after step {result.step:,} and {result.seconds / 60:.1f} minutes of training; "
        f"drafter: {config.output}/export/{result.step:06d}"
    )
    return EXIT_INTERRUPTED if result.reason == "signal" else 0


if __name__ == "__main__":
    sys.exit(main())
