"""A tiny target folder with a chat tokenizer, and drafter folders for it: the whole way from disk to tables in seconds.

Weights are random but drafters' embeddings and heads are the target's, so acceptance is neither 0 nor 1.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from gemma4 import gemma4
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dspark_jax.config import DecoderConfig, DrafterConfig, RopeConfig
from dspark_jax.draft.contract import Drafter
from dspark_jax.draft.loading import functions_for, save_drafter
from dspark_jax.huggingface import decoder_json
from dspark_jax.target.loading import checkpoint_name, parameter_shapes

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|im_start|>", "<|im_end|>", "<mask>")
VOCAB = 256 + len(SPECIAL)
END, MASK = 257, 258
DECODER = DecoderConfig(
    family="llama", vocab_size=VOCAB, hidden_size=24, intermediate_size=32, num_layers=4, num_heads=3, num_kv_heads=1,
    head_dim=8, rms_norm_eps=1e-5, rope=RopeConfig(), max_position=512, tie_word_embeddings=True,
)  # fmt: skip
GEMMA4 = gemma4(DECODER)


def write_target(folder: Path, seed: int = 0, decoder: DecoderConfig = DECODER) -> Path:
    """Write a Llama (or Gemma-4) folder as it comes from the hub: config.json, safetensors, tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    leaves, _ = jax.tree_util.tree_flatten_with_path(parameter_shapes(decoder))
    tensors = {"model.embed_tokens.weight": rng.normal(0, 1, (VOCAB, 24)).astype(np.float32)}
    for path, leaf in leaves:
        matrix = rng.normal(0, leaf.shape[-1] ** -0.5, leaf.shape) if len(leaf.shape) > 1 else np.ones(leaf.shape)
        tensors[f"model.{checkpoint_name(path)}"] = matrix.astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    d = DECODER
    config: dict[str, Any] = {
        "model_type": "llama", "vocab_size": VOCAB, "hidden_size": d.hidden_size, "rms_norm_eps": d.rms_norm_eps,
        "intermediate_size": d.intermediate_size, "num_hidden_layers": d.num_layers, "num_attention_heads": d.num_heads,
        "num_key_value_heads": d.num_kv_heads, "head_dim": d.head_dim, "max_position_embeddings": d.max_position,
        "tie_word_embeddings": True, "hidden_act": "silu", "architectures": ["LlamaForCausalLM"],
    }  # fmt: skip
    if decoder.full_attention is not None:
        config = {**decoder_json(decoder), "tie_word_embeddings": True, "architectures": ["Gemma4ForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer().save_pretrained(folder)
    return folder


def tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token; ChatML template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", clean_up_tokenization_spaces=False)
    fast.chat_template = TEMPLATE
    return fast


def write_drafter(folder: Path, kind: str, seed: int = 1, decoder: DecoderConfig = DECODER) -> Path:
    """Write a drafter folder of a kind: "dspark" (Markov and confidence heads), "dflash", "eagle3" or "mtp"."""
    family = decoder.family if decoder.full_attention is not None else "qwen3"
    decoder = dataclasses.replace(
        decoder, family=family, qk_norm=True, num_layers=1, tie_word_embeddings=False, layer_types=("full_attention",)
    )
    common = {"decoder": decoder, "target_layers": DECODER.num_layers, "target_layer_ids": (0, 2), "block_size": 3}
    heads = {"markov_rank": 4, "confidence_head": True} if kind == "dspark" else {}
    if kind == "mtp":
        config = DrafterConfig(kind="mtp", **{**common, "target_layer_ids": ()})
    elif kind == "eagle3":
        config = DrafterConfig(kind="eagle3", **common)
    else:
        config = DrafterConfig(kind="dspark", mask_token_id=MASK, **common, **heads)
    functions = functions_for(config)
    params = functions.initialise(jax.random.key(seed), config.feature_width)
    save_drafter(Drafter(kind, config, params, functions), folder)
    return folder
