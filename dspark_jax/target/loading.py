"""Load a target: Hugging Face folder or hub name, GGUF file, or the packaged name `smollm2-135m`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from dspark_jax.config import DecoderConfig
from dspark_jax.files import smollm2_gguf
from dspark_jax.huggingface import SafetensorsFolder, StoredTensor, decoder_config, read_json, resolve_folder
from dspark_jax.sharding import parameter_spec
from dspark_jax.target.gguf import read_gguf
from dspark_jax.target.tokenizer import load_tokenizer, stop_token_ids
from dspark_jax.target.transformer import Transformer
from dspark_jax.types import ChatOptions, Params, TargetTables

Tensor = np.ndarray | StoredTensor
PACKAGED_TARGETS = ("smollm2-135m",)
_TEXT_PART = "model.language_model."
_HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")


@dataclasses.dataclass(frozen=True)
class Target:
    """A loaded target.

    Attributes:
        name: name or path it was loaded from.
        config: its shape.
        params: decoder parameters.
        tables: embedding and head.
        tokenizer: a transformers tokenizer; None for folders without one.
        stop_token_ids: tokens that end a response.
        dtype: type of weights, products and caches.
        chat: how conversations become its prompts.
    """

    name: str
    config: DecoderConfig
    params: Params
    tables: TargetTables
    tokenizer: Any
    stop_token_ids: tuple[int, ...]
    dtype: Any
    chat: ChatOptions = dataclasses.field(default_factory=ChatOptions)


def load_target(
    name_or_path: str, *, dtype: Any = jnp.float32, mesh: Mesh | None = None, chat: ChatOptions | None = None
) -> Target:
    """Load a target for inference or as the frozen half of training.

    Args:
        name_or_path: `smollm2-135m`, a `.gguf` file, a Hugging Face folder, or a hub name.
        dtype: type of weights, products and caches (float32 or bfloat16).
        mesh: each of its devices gets its own part of every tensor, and of safetensors no host reads more than the
            parts of its devices; None puts all on the default device.
        chat: how conversations become its prompts; the defaults when None.

    Raises:
        FileNotFoundError: the file, folder or hub name cannot be had.
        ValueError: a family or key that is not supported, a tensor that is missing, unknown or mis-shaped.
    """
    if name_or_path in PACKAGED_TARGETS:
        source: Path = smollm2_gguf()
    elif name_or_path.endswith(".gguf"):
        source = Path(name_or_path).expanduser()
        if not source.exists():
            raise FileNotFoundError(f"{source} does not exist; give a .gguf file, a model folder or a hub name")
    else:
        source = resolve_folder(name_or_path, _HUB_FILES)
    if source.suffix == ".gguf":
        config, arrays = read_gguf(source)
        tensors: Mapping[str, Tensor] = arrays
        tokenizer: Any = load_tokenizer(source)
        generation = None
    else:
        config = decoder_config(read_json(source / "config.json"), str(source / "config.json"))
        folder = SafetensorsFolder(source)
        tensors = {name: folder.tensor(name) for name in folder.names()}
        has_tokenizer = (source / "tokenizer.json").exists() or (source / "tokenizer_config.json").exists()
        tokenizer = load_tokenizer(source) if has_tokenizer else None
        generation_file = source / "generation_config.json"
        generation = read_json(generation_file) if generation_file.exists() else None
    params, tables = build_params(config, tensors, dtype, str(source), mesh)
    return Target(
        name=name_or_path,
        config=config,
        params=params,
        tables=tables,
        tokenizer=tokenizer,
        stop_token_ids=stop_token_ids(tokenizer, generation)
        if tokenizer is not None
        else _configured_stops(generation),
        dtype=dtype,
        chat=chat or ChatOptions(),
    )


def _configured_stops(generation: dict[str, Any] | None) -> tuple[int, ...]:
    """Stop tokens of a folder without a tokenizer: what generation_config.json says, or none."""
    ids = (generation or {}).get("eos_token_id")
    return tuple(ids) if isinstance(ids, list) else () if ids is None else (int(ids),)


def build_params(
    config: DecoderConfig, tensors: Mapping[str, Tensor], dtype: Any, where: str, mesh: Mesh | None = None
) -> tuple[Params, TargetTables]:
    """Arrange checkpoint tensors as parameters and tables, on a mesh where there is one.

    Raises:
        ValueError: a missing, mis-shaped or left-over tensor, named.
    """

    def put(path: str, tensor: Tensor) -> jax.Array:
        if mesh is None:
            return jnp.asarray(tensor[...], dtype)
        layout = NamedSharding(mesh, parameter_spec(path, tensor.shape, mesh))
        read = lambda index: np.asarray(tensor[index]).astype(dtype)  # noqa: E731
        return jax.make_array_from_callback(tuple(tensor.shape), layout, read)

    left = _decoder_tensors(tensors)
    if "embed_tokens.weight" not in left:
        raise ValueError(f"{where}: tensor 'embed_tokens.weight' is missing")
    # The table's own rows decide which ids exist: some configs state a padded vocabulary.
    rows = min(left["embed_tokens.weight"].shape[0], config.vocab_size)
    shape = (rows, config.hidden_size)
    embed = put("embed", _take(left, "embed_tokens.weight", shape, where))
    if "lm_head.weight" in left and not config.tie_word_embeddings:
        head = put("head", _take(left, "lm_head.weight", shape, where))
    elif config.tie_word_embeddings:
        left.pop("lm_head.weight", None)
        head = embed
    else:
        raise ValueError(f"{where}: tensor 'lm_head.weight' is missing and tie_word_embeddings is false")
    params = jax.tree_util.tree_map_with_path(
        lambda path, leaf: put(
            "/".join(key.key for key in path), _take(left, checkpoint_name(path), leaf.shape, where)
        ),
        parameter_shapes(config),
    )
    if left:
        raise ValueError(
            f"{where}: unknown tensors {sorted(left)[:8]} ({len(left)} in all); the config does not account for them"
        )
    return params, TargetTables(embed=embed, head=head, embed_scale=config.embed_scale, soft_cap=config.soft_cap)


def _decoder_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of the decoder and the head, without prefix; what a multimodal checkpoint holds besides is left out."""
    if any(name.startswith(_TEXT_PART) for name in tensors):
        tensors = {
            name: value for name, value in tensors.items() if name.startswith(_TEXT_PART) or name == "lm_head.weight"
        }
    left = {name.removeprefix(_TEXT_PART).removeprefix("model."): value for name, value in tensors.items()}
    return {name: value for name, value in left.items() if not name.endswith("rotary_emb.inv_freq")}


def parameter_shapes(config: DecoderConfig) -> Params:
    """Abstract decoder parameters of a config, without allocating them."""

    def init(key: jax.Array) -> Params:
        x, positions = jnp.zeros((1, config.hidden_size)), jnp.zeros((1,), jnp.int32)
        return Transformer(config).init(key, x, positions, lambda spec, q, k, v, cache: (q, cache))["params"]

    return jax.eval_shape(init, jax.random.key(0))


def checkpoint_name(path: tuple[Any, ...]) -> str:
    """Checkpoint name of a parameter path: `layers_0/mlp/up_proj/weight` is `layers.0.mlp.up_proj.weight`."""
    return re.sub(r"layers_(\d+)", r"layers.\1", ".".join(key.key for key in path))


def _take(tensors: dict[str, Tensor], name: str, shape: tuple[int, ...], where: str) -> Tensor:
    if name not in tensors:
        raise ValueError(f"{where}: tensor {name!r} is missing")
    value = tensors.pop(name)
    if value.shape != tuple(shape):
        raise ValueError(f"{where}: tensor {name!r} has shape {value.shape}, the config asks for {tuple(shape)}")
    return value
