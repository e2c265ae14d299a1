"""Tokenizers of the target: from a Hugging Face folder, or rebuilt from the metadata of a GGUF file.

A GGUF file carries the byte-pair vocabulary, its merges, the chat template and the special tokens, which is all a fast
tokenizer needs. It names its pre-tokenizer instead of describing it; the few names in use here are spelled out below,
any other is refused, because a wrong split gives valid but different ids without any error.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gguf import GGUFReader
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

TOKEN_TYPE_UNKNOWN, TOKEN_TYPE_CONTROL, TOKEN_TYPE_USER_DEFINED = 2, 3, 4

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3_SPLIT = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a target.

    Args:
        path: a Hugging Face folder (tokenizer.json …) or a `.gguf` file.

    Returns:
        A fast tokenizer with chat template and special tokens set.

    Raises:
        FileNotFoundError: when the path does not exist.
        ValueError: for a GGUF file whose vocabulary or pre-tokenizer is not supported.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"No tokenizer at {path}: expected a Hugging Face folder or a .gguf file.")
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"{path} is a file but not a .gguf: pass the folder that holds tokenizer.json instead.")
        return _tokenizer_from_gguf(path)
    return AutoTokenizer.from_pretrained(path, local_files_only=True)


def stop_token_ids(
    tokenizer: PreTrainedTokenizerBase, generation_config: Mapping[str, Any] | None = None
) -> tuple[int, ...]:
    """Return every token id that ends a turn, sorted: the tokenizer's own and those of generation_config.json.

    Args:
        tokenizer: gives `eos_token_id`.
        generation_config: parsed generation_config.json; its `eos_token_id` is an int or a list.

    Raises:
        ValueError: when neither names one; decoding would then only end at the length limit.
    """
    configured = (generation_config or {}).get("eos_token_id")
    ids = set(configured if isinstance(configured, (list, tuple)) else [configured])
    ids.add(tokenizer.eos_token_id)
    stops = tuple(sorted(int(x) for x in ids if x is not None))
    if not stops:
        raise ValueError(
            "Neither the tokenizer nor generation_config names an eos token: set eos_token in tokenizer_config.json."
        )
    return stops


def _tokenizer_from_gguf(path: Path) -> PreTrainedTokenizerFast:
    fields = GGUFReader(path).fields

    def read(name: str, default: Any = None) -> Any:
        field = fields.get(f"tokenizer.{name}")
        return default if field is None else field.contents()

    kind = read("ggml.model")
    if kind != "gpt2":
        raise ValueError(
            f"{path.name} has tokenizer model {kind!r}, expected 'gpt2' (byte-level BPE): "
            "use the Hugging Face folder of this model for its tokenizer."
        )
    tokens, types = read("ggml.tokens"), read("ggml.token_type")
    merges = [tuple(x.split(" ", 1)) for x in read("ggml.merges")]
    backend = Tokenizer(models.BPE(vocab={x: i for i, x in enumerate(tokens)}, merges=merges, fuse_unk=False))
    splits, normalizer = _pre_tokenizer(read("ggml.pre", "default"), path.name)
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(splits)
    backend.decoder = decoders.ByteLevel()
    # Offsets keep the leading space of a token: loss masks ask where a token starts, space included.
    backend.post_processor = processors.ByteLevel(trim_offsets=False)

    special, added = [], []
    for token, token_type in zip(tokens, types, strict=True):
        if token_type in (TOKEN_TYPE_UNKNOWN, TOKEN_TYPE_CONTROL):
            special.append(AddedToken(token, special=True, normalized=False))
        elif token_type == TOKEN_TYPE_USER_DEFINED:
            added.append(AddedToken(token, special=False, normalized=False))
    backend.add_special_tokens(special)
    backend.add_tokens(added)

    named = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = read(f"ggml.{key}_token_id")
        if token_id is not None:
            named[f"{name}_token"] = tokens[token_id]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **named)
    tokenizer.chat_template = read("chat_template")
    tokenizer.name_or_path = path.name
    return tokenizer


def _pre_tokenizer(name: str, file: str) -> tuple[list[Any], Any]:
    """Splitting steps, the last of which maps bytes, and the normalizer of a pre-tokenizer named in a GGUF file."""
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if name == "smollm":
        return [pre_tokenizers.Digits(individual_digits=True), gpt2], None
    if name in ("gpt-2", "default"):
        return [gpt2], None
    if name in ("llama-bpe", "llama3"):
        return [pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), behavior="isolated"), bytes_only], None
    if name == "qwen2":
        return [pre_tokenizers.Split(Regex(_QWEN2_SPLIT), behavior="isolated"), bytes_only], normalizers.NFC()
    raise ValueError(
        f"{file} names the pre-tokenizer {name!r}; known are smollm, gpt-2, llama-bpe and qwen2. "
        "Use the Hugging Face folder of this model for its tokenizer."
    )
