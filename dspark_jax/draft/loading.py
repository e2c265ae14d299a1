"""Load and save drafters in the DeepSpec layout: `config.json` and safetensors, names and values bit for bit."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors.numpy import save

from dspark_jax.config import DecoderConfig, DrafterConfig
from dspark_jax.draft.contract import Drafter
from dspark_jax.draft.dspark import DSparkFunctions
from dspark_jax.draft.eagle3 import Eagle3Functions
from dspark_jax.draft.vocabulary import VOCABULARY, read_vocabulary, vocabulary_tensors
from dspark_jax.files import atomic_write
from dspark_jax.huggingface import (
    GEMMA4_FAMILIES,
    SafetensorsFolder,
    decoder_config,
    decoder_json,
    read_json,
    resolve_folder,
)
from dspark_jax.types import Params, TargetTables

PRETRAINED = Path(__file__).resolve().parents[1] / "pretrained"
# DeepSpec has no MTP: that name is ours, the rest of its files is like EAGLE-3's.
_ARCHITECTURES: dict[str, Literal["dspark", "eagle3", "mtp"]] = {
    "Qwen3DSparkModel": "dspark",
    "Qwen3Eagle3Model": "eagle3",
    "Qwen3MtpModel": "mtp",
    "Gemma4DSparkModel": "dspark",
    "Gemma4Eagle3Model": "eagle3",
    "Gemma4MtpModel": "mtp",
}
_TARGET_TENSORS = ("embed_tokens.weight", "lm_head.weight")
# Entries of config.json that are this package's own; other readers of the layout ignore the key as a whole.
_OWN = "dspark_jax"


def shipped_drafters() -> tuple[str, ...]:
    """Names of the drafters inside the package, for `load_drafter` and `--draft`."""
    return (
        tuple(sorted(p.name for p in PRETRAINED.iterdir() if (p / "config.json").exists()))
        if PRETRAINED.exists()
        else ()
    )


def functions_for(config: DrafterConfig, dtype: Any = jnp.float32) -> DSparkFunctions | Eagle3Functions:
    """The contract's functions for a drafter config.

    Raises:
        ValueError: a kind that is not loaded from a checkpoint.
    """
    _check_stored(config)
    return DSparkFunctions(config, dtype) if config.kind == "dspark" else Eagle3Functions(config, dtype)


def drafter_folder(name_or_path: str) -> Path:
    """Folder of a drafter: a shipped name's, a folder itself, or the local copy of a hub name.

    Raises:
        FileNotFoundError: no such shipped name, folder or hub name.
    """
    if name_or_path in shipped_drafters():
        return PRETRAINED / name_or_path
    return resolve_folder(name_or_path, ("*.json", "*.safetensors"))


def load_drafter(name_or_path: str, target: Any) -> Drafter:
    """Load a drafter for a target.

    Args:
        name_or_path: a shipped name (`shipped_drafters()`), a folder, or a hub name.
        target: the `Target` it drafts for; embedding and head come from there and are not copied. The drafter's
            products and caches take the target's dtype.

    Raises:
        FileNotFoundError: no such shipped name, folder or hub name.
        ValueError: another layout, a drafter of another target, an unknown, missing or mis-shaped tensor, by name.
    """
    folder = drafter_folder(name_or_path)
    config = drafter_config(read_json(folder / "config.json"), str(folder / "config.json"))
    files = SafetensorsFolder(folder)
    tensors = {name: files.read(name) for name in files.names()}
    _check_target(config, target, folder)
    reduced = read_vocabulary(tensors, config.draft_vocab_size, target.tables, str(folder))
    size = len(reduced[VOCABULARY]["ids"]) if reduced else None
    config = dataclasses.replace(config, draft_vocab_size=size)
    for name in _TARGET_TENSORS:
        _check_target_tensor(name, tensors.pop(name, None), target.tables, folder)
    functions = functions_for(config, target.dtype)
    params = arrange_params(functions, tensors, str(folder))
    return Drafter(name_or_path, config, {**params, **reduced}, functions, target.tables)


def arrange_params(functions: DSparkFunctions | Eagle3Functions, tensors: dict[str, np.ndarray], where: str) -> Params:
    """Arrange checkpoint tensors as float32 parameters (float32 holds every stored bfloat16 exactly).

    Raises:
        ValueError: an unknown, missing or mis-shaped tensor, by name.
    """
    width = functions.config.feature_width
    shapes = jax.eval_shape(lambda key: functions.initialise(key, width), jax.random.key(0))
    left = dict(tensors)

    def take(path: tuple[Any, ...], leaf: Any) -> jax.Array:
        name = tensor_name(path)
        if name not in left:
            raise ValueError(f"{where}: tensor {name!r} is missing")
        value = left.pop(name)
        if value.shape != leaf.shape:
            raise ValueError(f"{where}: tensor {name!r} has shape {value.shape}, the config asks for {leaf.shape}")
        return jnp.asarray(value, jnp.float32)

    params = jax.tree_util.tree_map_with_path(take, shapes)
    if left:
        raise ValueError(
            f"{where}: unknown tensors {sorted(left)[:8]} ({len(left)} in all) for {functions.config.name}"
        )
    return params


def tensor_name(path: tuple[Any, ...]) -> str:
    """Checkpoint name of a parameter path: `layers_0/self_attn/q_proj/weight` is `layers.0.self_attn.q_proj.weight`."""
    return re.sub(r"layers_(\d+)", r"layers.\1", ".".join(key.key for key in path))


def save_drafter(
    drafter: Drafter,
    path: str | Path,
    *,
    include_target_tensors: bool = False,
    extra: dict[str, Any] | None = None,
) -> None:
    """Write a drafter in the DeepSpec layout, weights as bfloat16.

    Args:
        drafter: what to save.
        path: folder, created if needed; files are replaced atomically, weights before the config.
        include_target_tensors: also write `embed_tokens.weight` and `lm_head.weight`, which other engines expect.
        extra: further entries of `config.json` (training provenance).

    Raises:
        ValueError: `include_target_tensors` for a drafter that was not loaded with its target, or a kind that has no
            checkpoint of its own.
    """
    _check_stored(drafter.config)
    params = dict(drafter.params)
    reduced = params.pop(VOCABULARY, None)
    tensors = {tensor_name(p): np.asarray(x, ml_dtypes.bfloat16) for p, x in _leaves(params)}
    if include_target_tensors:
        if drafter.tables is None:
            raise ValueError(
                f"include_target_tensors: drafter {drafter.name!r} came without its target's tables; load it with "
                "load_drafter(path, target)"
            )
        tensors["embed_tokens.weight"] = np.asarray(drafter.tables.embed, ml_dtypes.bfloat16)
        tensors["lm_head.weight"] = np.asarray(drafter.tables.head, ml_dtypes.bfloat16)
    if reduced is not None:
        tensors |= vocabulary_tensors(reduced, drafter, with_head=include_target_tensors)
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(folder / "model.safetensors") as f:
        f.write(save(tensors, metadata={"format": "pt"}))
    with atomic_write(folder / "config.json", "w") as f:
        json.dump({**config_json(drafter.config), **(extra or {})}, f, indent=2)
        f.write("\n")


def _check_stored(config: DrafterConfig) -> None:
    if config.kind not in _ARCHITECTURES.values():
        raise ValueError(
            f"a drafter of kind {config.kind!r} ({config.name}) has no checkpoint of its own: make it with "
            "ngram_drafter or independent_drafter"
        )


def _leaves(params: Params) -> list[tuple[tuple[Any, ...], jax.Array]]:
    return jax.tree_util.tree_flatten_with_path(params)[0]


def drafter_config(config: dict[str, Any], where: str) -> DrafterConfig:
    """Translate a draft checkpoint's `config.json`.

    Raises:
        ValueError: not a DeepSpec draft checkpoint; the layout found is named.
    """
    architectures = config.get("architectures") or []
    kind = next((_ARCHITECTURES[a] for a in architectures if a in _ARCHITECTURES), None)
    if kind is None:
        raise ValueError(
            f"{where}: architectures {architectures} is not a draft checkpoint in the DeepSpec layout; supported are "
            f"{', '.join(_ARCHITECTURES)}. {_other_layout(config)}"
        )
    if config.get("sample_from_anchor") is False:
        raise ValueError(
            f"{where}: sample_from_anchor is false (predictions from slot 1): another block layout, not supported"
        )
    decoder = decoder_config(config, where)
    if (expected := _architecture(kind, decoder)) not in architectures:
        raise ValueError(
            f"{where}: architectures is {architectures}, model_type {decoder.family!r} goes with {expected}"
        )
    common: dict[str, Any] = {
        "decoder": decoder,
        "target_layers": int(_required(config, "num_target_layers", where)),
        "target_layer_ids": tuple(int(i) for i in _required(config, "target_layer_ids", where)),
        "confidence_temperatures": _temperatures(config, where),
        "draft_vocab_size": None if (size := config.get("draft_vocab_size")) is None else int(size),
    }
    if kind in ("eagle3", "mtp"):
        return DrafterConfig(
            kind=kind,
            block_size=int(config.get("ttt_length", 7 if kind == "eagle3" else 1)),
            step_loss_decay=float(config.get("step_loss_decay", 0.8)),
            **common,
        )
    return DrafterConfig(
        kind="dspark",
        block_size=int(_required(config, "block_size", where)),
        mask_token_id=int(_required(config, "mask_token_id", where)),
        markov_rank=int(config.get("markov_rank") or 0),
        markov_head=config.get("markov_head_type") or "vanilla",
        confidence_head=bool(config.get("enable_confidence_head", False)),
        confidence_with_markov=bool(config.get("confidence_head_with_markov", False)),
        num_anchors=int(config.get("num_anchors", 512)),
        **common,
    )


def _architecture(config_kind: str, decoder: DecoderConfig) -> str:
    """Name of a drafter's architecture: whose layers it has, and what it is."""
    layers = "Gemma4" if decoder.family in GEMMA4_FAMILIES else "Qwen3"
    return next(name for name, kind in _ARCHITECTURES.items() if kind == config_kind and name.startswith(layers))


def config_json(config: DrafterConfig) -> dict[str, Any]:
    """The `config.json` of a drafter; `drafter_config` reads it back (empty `layer_types` come back spelled out)."""
    d = config.decoder
    shape = decoder_json(d)
    shared: dict[str, Any] = {
        "num_target_layers": config.target_layers,
        "target_layer_ids": list(config.target_layer_ids),
    }
    if config.draft_vocab_size is not None:
        shared["draft_vocab_size"] = config.draft_vocab_size
    if config.kind != "dspark":
        return {
            "architectures": [_architecture(config.kind, d)],
            **shape,
            **shared,
            "draft_num_hidden_layers": d.num_layers,
            "ttt_length": config.block_size,
            "step_loss_decay": config.step_loss_decay,
        }
    return {
        "architectures": [_architecture(config.kind, d)],
        **shape,
        **shared,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "num_anchors": config.num_anchors,
        "enable_confidence_head": config.confidence_head,
        "confidence_head_with_markov": config.confidence_with_markov,
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head,
        **({} if config.confidence_temperatures is None else _own_entry(config.confidence_temperatures)),
    }


def write_temperatures(
    folder: str | Path, temperatures: Sequence[float], destination: str | Path | None = None
) -> None:
    """Store fitted confidence temperatures in a checkpoint; weights and all other entries stay as they are.

    Args:
        folder: checkpoint of a drafter with a confidence head.
        temperatures: one a position.
        destination: folder that becomes a copy with the temperatures; None changes `folder` itself.

    Raises:
        ValueError: temperatures that do not fit the drafter, or a destination that holds other weights already.
    """
    folder = Path(folder)
    config = {**read_json(folder / "config.json"), **_own_entry(temperatures)}
    drafter_config(config, str(folder / "config.json"))
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and path.name != "config.json"]
    place = folder if destination is None else Path(destination)
    if place.resolve() != folder.resolve():
        other = sorted({path.name for path in place.glob("*.safetensors*")} - {path.name for path in files})
        if other:
            raise ValueError(f"{place} holds {other[0]}, which is no part of {folder}: choose another folder")
        for path in files:
            with path.open("rb") as source, atomic_write(place / path.name) as copy:
                shutil.copyfileobj(source, copy)
    with atomic_write(place / "config.json", "w") as f:
        json.dump(config, f, indent=2)
        f.write("\n")


def _own_entry(temperatures: Sequence[float]) -> dict[str, Any]:
    return {_OWN: {"confidence_temperatures": [float(t) for t in temperatures]}}


def _temperatures(config: dict[str, Any], where: str) -> tuple[float, ...] | None:
    own = config.get(_OWN) or {}
    if unknown := sorted(own.keys() - {"confidence_temperatures"}):
        raise ValueError(f"{where}: {_OWN} holds {unknown}, which this version does not know: use a newer one")
    stored = own.get("confidence_temperatures")
    try:
        return None if stored is None else tuple(float(t) for t in stored)
    except (TypeError, ValueError):
        raise ValueError(f"{where}: confidence_temperatures is {stored!r}: expected a list of numbers") from None


def _required(config: dict[str, Any], key: str, where: str) -> Any:
    if config.get(key) is None:
        raise ValueError(f"{where}: key {key!r} is missing; a draft checkpoint must state it")
    return config[key]


def _other_layout(config: dict[str, Any]) -> str:
    if "speculators_config" in config or "speculators_model_type" in config:
        return "This is the speculators layout, which is not read yet."
    if any("DFlash" in a for a in config.get("architectures") or []):
        return "This is a z-lab DFlash checkpoint: it predicts from slot 1 (one draft fewer), a different model."
    return "A target model belongs to --target."


def _check_target(config: DrafterConfig, target: Any, folder: Path) -> None:
    """Refuse a drafter made for another target, naming both numbers."""
    found, expected = config.decoder, target.config
    for what, a, b in (
        ("hidden_size", found.hidden_size, expected.hidden_size),
        ("num_target_layers", config.target_layers, expected.num_layers),
        ("final_logit_softcapping", found.soft_cap, expected.soft_cap),
        ("embeddings scaled by", found.embed_scale, expected.embed_scale),
    ):
        if a != b:
            raise ValueError(f"{folder}: the drafter was made for {what} {a}, target {target.name!r} has {b}")
    rows = target.tables.embed.shape[0]
    if found.vocab_size < rows:
        raise ValueError(
            f"{folder}: vocab_size is {found.vocab_size}, the target has {rows} tokens: a reduced vocabulary is "
            "draft_vocab_size with a d2t map, vocab_size stays the target's"
        )
    if config.mask_token_id is not None and config.mask_token_id >= rows:
        raise ValueError(
            f"{folder}: mask_token_id {config.mask_token_id} is not a row of the target's embedding table ({rows} rows)"
        )


def _check_target_tensor(name: str, value: np.ndarray | None, tables: TargetTables, folder: Path) -> None:
    """A checkpoint may carry the target's tables; they are checked against the target and then dropped."""
    if value is None:
        return
    own = tables.embed if name.startswith("embed") else tables.head
    rows = own.shape[0]
    if value.shape[1:] != own.shape[1:] or value.shape[0] < rows:
        raise ValueError(f"{folder}: tensor {name!r} has shape {value.shape}, the target's table {tuple(own.shape)}")
    sample = slice(None, None, max(1, rows // 64))
    stored, held = value[:rows][sample].astype(np.float32), np.asarray(own[sample], np.float32)
    # bfloat16 keeps 8 bits: anything further apart is another model's table.
    if not np.allclose(stored, held, rtol=2**-7, atol=1e-3):
        raise ValueError(
            f"{folder}: tensor {name!r} differs from the target's own; the drafter belongs to another target"
        )
