"""Tokenizers rebuilt from GGUF metadata, and the ids that end a turn."""

from __future__ import annotations

import sys

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dspark_jax.files import DownloadError, smollm2_gguf
from dspark_jax.target.tokenizer import load_tokenizer, stop_token_ids

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def write_gguf(path, *, pre="smollm", model="gpt2"):
    """A GGUF file without tensors: four special tokens, all bytes, merges for 'ab' and ' ab'."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool>", *letters, "ab", "Ġab"]
    types = [3, 3, 3, 4] + [1] * (len(tokens) - 4)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(["a b", "Ġ ab"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path, tokens


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    path, tokens = write_gguf(tmp_path_factory.mktemp("gguf") / "toy.gguf")
    return load_tokenizer(path), tokens


def test_gguf_tokens_merges_and_special_tokens(toy):
    tokenizer, tokens = toy

    def pieces(text):
        return [tokens[i] for i in tokenizer(text, add_special_tokens=False)["input_ids"]]

    assert pieces("ab ab") == ["ab", "Ġab"]
    assert pieces("a12") == ["a", "1", "2"]
    assert pieces("<|im_start|>ab<|im_end|><tool>") == ["<|im_start|>", "ab", "<|im_end|>", "<tool>"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert (tokenizer.unk_token_id, tokenizer.pad_token_id) == (0, 2)
    assert len(tokenizer) == len(tokens)
    assert tokenizer.decode([1, tokens.index("ab"), 3, 2], skip_special_tokens=True) == "ab<tool>"
    offsets = tokenizer("a ab", add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    assert [tuple(x) for x in offsets] == [(0, 1), (1, 4)]  # the space belongs to its token
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False)
    assert rendered == "<|im_start|>user\nab<|im_end|>\n"


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_round_trip(toy, text):
    tokenizer, _ = toy
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text


def test_pre_tokenizers_split_numbers_as_their_models_do(tmp_path):
    # With a merge of two digits one would see it in the ids; the splits themselves are what must differ.
    expected = {"smollm": ["1", "2", "3", "4"], "llama-bpe": ["123", "4"], "qwen2": ["1", "2", "3", "4"]}
    for pre, numbers in expected.items():
        tokenizer = load_tokenizer(write_gguf(tmp_path / f"{pre}.gguf", pre=pre)[0])
        split = [x for x, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("ab1234")]
        assert split == ["ab", *numbers], pre


def test_unknown_vocabularies_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer model 'llama', expected 'gpt2'"):
        load_tokenizer(write_gguf(tmp_path / "a.gguf", model="llama")[0])
    with pytest.raises(ValueError, match=r"pre-tokenizer 'new-style'"):
        load_tokenizer(write_gguf(tmp_path / "b.gguf", pre="new-style")[0])
    with pytest.raises(FileNotFoundError, match="No tokenizer at"):
        load_tokenizer(tmp_path / "absent")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="pass the folder"):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_hugging_face_folder(toy, tmp_path):
    tokenizer, _ = toy
    tokenizer.save_pretrained(tmp_path)
    again = load_tokenizer(tmp_path)
    text = "<|im_start|>user\nab 12<|im_end|>"
    assert again(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert again.chat_template == TEMPLATE


def test_stop_token_ids(toy):
    tokenizer, _ = toy
    assert stop_token_ids(tokenizer) == (2,)
    assert stop_token_ids(tokenizer, {"eos_token_id": 0}) == (0, 2)
    assert stop_token_ids(tokenizer, {"eos_token_id": [7, 2, 5]}) == (2, 5, 7)
    silent = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    assert stop_token_ids(silent, {"eos_token_id": 3}) == (3,)
    with pytest.raises(ValueError, match="eos"):
        stop_token_ids(silent, {})


def test_smollm2_literal_encodings():
    try:
        path = smollm2_gguf()
    except DownloadError as error:
        pytest.skip(f"SmolLM2 is not in the cache and cannot be fetched: {error}")
    tokenizer = load_tokenizer(path)
    assert len(tokenizer) == 49152 and stop_token_ids(tokenizer) == (2,)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 1234+5?"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is 1234+5?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == prompt
    assert ids[:3] == [1, 9690, 198]
    question = [1, 4093, 198, 1780, 314, 216, 33, 34, 35, 36, 27, 37, 47, 2, 198]
    assert ids[-len(question) - 4 :] == [*question, 1, 520, 9531, 198]
    assert tokenizer("Hello world", add_special_tokens=False)["input_ids"] == [19556, 905]
    assert tokenizer("  def f(x):", add_special_tokens=False)["input_ids"] == [216, 753, 275, 24, 104, 727]
    assert "torch" not in sys.modules
