"""`python -m dspark_jax.reduce`: leave a drafter with the tokens that its target's answers use.

The target's head is most of what drafting costs where the vocabulary is large and the model small. Counts the tokens of
answers, such as those the drafter was trained on, and writes a copy of the drafter that drafts the most frequent ones.
The text stays the target's, which writes what cannot be drafted.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import tyro
from rich.console import Console

from dspark_jax.data.conversations import IngestOptions
from dspark_jax.draft.loading import config_json, drafter_folder, load_drafter, save_drafter
from dspark_jax.draft.vocabulary import reduce_vocabulary
from dspark_jax.huggingface import read_json
from dspark_jax.target.loading import load_target
from dspark_jax.terminal import guarded, table_console
from dspark_jax.training.columns import frequent_tokens
from dspark_jax.training.setup import open_corpus
from dspark_jax.types import ChatOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReduceCommand:
    """Reduce a drafter's vocabulary.

    Attributes:
        draft: shipped name, checkpoint folder or hub name of a drafter over its target's whole vocabulary.
        data: conversation files (JSONL or ArrayRecord) whose answers are counted: paths, or URLs.
        output: folder of the reduced copy.
        target: `smollm2-135m`, a GGUF file, a model folder or a hub name.
        size: tokens to keep; fewer where the answers have fewer.
        chat: how conversations become text; as in the drafter's training.
        max_length: tokens read of a conversation.
    """

    draft: str
    data: tuple[str, ...]
    output: Path
    target: str = "smollm2-135m"
    size: int = 8192
    chat: ChatOptions = dataclasses.field(default_factory=ChatOptions)
    max_length: int = 4096


def run(command: ReduceCommand, console: Console) -> int:
    """Count, reduce, write, say what is covered; returns the exit status."""
    source = drafter_folder(command.draft)
    check_places(command, source)
    target = load_target(command.target)
    drafter = load_drafter(command.draft, target)
    options = IngestOptions(max_length=command.max_length, chat=command.chat)
    corpus = open_corpus(target, command.data, options, console)
    counts = corpus.supervised_counts()
    kept = frequent_tokens(counts, command.size)
    reduced = reduce_vocabulary(drafter, kept)
    stored = read_json(source / "config.json")
    own = config_json(drafter.config)
    save_drafter(reduced, command.output, extra={key: stored[key] for key in stored.keys() - own.keys()})
    covered = counts[list(kept)].sum() / counts.sum()
    console.print(
        f"{len(kept):,} of {target.config.vocab_size:,} tokens kept; they are {covered:.1%} of {counts.sum():,} answer "
        f"tokens. Wrote {command.output}",
        highlight=False,
        soft_wrap=True,
    )
    return 0


def check_places(command: ReduceCommand, source: Path) -> None:
    """Refuse what cannot be meant before anything is loaded.

    Raises:
        ValueError: no tokens, or an output that is the drafter's own folder.
    """
    if command.size < 1:
        raise ValueError(f"--size {command.size}: a drafter needs a token to draft; 8192 is a good start")
    if command.output.resolve() == source.resolve():
        raise ValueError(f"--output {command.output} is the drafter's own folder: what is left out cannot be put back")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    command = tyro.cli(ReduceCommand, prog="python -m dspark_jax.reduce", args=arguments, description=__doc__)
    return guarded(lambda: run(command, table_console()))


if __name__ == "__main__":
    sys.exit(main())
