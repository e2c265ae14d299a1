"""What a run is made of, from its configuration: batches, the step, its sampled vocabulary, weights to start from."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from dspark_jax.config import DrafterConfig
from dspark_jax.data.conversations import IngestOptions, load_corpus
from dspark_jax.data.corpus import TokenizedCorpus, split_validation
from dspark_jax.data.pipeline import BatchSource
from dspark_jax.data.target_cache import TargetCache
from dspark_jax.draft.dspark import DSparkFunctions
from dspark_jax.draft.loading import functions_for, load_drafter
from dspark_jax.files import cache_dir
from dspark_jax.nn.interval_kernel import KernelIntervals
from dspark_jax.nn.intervals import DENSE_INTERVALS, IntervalAttention
from dspark_jax.target.loading import Target
from dspark_jax.target.transformer import check_tap_ids
from dspark_jax.training.columns import SampledVocabulary, frequent_tokens
from dspark_jax.training.config import TrainConfig, drafter_config
from dspark_jax.training.optimizer import create_optimizer, learning_rate, warmup_steps
from dspark_jax.training.step import BlockObjective, Eagle3Objective, Objective, Step
from dspark_jax.types import Params


def build_sources(
    config: TrainConfig, target: Target, corpus: TokenizedCorpus, shards: int
) -> tuple[BatchSource, BatchSource | None]:
    """Split the corpus by row id and lay out training and validation batches.

    Args:
        config: the run.
        target: gives the vocabulary and the drafter's shape.
        corpus: tokenized conversations.
        shards: parts the rows of a batch are split into.

    Raises:
        ValueError: the feature cache belongs to other taps or another target, or the corpus holds the mask token.
    """
    mask = config.drafter.mask_token_id
    count = 0 if mask is None else sum(int(np.sum(tokens == mask)) for tokens, _ in corpus.blocks())
    if count:
        raise ValueError(
            f"drafter.mask_token_id {mask} occurs {count} times in the corpus: choose a special token that no text has"
        )
    features = None if config.features_cache is None else TargetCache(config.features_cache)
    taps = drafter_config(config, target.config).target_layer_ids
    if features is not None:
        for key, expected in (("target_layer_ids", list(taps)), ("target", config.target)):
            found = features.manifest.get(key, expected)
            # A drafter without taps reads the last hidden states, which every cache holds.
            if found != expected and not (key == "target_layer_ids" and not taps):
                raise ValueError(f"{features.path} was made with {key} {found}, this run has {expected}: rebuild it")
        corpus = cached_rows(corpus, features)
    training, held_out = split_validation(corpus)
    vocab = target.config.vocab_size

    def source(part: TokenizedCorpus, rows: int, packed: bool) -> BatchSource:
        return BatchSource(
            part,
            rows,
            config.sequence_length,
            config.seed,
            packed,
            vocab_size=vocab,
            features=features,
            with_taps=bool(taps),
        )

    train = source(training, config.batch_size, config.packed)
    if config.validate_every is None:
        return train, None
    # Unpacked rows: their number is known, so that small held-out sets still fill a batch.
    rows = min(config.batch_size // config.accumulation, len(held_out))
    rows -= rows % shards
    if not rows:
        raise ValueError(
            f"validate_every is set, but only {len(held_out)} row ids are divisible by 50, for {shards} shards of the "
            "mesh: add data, or set it to None"
        )
    return train, source(held_out, rows, False)


def cached_rows(corpus: TokenizedCorpus, features: TargetCache) -> TokenizedCorpus:
    """The rows a cache holds; it may have been finished before all of them were written.

    Raises:
        ValueError: it holds none.
    """
    rows = np.flatnonzero(np.isin(corpus.source_index, features.sample_ids))
    if not len(rows):
        raise ValueError(f"{features.path} holds none of the corpus's rows: it was made from other data")
    if len(rows) < len(corpus):
        held = f"{len(rows):,} of {len(corpus):,} rows"
        Console(stderr=True).print(f"{features.path} holds {held}; the others are left out")
    return corpus.subset(rows)


def create_step(config: TrainConfig, target: Target, steps: int, sampled: SampledVocabulary | None = None) -> Step:
    """Bind the pure step to a configuration."""
    shape = drafter_config(config, target.config)
    check_tap_ids(target.config, shape.target_layer_ids)
    functions = functions_for(shape, jnp.dtype(config.dtype))
    attention = interval_attention(config.attention)
    objective: Objective
    if isinstance(functions, DSparkFunctions):
        objective = BlockObjective(
            functions, config.loss, shape.num_anchors, config.seed, config.vocab_chunk, attention
        )
    else:
        objective = Eagle3Objective(functions, config.vocab_chunk, attention)
    peak, warmup = config.optimizer.learning_rate, warmup_steps(config.optimizer, steps)
    return Step(
        functions=functions,
        objective=objective,
        target=target.config,
        optimizer=create_optimizer(config.optimizer),
        schedule=lambda step: learning_rate(step, peak, warmup, steps),
        sampled=sampled,
        attention=attention,
    )


def open_corpus(target: Target, data: Sequence[str], options: IngestOptions, console: Console) -> TokenizedCorpus:
    """Tokenize conversation files for a target, once a machine, and print what was kept.

    Raises:
        FileNotFoundError, ValueError: as `load_corpus`.
    """
    corpus, summary = load_corpus(
        data, target.tokenizer, options, vocab_size=target.config.vocab_size, store=cache_dir() / "corpora"
    )
    console.print(summary.table())
    return corpus


def interval_attention(name: str | None) -> IntervalAttention:
    """How rows attend, by its name in a config; None takes the kernel on TPUs and dense attention elsewhere."""
    if name is None:
        name = "kernel" if jax.default_backend() == "tpu" else "dense"
    return KernelIntervals() if name == "kernel" else DENSE_INTERVALS


def frequent_columns(config: TrainConfig) -> int:
    """Columns of a run's sampled vocabulary that are left for the corpus's frequent tokens.

    Raises:
        ValueError: so few columns that a batch's own tokens might not fit.
    """
    tokens = config.batch_size * config.sequence_length
    if config.vocab_columns is None or config.vocab_columns <= tokens:
        raise ValueError(
            f"vocab_columns {config.vocab_columns} must exceed the {tokens} tokens of a batch: raise it or lower "
            "batch_size"
        )
    return config.vocab_columns - tokens


def sampled_vocabulary(config: TrainConfig, corpus: TokenizedCorpus) -> SampledVocabulary | None:
    """The run's sampled vocabulary: room for every token of a batch, the rest for the corpus's frequent ones.

    Raises:
        ValueError: so few columns that a batch's own tokens might not fit.
    """
    if config.vocab_columns is None:
        return None
    frequent = frequent_tokens(corpus.supervised_counts(), frequent_columns(config))
    return SampledVocabulary(config.vocab_columns, frequent, config.seed)


def initial_params(name: str, target: Target, shape: DrafterConfig) -> Params:
    """Parameters of a saved drafter to start from.

    Raises:
        ValueError: it has another shape than the run's drafter.
    """
    found = load_drafter(name, target)
    differing = [
        f"{field.name} {getattr(found.config, field.name)!r} (the run: {getattr(shape, field.name)!r})"
        for field in dataclasses.fields(DrafterConfig)
        if field.name not in ("num_anchors", "confidence_temperatures")
        and getattr(found.config, field.name) != getattr(shape, field.name)
    ]
    if differing:
        raise ValueError(f"initial_drafter {name!r} has another shape: {'; '.join(differing)}")
    return found.params
