"""Drafters by name, those among them that need a second language model included."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxtyping import Array, Float

from dspark_jax.config import DecoderConfig, DrafterConfig
from dspark_jax.draft.contract import Drafter
from dspark_jax.draft.language_model import LanguageModelFunctions
from dspark_jax.draft.loading import load_drafter
from dspark_jax.draft.ngram import ngram_drafter
from dspark_jax.nn.attention import RaggedPlan
from dspark_jax.target.loading import Target, load_target
from dspark_jax.target.transformer import create_caches, forward_ragged
from dspark_jax.types import Params, TargetTables

NGRAM = "ngram"
LANGUAGE_MODEL = "lm:"


@dataclasses.dataclass(frozen=True)
class TargetModel:
    """A target as the functions that a language-model drafter is handed.

    Its parameters are `{"decoder": …, "embed": …, "head": …}`, without a head where the target ties it to the
    embedding.

    Attributes:
        config: its shape.
        dtype: type of its products and caches.
        embed_scale, soft_cap: as in its `TargetTables`.
    """

    config: DecoderConfig
    dtype: Any
    embed_scale: float
    soft_cap: float | None

    def create_caches(self, slots: int, length: int) -> Any:
        """Empty caches, one a layer."""
        return create_caches(self.config, slots, length, self.dtype)

    def forward(self, params: Params, caches: Any, plan: RaggedPlan) -> tuple[Float[Array, "T D"], Any]:
        """Last hidden states of ragged rows, and the caches with the rows written."""
        tables = self._tables(params)
        features, caches = forward_ragged(self.config, params["decoder"], tables, caches, plan, (), self.dtype)
        assert features.last_hidden is not None
        return features.last_hidden, caches

    def logits(self, params: Params, hidden: Float[Array, "S D"]) -> Float[Array, "S V"]:
        """Float32 logits over its own table."""
        return self._tables(params).logits(hidden, self.dtype)

    def _tables(self, params: Params) -> TargetTables:
        head = params["head"] if "head" in params else params["embed"]
        return TargetTables(params["embed"], head, embed_scale=self.embed_scale, soft_cap=self.soft_cap)


def find_drafter(name: str, target: Target) -> Drafter:
    """The drafter of a name: `ngram`, `lm:NAME` for the language model NAME, else what `load_drafter` finds.

    Args:
        name: as above; NAME is whatever `load_target` takes.
        target: the model it drafts for; a language model is loaded in its dtype.

    Raises:
        FileNotFoundError: nothing of that name.
        ValueError: a drafter that does not belong to the target.
    """
    if name == NGRAM:
        return ngram_drafter(target)
    if name.startswith(LANGUAGE_MODEL):
        model = load_target(name.removeprefix(LANGUAGE_MODEL), dtype=target.dtype)
        return independent_drafter(model, target)
    return load_drafter(name, target)


def independent_drafter(model: Target, target: Target, *, block_size: int = 5) -> Drafter:
    """Let one language model draft for another (speculative decoding as first proposed).

    Args:
        model: drafts; worth it where it is several times faster than the target.
        target: the model whose text it is.
        block_size: draft tokens a round.

    Raises:
        ValueError: the two do not share their vocabulary. Where one of them came without a tokenizer, only the sizes
            of their tables can be compared.
    """
    _check_shared_vocabulary(model, target)
    config = DrafterConfig(
        kind="lm",
        decoder=model.config,
        target_layers=target.config.num_layers,
        target_layer_ids=(),
        block_size=block_size,
    )
    tables = model.tables
    functions = LanguageModelFunctions(
        model=TargetModel(model.config, model.dtype, tables.embed_scale, tables.soft_cap),
        block_size=block_size,
        vocab_size=target.tables.embed.shape[0],
    )
    params = {"decoder": model.params, "embed": tables.embed}
    if tables.head is not tables.embed:
        params["head"] = tables.head
    return Drafter(f"{LANGUAGE_MODEL}{model.name}", config, params, functions, target.tables)


def _check_shared_vocabulary(model: Target, target: Target) -> None:
    rows, needed = model.tables.embed.shape[0], target.tables.embed.shape[0]
    if rows < needed:
        raise ValueError(
            f"language model {model.name!r} has a table of {rows} tokens, target {target.name!r} one of {needed}: a "
            "drafter must know every token of the target; choose a model of the same family"
        )
    if model.tokenizer is None or target.tokenizer is None:
        return
    own, expected = model.tokenizer.get_vocab(), target.tokenizer.get_vocab()
    differing = sorted((number, token) for token, number in expected.items() if own.get(token) != number)
    if differing:
        number, token = differing[0]
        raise ValueError(
            f"language model {model.name!r} and target {target.name!r} have different vocabularies: token {token!r} is "
            f"{number} for the target and {own.get(token, 'unknown')} for the model ({len(differing)} tokens differ); "
            "choose a model of the same family"
        )
