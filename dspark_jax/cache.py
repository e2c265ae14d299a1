"""`python -m dspark_jax.cache`: run the frozen target once over a corpus and keep its features on disk.

Trainings that read the cache (`features_cache` in a training config) skip the target's forward pass. Sizes are large
(7 KB a token for SmolLM2-135M with five taps): online features are the default, this is the alternative.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Literal

import jax.numpy as jnp
import tyro
from rich.console import Console

from dspark_jax.config import spread_layer_ids
from dspark_jax.data.conversations import IngestOptions
from dspark_jax.data.target_cache import size_estimate
from dspark_jax.target.loading import load_target
from dspark_jax.terminal import guarded
from dspark_jax.training.features import write_feature_cache
from dspark_jax.training.setup import open_corpus
from dspark_jax.types import ChatOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheCommand:
    """Write the target's features for a corpus.

    Attributes:
        data: conversation files (JSONL or ArrayRecord): paths, or URLs such as `gs://bucket/name`.
        output: folder of the cache; an unfinished one is continued.
        target: `smollm2-135m`, a path or a hub name.
        taps: tapped layers; by default five spread over the depth.
        chat: how conversations become text.
        max_length: tokens kept of a conversation.
        dtype: type of the forward pass (features are stored as bfloat16 either way).
        max_minutes: finish the cache with the rows written by then (a fair sample of the corpus).
        yes: write without asking when the cache takes more than 1 GB.
    """

    data: tuple[str, ...]
    output: Path
    target: str = "smollm2-135m"
    taps: tuple[int, ...] | None = None
    chat: ChatOptions = dataclasses.field(default_factory=ChatOptions)
    max_length: int = 4096
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    max_minutes: float | None = None
    yes: bool = False


def main(command: CacheCommand) -> None:
    """Run the command."""
    console = Console()
    target = load_target(command.target, dtype=jnp.dtype(command.dtype))
    options = IngestOptions(max_length=command.max_length, chat=command.chat)
    corpus = open_corpus(target, command.data, options, console)
    taps = command.taps or spread_layer_ids(target.config.num_layers)
    width = target.config.hidden_size
    size = size_estimate(corpus.num_tokens, len(taps) * width, width, len(corpus))
    console.print(
        f"{len(corpus):,} rows, {corpus.num_tokens:,} tokens, taps {taps}: {size / 1e9:.1f} GB at {command.output}"
    )
    if size > 1e9 and not command.yes and input("write it? [y/N] ").strip().lower() != "y":
        raise SystemExit("nothing written")
    write_feature_cache(target, corpus, command.output, taps, max_minutes=command.max_minutes)


if __name__ == "__main__":
    arguments = tyro.cli(CacheCommand, prog="python -m dspark_jax.cache", description=__doc__)
    sys.exit(guarded(lambda: main(arguments)))
