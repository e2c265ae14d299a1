"""DSpark speculative decoding in JAX: train, measure and run drafters.

Public names, each imported on first use so that `import dspark_jax` costs nothing:

Models
    load_target, Target: the frozen language model.
    load_drafter, save_drafter, shipped_drafters, Drafter: what proposes blocks of tokens.
    ngram_drafter, independent_drafter: drafters that need no training: prompt lookup, another language model.
Generation
    generate: decode prompts, with or without a drafter.
    Generation, Round, Timings: what it returns.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dspark_jax.draft.contract import Drafter
    from dspark_jax.draft.loading import load_drafter, save_drafter, shipped_drafters
    from dspark_jax.draft.ngram import ngram_drafter
    from dspark_jax.engine.drafters import independent_drafter
    from dspark_jax.engine.generate import generate
    from dspark_jax.engine.results import Generation, Round, Timings
    from dspark_jax.target.loading import Target, load_target

    __version__: str

# transformers serves as a tokenizer library here: that it finds no PyTorch is no news.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

_MODULE_OF = {
    # Models
    "Target": "dspark_jax.target.loading",
    "load_target": "dspark_jax.target.loading",
    "Drafter": "dspark_jax.draft.contract",
    "load_drafter": "dspark_jax.draft.loading",
    "save_drafter": "dspark_jax.draft.loading",
    "shipped_drafters": "dspark_jax.draft.loading",
    "ngram_drafter": "dspark_jax.draft.ngram",
    "independent_drafter": "dspark_jax.engine.drafters",
    # Generation
    "generate": "dspark_jax.engine.generate",
    "Generation": "dspark_jax.engine.results",
    "Round": "dspark_jax.engine.results",
    "Timings": "dspark_jax.engine.results",
}

__all__ = [
    "Drafter",
    "Generation",
    "Round",
    "Target",
    "Timings",
    "__version__",
    "generate",
    "independent_drafter",
    "load_drafter",
    "load_target",
    "ngram_drafter",
    "save_drafter",
    "shipped_drafters",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("dspark-jax")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'dspark_jax' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    # The next access finds it without coming here.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
