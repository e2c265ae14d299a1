"""Chat rendering and loss masks against the reference, with every parity option on."""

from __future__ import annotations

import json

import pytest
from transformers import AutoTokenizer

from dspark_jax.data.chat import encode_conversations, render_conversation, render_prompt
from dspark_jax.types import ChatOptions

# The reference supervises user text in one and cuts the answer short in the other.
DIFFERING = {"user_text_contains_header", "assistant_contains_eot"}


@pytest.fixture(scope="module")
def chat_goldens(goldens):
    folder = goldens / "chat"
    tokenizers = {x.name.removeprefix("tok_"): AutoTokenizer.from_pretrained(x) for x in sorted(folder.glob("tok_*"))}
    read = {name: json.loads((folder / f"{name}.json").read_text()) for name in ("cases", "conversations", "meta")}
    return tokenizers, read["cases"], read["conversations"], read["meta"]["registry"]


def parity_options(registry):
    return ChatOptions(
        system_prompt=registry["system_prompt"],
        assistant_prefix=registry["assistant_loss_prefix"],
        supervise_trailing_newline=True,
        supervise_template_additions=True,
    )


def test_training_cases_differ_exactly_where_the_reference_is_wrong(chat_goldens):
    tokenizers, cases, conversations, registry = chat_goldens
    differing = []
    for case in cases:
        if case.get("prompt_only"):
            continue
        name, tokenizer = case["conversation"], tokenizers[case["tokenizer"]]
        options = parity_options(registry[case["template"]])
        rendered = render_conversation(tokenizer, conversations[name], options)
        tokens, mask = encode_conversations(tokenizer, [rendered], case["max_length"])[0]
        assert rendered.text == case["rendered_text"]
        assert tokens.tolist() == case["input_ids"]
        if mask.astype(int).tolist() != case["loss_mask"]:
            differing.append((case["tokenizer"], name))
    assert sorted(differing) == sorted((t, n) for t in tokenizers for n in DIFFERING)


def test_ours_supervises_the_real_answer_in_the_differing_cases(chat_goldens):
    tokenizers, cases, conversations, _ = chat_goldens
    seen = 0
    for case in cases:
        if case.get("prompt_only") or case["conversation"] not in DIFFERING:
            continue
        tokenizer, messages = tokenizers[case["tokenizer"]], conversations[case["conversation"]]
        rendered = render_conversation(tokenizer, messages)
        end = "<turn|>" if case["template"] == "gemma4" else "<|im_end|>"
        assert [rendered.text[a:b] for a, b in rendered.spans] == [messages[-1]["content"] + end]
        tokens, mask = encode_conversations(tokenizer, [rendered])[0]
        assert tokenizer.decode(tokens[mask]) == messages[-1]["content"] + end
        assert tokenizer.decode(tokens[~mask]).count(messages[0]["content"]) == 1
        seen += 1
    assert seen == 6


def test_added_think_block_is_template_by_default(chat_goldens):
    tokenizers, _, conversations, _ = chat_goldens
    rendered = render_conversation(tokenizers["qwen_think"], conversations["single"])
    assert "<think>" in rendered.text
    assert [rendered.text[a:b] for a, b in rendered.spans] == ["The answer is 4.<|im_end|>"]


def test_generation_prompts(chat_goldens):
    tokenizers, cases, conversations, _ = chat_goldens
    seen = 0
    for case in cases:
        if not case.get("prompt_only"):
            continue
        tokenizer, thinking = tokenizers[case["tokenizer"]], case["enable_thinking"]
        options = ChatOptions(template_kwargs={} if thinking is None else {"enable_thinking": thinking})
        prompt = render_prompt(tokenizer, conversations[case["conversation"]][:-1], options)
        assert prompt == case["rendered_text"]
        assert tokenizer(prompt, add_special_tokens=False)["input_ids"] == case["input_ids"]
        seen += 1
    assert seen >= 6
