"""Read a GGUF file: decoder config and tensors under checkpoint names, dequantised to float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize

from dspark_jax.config import DecoderConfig
from dspark_jax.huggingface import decoder_config

_ARCHITECTURES = ("llama", "qwen3")
_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_TOP_NAMES = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}


def read_gguf(path: Path) -> tuple[DecoderConfig, dict[str, np.ndarray]]:
    """Read config and tensors.

    Args:
        path: a `.gguf` file of the Llama or Qwen3 family.

    Returns:
        The config and float32 tensors named as in Hugging Face checkpoints (without the `model.` prefix).

    Raises:
        ValueError: another architecture, or a tensor nobody knows.
    """
    reader = GGUFReader(path)
    config = _config(reader, path)
    tensors: dict[str, np.ndarray] = {}
    for tensor in reader.tensors:
        # Frequency factors of llama3-style RoPE travel as a tensor; the config path does not carry them.
        if tensor.name == "rope_freqs.weight":
            raise ValueError(
                f"{path}: RoPE frequency factors in GGUF are not supported; load the original folder instead"
            )
        name = _checkpoint_name(tensor.name, path)
        value = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        if config.family == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_heads if "q_proj" in name else config.num_kv_heads
            value = _deinterleave(value, heads)
        tensors[name] = value
    return config, tensors


def _deinterleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo GGUF's interleaved-RoPE row order: per head `[H/2, 2]` becomes `[2, H/2]`."""
    rows, width = weight.shape
    head_dim = rows // heads
    return weight.reshape(heads, head_dim // 2, 2, width).transpose(0, 2, 1, 3).reshape(rows, width)


def _checkpoint_name(name: str, path: Path) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{kind}"
    if stem.startswith("blk."):
        _, index, part = stem.split(".", 2)
        if part in _LAYER_NAMES:
            return f"layers.{index}.{_LAYER_NAMES[part]}.{kind}"
    raise ValueError(f"{path}: unknown tensor {name!r}; supported are Llama- and Qwen3-family files")


def _config(reader: GGUFReader, path: Path) -> DecoderConfig:
    def get(key: str, default: Any = None) -> Any:
        field = reader.get_field(key)
        return default if field is None else field.contents()

    family = get("general.architecture")
    if family not in _ARCHITECTURES:
        raise ValueError(f"{path}: architecture {family!r} is not supported; supported are {', '.join(_ARCHITECTURES)}")
    heads, width = int(get(f"{family}.attention.head_count")), int(get(f"{family}.embedding_length"))
    vocabulary = reader.get_field("tokenizer.ggml.tokens")
    scaling = get(f"{family}.rope.scaling.type", "none")
    embedding = next(t for t in reader.tensors if t.name == "token_embd.weight")
    vocab_size = int(embedding.shape[1])
    if vocabulary is not None and len(vocabulary.data) > vocab_size:
        raise ValueError(
            f"{path}: the tokenizer has {len(vocabulary.data)} tokens, the embedding table {vocab_size} rows"
        )
    return decoder_config(
        {
            "model_type": family,
            "vocab_size": vocab_size,
            "hidden_size": width,
            "intermediate_size": get(f"{family}.feed_forward_length"),
            "num_hidden_layers": get(f"{family}.block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": get(f"{family}.attention.head_count_kv", heads),
            "head_dim": get(f"{family}.attention.key_length", width // heads),
            "rms_norm_eps": get(f"{family}.attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": get(f"{family}.context_length"),
            "rope_theta": get(f"{family}.rope.freq_base", 10_000.0),
            "rope_scaling": None
            if scaling == "none"
            else {"rope_type": scaling, "factor": get(f"{family}.rope.scaling.factor", 1.0)},
            "tie_word_embeddings": all(t.name != "output.weight" for t in reader.tensors),
        },
        str(path),
    )
