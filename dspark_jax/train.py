"""`python -m dspark_jax.train --config configs/smollm2_dspark.py`: train a drafter.

Every field of the config can be overridden: `--steps 100 --output runs/try --drafter.layers 3`. The same command
continues an interrupted run. Exit status: 0 when the run is done (or `max_minutes` is spent), 75 when SIGTERM ended it
early and it wants to be started again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console

from dspark_jax.data.conversations import IngestOptions
from dspark_jax.data.corpus import TokenizedCorpus, split_validation
from dspark_jax.draft.contract import Drafter
from dspark_jax.engine.generate import generate
from dspark_jax.evaluation.summary import round_statistics
from dspark_jax.sharding import create_mesh
from dspark_jax.spec.metrics import pool
from dspark_jax.target.loading import Target, load_target
from dspark_jax.terminal import guarded
from dspark_jax.training.config import TrainConfig, load_config
from dspark_jax.training.loop import DecodeCheck, train
from dspark_jax.training.processes import join
from dspark_jax.training.setup import open_corpus

PROGRAM = "python -m dspark_jax.train"
DECODE_TOKENS = 64
"""Tokens generated for each prompt of a real-decode check."""
EXIT_INTERRUPTED = 75
"""EX_TEMPFAIL: try again."""


def parse(arguments: Sequence[str]) -> TrainConfig:
    """Read `--config FILE` and apply the remaining arguments on top."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config")
    known, rest = first.parse_known_args(arguments)
    if known.config is None:
        return tyro.cli(TrainConfig, prog=PROGRAM, args=rest, description=__doc__)
    return tyro.cli(TrainConfig, prog=PROGRAM, args=rest, default=load_config(known.config), description=__doc__)


def decode_check(target: Target, corpus: TokenizedCorpus) -> DecodeCheck:
    """Real speculative decoding of held-out prompts at temperature 1: what the training is for."""
    _, held_out = split_validation(corpus)
    rows = [held_out.row(i) for i in range(len(held_out))]
    prompts = [tokens[: int(np.argmax(mask))].tolist() for tokens, mask in rows]

    def check(drafter: Drafter, count: int) -> dict[str, float]:
        answers = generate(target, drafter, prompts[:count], max_new_tokens=DECODE_TOKENS, temperature=1.0)
        block = drafter.config.block_size
        statistics = pool((round_statistics(answer, block) for answer in answers), block_size=block)
        conditional = {f"conditional_{k + 1}": float(x) for k, x in enumerate(statistics.conditional_acceptance)}
        return {"tau": float(statistics.tau), "rounds": float(statistics.rounds), **conditional}

    return check


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    config = parse(sys.argv[1:] if arguments is None else arguments)
    join(config.processes)
    console = Console(stderr=True, quiet=jax.process_index() > 0)
    mesh = create_mesh(data=config.mesh.data, fsdp=config.mesh.fsdp, tensor=config.mesh.tensor)
    # Where every device holds all of the target anyway, it stays on one until training: real decoding runs there.
    divided = config.mesh.fsdp * config.mesh.tensor > 1
    target = load_target(config.target, dtype=jnp.dtype(config.dtype), mesh=mesh if divided else None, chat=config.chat)
    options = IngestOptions(max_length=config.sequence_length, min_loss_tokens=config.min_loss_tokens, chat=config.chat)
    corpus = open_corpus(target, config.data, options, console)
    check = None if config.decode_every is None else decode_check(target, corpus)
    result = train(config, target, corpus, decode_check=check, console=console)
    console.print(
        f"{result.reason} after step {result.step:,} and {result.seconds / 60:.1f} minutes of training; "
        f"drafter: {config.output}/export/{result.step:06d}"
    )
    return EXIT_INTERRUPTED if result.reason == "signal" else 0


if __name__ == "__main__":
    sys.exit(guarded(main))
