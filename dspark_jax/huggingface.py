"""Hugging Face files: `config.json` to our configurations, safetensors folders to arrays, names to folders."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from dspark_jax.config import AttentionShape, DecoderConfig, RopeConfig

# `model_type` of text decoders; those of Gemma-4's multimodal models hold one of these as `text_config`.
GEMMA4_FAMILIES = ("gemma4_text", "gemma4_unified_text")
SUPPORTED_FAMILIES = ("llama", "qwen3", *GEMMA4_FAMILIES)
LAYER_TYPES = ("sliding_attention", "full_attention")
_OF_THE_WHOLE = ("tie_word_embeddings", "quantization_config")
_MULTIMODAL = ("gemma4", "gemma4_unified")

# Keys that would change the mathematics, with the values that mean "off". Anything else is refused by name.
_OFF_VALUES: dict[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (None, 0),
    "partial_rotary_factor": (None, 1, 1.0),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "residual_multiplier": (None, 1, 1.0),
    "embedding_multiplier": (None, 1, 1.0),
    "attention_multiplier": (None,),
    "logits_scaling": (None, 1, 1.0),
    "query_pre_attn_scalar": (None,),
    "quantization_config": (None,),
    "no_rope_layers": (None, []),
    "attention_chunk_size": (None,),
}
_LLAMA_OFF_VALUES = {"hidden_act": ("silu", "swish"), "final_logit_softcapping": (None, 0)}
_GEMMA4_OFF_VALUES = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "hidden_size_per_layer_input": (None, 0),
    "enable_moe_block": (None, False),
    "num_kv_shared_layers": (None, 0),
    "use_double_wide_mlp": (None, False),
    # Images alone: text stays causal.
    "use_bidirectional_attention": (None, "vision"),
}


def rope_config(config: dict[str, Any], where: str) -> RopeConfig:
    """Read RoPE from either the older (`rope_theta`, `rope_scaling`) or the newer (`rope_parameters`) keys.

    Raises:
        ValueError: an interpolation that is not implemented, named.
    """
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "linear", "llama3", "proportional"):
        raise ValueError(
            f"{where}: rope type {kind!r} is not implemented (default, linear, llama3 and proportional are)"
        )
    theta, rotated = scaling.get("rope_theta", config.get("rope_theta", 10_000.0)), scaling.get("partial_rotary_factor")
    if kind == "proportional":
        return RopeConfig(
            theta=float(theta),
            kind="proportional",
            factor=float(scaling.get("factor", 1.0)),
            rotated=float(1.0 if rotated is None else rotated),
        )
    if rotated not in (None, 1):
        raise ValueError(f"{where}: partial_rotary_factor = {rotated} is not implemented for rope type {kind!r}")
    if kind == "default":
        return RopeConfig(theta=float(theta))
    if kind == "linear":
        return RopeConfig(theta=float(theta), kind="linear", factor=float(scaling["factor"]))
    return RopeConfig(
        theta=float(theta),
        kind="llama3",
        factor=float(scaling["factor"]),
        low_freq_factor=float(scaling["low_freq_factor"]),
        high_freq_factor=float(scaling["high_freq_factor"]),
        original_max_position=int(scaling["original_max_position_embeddings"]),
    )


def rope_keys(rope: RopeConfig) -> dict[str, Any]:
    """Return both the older and the newer RoPE keys for a `config.json`."""
    parameters: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind != "default":
        parameters["factor"] = rope.factor
    if rope.kind == "llama3":
        parameters |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_position,
        }
    if rope.kind == "proportional":
        parameters["partial_rotary_factor"] = rope.rotated
    scaling = None if rope.kind == "default" else {k: v for k, v in parameters.items() if k != "rope_theta"}
    return {"rope_theta": rope.theta, "rope_scaling": scaling, "rope_parameters": parameters}


def decoder_config(config: dict[str, Any], where: str = "config.json") -> DecoderConfig:
    """Translate the `config.json` of a Llama, Qwen3 or Gemma-4 decoder; `decoder_json` is its inverse.

    Args:
        config: the parsed file; of a multimodal Gemma-4 the text decoder is read.
        where: path named in errors.

    Raises:
        ValueError: another family, or a key that changes the mathematics and is not implemented.
    """
    if config.get("model_type") in _MULTIMODAL:
        whole = {key: value for key, value in config.items() if key in _OF_THE_WHOLE}
        config = {**whole, **_stated(config, "text_config", where)}
    family = config.get("model_type")
    if family not in SUPPORTED_FAMILIES:
        raise ValueError(
            f"{where}: model_type {family!r} is not supported; supported are {', '.join(SUPPORTED_FAMILIES)}"
        )
    gemma4 = family in GEMMA4_FAMILIES
    for key, off in (_OFF_VALUES | (_GEMMA4_OFF_VALUES if gemma4 else _LLAMA_OFF_VALUES)).items():
        if key in config and config[key] not in off:
            raise ValueError(f"{where}: {key} = {config[key]!r} changes the mathematics and is not implemented")
    layers, heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
    window = config.get("sliding_window")
    common: dict[str, Any] = {
        "family": family,
        "vocab_size": int(config["vocab_size"]),
        "hidden_size": int(config["hidden_size"]),
        "intermediate_size": int(config["intermediate_size"]),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": int(config.get("num_key_value_heads") or heads),
        "head_dim": int(config.get("head_dim") or config["hidden_size"] // heads),
        "rms_norm_eps": float(config["rms_norm_eps"]),
        "max_position": int(config["max_position_embeddings"]),
        "attention_bias": bool(config.get("attention_bias", False)),
        "mlp_bias": bool(config.get("mlp_bias", False)),
        "layer_types": _layer_types(config, layers, where),
        "sliding_window": int(window) if window else None,
        "initializer_range": float(config.get("initializer_range", 0.02)),
    }
    if gemma4:
        return DecoderConfig(**common, **_gemma4(config, where))
    return DecoderConfig(
        rope=rope_config(config, where),
        qk_norm=family == "qwen3",
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        **common,
    )


def _gemma4(config: dict[str, Any], where: str) -> dict[str, Any]:
    """What Gemma-4 has besides: two kinds of layers, norms on all sides, scales.

    Raises:
        ValueError: a key that the family's files state and this one does not: its default would be a guess.
    """
    for key in ("head_dim", "layer_types", "hidden_activation"):
        _stated(config, key, where)
    if config["model_type"] == "gemma4_text":
        _stated(config, "hidden_size_per_layer_input", where)
    ropes = {kind: _stated(_stated(config, "rope_parameters", where), kind, where) for kind in LAYER_TYPES}
    rope, full_rope = (rope_config({"rope_parameters": ropes[kind]}, where) for kind in LAYER_TYPES)
    kv_heads, head_dim = _full_heads(config, where)
    shared, soft_cap = bool(config.get("attention_k_eq_v", False)), config.get("final_logit_softcapping")
    return {
        "rope": rope,
        "full_attention": AttentionShape(
            num_kv_heads=kv_heads, head_dim=head_dim, rope=full_rope, keys_are_values=shared
        ),
        "qk_norm": True,
        "value_norm": True,
        "attention_scale": 1.0,
        "activation": "gelu_tanh",
        "sandwich_norms": True,
        "layer_scalar": True,
        "embed_scale": float(config["hidden_size"]) ** 0.5,
        "soft_cap": float(soft_cap) if soft_cap else None,
        "tie_word_embeddings": config.get("tie_word_embeddings") is not False,
    }


def _full_heads(config: dict[str, Any], where: str) -> tuple[int, int]:
    """Number and width of the K/V heads of full-attention layers.

    Released files state them once; newer transformers rewrite them as overrides of single layers (`per_layer_config`).
    """
    heads = int(_stated(config, "num_key_value_heads", where))
    if config.get("per_layer_config") is None:
        if config.get("attention_k_eq_v"):
            heads = int(config.get("num_global_key_value_heads") or heads)
        return heads, int(_stated(config, "global_head_dim", where))
    own = {int(layer): dict(changes) for layer, changes in config["per_layer_config"].items()}
    full = [own.pop(i, {}) for i, kind in enumerate(config["layer_types"]) if kind == "full_attention"] or [{}]
    if own or any(x != full[0] for x in full) or not full[0].keys() <= {"head_dim", "num_key_value_heads"}:
        raise ValueError(
            f"{where}: per_layer_config is implemented for head_dim and num_key_value_heads of full_attention layers, "
            "the same in all of them"
        )
    return int(full[0].get("num_key_value_heads", heads)), int(full[0].get("head_dim", config["head_dim"]))


def _stated(config: dict[str, Any], key: str, where: str) -> Any:
    if config.get(key) is None:
        raise ValueError(f"{where}: key {key!r} is missing: Gemma-4 files state it, and its default would be a guess")
    return config[key]


def decoder_json(decoder: DecoderConfig) -> dict[str, Any]:
    """The entries of a drafter's `config.json` that describe its layers; `decoder_config` reads them back.

    Empty `layer_types` come back spelled out. Whatever the target does, a drafter ties no tables: it owns none.
    """
    d = decoder
    shape = {
        "model_type": d.family,
        "vocab_size": d.vocab_size,
        "hidden_size": d.hidden_size,
        "intermediate_size": d.intermediate_size,
        "num_hidden_layers": d.num_layers,
        "num_attention_heads": d.num_heads,
        "num_key_value_heads": d.num_kv_heads,
        "head_dim": d.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": d.rms_norm_eps,
        "initializer_range": d.initializer_range,
        "max_position_embeddings": d.max_position,
        "attention_bias": d.attention_bias,
        "attention_dropout": 0.0,
        "layer_types": list(d.layer_types or ("full_attention",) * d.num_layers),
        "sliding_window": d.sliding_window,
        "use_sliding_window": "sliding_attention" in d.layer_types,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    full = d.full_attention
    if full is None:
        return {**shape, **rope_keys(d.rope)}
    for key in ("hidden_act", "use_sliding_window"):  # Gemma-4 has its own name for the first, and layer_types decide
        del shape[key]
    ropes = zip(LAYER_TYPES, (d.rope, full.rope), strict=True)
    return {
        **shape,
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": d.soft_cap,
        "attention_k_eq_v": full.keys_are_values,
        "global_head_dim": full.head_dim,
        "num_global_key_value_heads": full.num_kv_heads,
        "rope_parameters": {kind: rope_keys(rope)["rope_parameters"] for kind, rope in ropes},
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": False,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
    }


def _layer_types(config: dict[str, Any], layers: int, where: str) -> tuple[Any, ...]:
    """Read `layer_types`, or derive it from Qwen's older `use_sliding_window` and `max_window_layers`."""
    kinds = config.get("layer_types")
    if kinds is None and config.get("use_sliding_window") and config.get("sliding_window"):
        first = int(config.get("max_window_layers", layers))
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    for kind in kinds or ():
        if kind not in LAYER_TYPES:
            raise ValueError(
                f"{where}: layer type {kind!r} is not implemented (full_attention and sliding_attention are)"
            )
    return tuple(kinds or ())


def read_json(path: Path) -> dict[str, Any]:
    """Parse a JSON file; errors name it."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path} does not exist; expected a model folder with config.json and safetensors"
        ) from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None


def resolve_folder(name_or_path: str, patterns: Iterable[str]) -> Path:
    """Return the local folder of a model: a path as it is, a hub name downloaded through `huggingface_hub`.

    Args:
        name_or_path: existing folder, or a hub name such as `Qwen/Qwen3-0.6B`.
        patterns: file patterns to download.

    Raises:
        FileNotFoundError: neither a folder nor reachable on the hub; says what to do.
    """
    path = Path(name_or_path).expanduser()
    if path.exists():
        return path
    looks_local = path.is_absolute() or name_or_path.startswith((".", "~")) or name_or_path.count("/") != 1
    if looks_local:
        raise FileNotFoundError(
            f"{name_or_path} does not exist; give a model folder, a .gguf file or a hub name like org/model"
        )
    from huggingface_hub import snapshot_download

    # Without a limit of its own the client retries an unreachable hub for minutes.
    os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", "10")
    try:
        return Path(snapshot_download(name_or_path, allow_patterns=list(patterns)))
    except Exception as error:
        raise FileNotFoundError(
            f"could not get {name_or_path!r} from the Hugging Face hub ({type(error).__name__}: {error}). Check the "
            "name and the network, set HF_TOKEN for gated models, or pass the path of a local folder"
        ) from error


class StoredTensor:
    """A tensor in a safetensors file; indexing reads that part alone."""

    def __init__(self, file: Path, name: str):
        self._file, self._name = file, name
        with safe_open(file, framework="np") as f:
            self.shape: tuple[int, ...] = tuple(f.get_slice(name).get_shape())

    def __getitem__(self, index: Any) -> np.ndarray:
        with safe_open(self._file, framework="np") as f:
            return f.get_tensor(self._name) if index is ... or not self.shape else f.get_slice(self._name)[index]


class SafetensorsFolder:
    """Tensors of a folder with `model.safetensors` or sharded files with an index, read lazily by name."""

    def __init__(self, folder: Path):
        self.folder = folder
        index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
        if index.exists():
            self._file_of = {name: folder / file for name, file in read_json(index)["weight_map"].items()}
        elif single.exists():
            with safe_open(single, framework="np") as f:
                self._file_of = dict.fromkeys(f.keys(), single)
        else:
            raise FileNotFoundError(f"{folder} holds neither model.safetensors nor model.safetensors.index.json")

    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._file_of)

    def tensor(self, name: str) -> StoredTensor:
        """One tensor, not read yet."""
        if name not in self._file_of:
            raise KeyError(f"{self.folder}: tensor {name!r} is missing")
        return StoredTensor(self._file_of[name], name)

    def read(self, name: str) -> np.ndarray:
        """Read one tensor in its stored type (bfloat16 through ml_dtypes)."""
        return self.tensor(name)[...]
