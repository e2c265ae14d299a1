"""Hugging Face files: `config.json` to our configurations, safetensors folders to arrays, names to folders."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from dspark_jax.config import DecoderConfig, RopeConfig

SUPPORTED_FAMILIES = ("llama", "qwen3")

# Keys that would change the mathematics, with the values that mean "off". Anything else is refused by name.
_OFF_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attn_logit_softcapping": (None, 0),
    "final_logit_softcapping": (None, 0),
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


def rope_config(config: dict[str, Any], where: str) -> RopeConfig:
    """Read RoPE from either the older (`rope_theta`, `rope_scaling`) or the newer (`rope_parameters`) keys.

    Raises:
        ValueError: an interpolation that is not implemented, named.
    """
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise ValueError(f"{where}: rope type {kind!r} is not implemented (default, linear and llama3 are)")
    theta = scaling.get("rope_theta", config.get("rope_theta", 10_000.0))
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
    scaling = None if rope.kind == "default" else {k: v for k, v in parameters.items() if k != "rope_theta"}
    return {"rope_theta": rope.theta, "rope_scaling": scaling, "rope_parameters": parameters}


def decoder_config(config: dict[str, Any], where: str = "config.json") -> DecoderConfig:
    """Translate a Llama or Qwen3 `config.json`.

    Args:
        config: the parsed file.
        where: path named in errors.

    Raises:
        ValueError: another family, or a key that changes the mathematics and is not implemented.
    """
    family = config.get("model_type")
    if family not in SUPPORTED_FAMILIES:
        raise ValueError(
            f"{where}: model_type {family!r} is not supported; supported are {', '.join(SUPPORTED_FAMILIES)}"
        )
    for key, off in _OFF_VALUES.items():
        if key in config and config[key] not in off:
            raise ValueError(f"{where}: {key} = {config[key]!r} changes the mathematics and is not implemented")
    layers, heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
    window = config.get("sliding_window")
    return DecoderConfig(
        family=family,
        vocab_size=int(config["vocab_size"]),
        hidden_size=int(config["hidden_size"]),
        intermediate_size=int(config["intermediate_size"]),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
        rms_norm_eps=float(config["rms_norm_eps"]),
        rope=rope_config(config, where),
        max_position=int(config["max_position_embeddings"]),
        qk_norm=family == "qwen3",
        attention_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        layer_types=_layer_types(config, layers, where),
        sliding_window=int(window) if window else None,
        initializer_range=float(config.get("initializer_range", 0.02)),
    )


def _layer_types(config: dict[str, Any], layers: int, where: str) -> tuple[Any, ...]:
    """Read `layer_types`, or derive it from Qwen's older `use_sliding_window` and `max_window_layers`."""
    kinds = config.get("layer_types")
    if kinds is None and config.get("use_sliding_window") and config.get("sliding_window"):
        first = int(config.get("max_window_layers", layers))
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    for kind in kinds or ():
        if kind not in ("full_attention", "sliding_attention"):
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
