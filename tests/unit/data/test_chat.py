"""Assistant spans: the public faults as literal masks, other template habits, and texts that quote headers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from dspark_jax.data.chat import (
    SpanNotFoundError,
    encode_conversations,
    render_conversation,
    render_prompt,
)
from dspark_jax.types import ChatOptions

WORDS = ["im_start", "im_end", "user", "assistant", "system", "nl", "hi", "there", "hello", "you", "ok", "what", "does"]
WORDS += ["mean", "bye"]
TOY = (
    "{% for m in messages %}im_start {{ m.role }} nl {{ m.content }} im_end nl {% endfor %}"
    "{% if add_generation_prompt %}im_start assistant nl {% endif %}"
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def word_tokenizer(template):
    """One token per word."""
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="hi"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="im_end", name_or_path="toy-words")
    tokenizer.chat_template = template
    return tokenizer


def byte_tokenizer(template):
    """One token per byte, plus ChatML's special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({x: i for i, x in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, name_or_path="toy-bytes")
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = template
    return tokenizer


def chat(*turns):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": x} for i, x in enumerate(turns)]


def supervised(tokenizer, messages, options=None, **keywords):
    rendered = render_conversation(tokenizer, messages, options, **keywords)
    tokens, mask = encode_conversations(tokenizer, [rendered])[0]
    return len(tokens), np.flatnonzero(mask).tolist()


def answers(tokenizer, messages, options=None, **keywords):
    rendered = render_conversation(tokenizer, messages, options, **keywords)
    return [rendered.text[a:b] for a, b in rendered.spans]


TWO_TURNS = chat("hi", "ok", "what does im_start assistant nl mean", "ok")


def test_br01_template_without_generation_markers():
    tokenizer = word_tokenizer(TOY)
    assert supervised(tokenizer, chat("hi there", "hello you")) == (14, [10, 11, 12])
    trailing = ChatOptions(supervise_trailing_newline=True)
    assert supervised(tokenizer, chat("hi there", "hello you"), trailing) == (14, [10, 11, 12, 13])


def test_br01_span_that_cannot_be_found_names_the_template():
    replacing = word_tokenizer(TOY.replace("m.content", "m.content | replace('hello', 'bye')"))
    with pytest.raises(SpanNotFoundError, match="toy-words"):
        render_conversation(replacing, chat("hi", "hello you"))
    refusing = word_tokenizer("{{ raise_exception('only tools here') }}")
    with pytest.raises(SpanNotFoundError, match=r"toy-words refuses this conversation: only tools here"):
        render_conversation(refusing, chat("hi", "hello"))
    endless = word_tokenizer("{% for m in messages %} im_start {{ m.role }} nl {{ m.content }}{% endfor %}")
    with pytest.raises(SpanNotFoundError, match="no end-of-turn token"):
        render_conversation(endless, chat("hi", "hello"))


def test_br01_generation_markers_serve_where_the_text_is_altered():
    marked = TOY.replace(
        "{{ m.content }} im_end",
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content | replace('hello', 'bye') }} im_end"
        "{% endgeneration %}{% else %}{{ m.content }} im_end{% endif %}",
    )
    assert supervised(word_tokenizer(marked), chat("hi there", "hello you")) == (14, [10, 11, 12])


def test_br01_generation_markers_that_leave_the_end_of_turn_out():
    marked = CHATML.replace(
        "{{ m.content }}",
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content | replace('hello', 'bye') }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}",
    )
    messages = chat("q", "hello <|im_end|> you", "<|im_end|> r", "hello", "s")
    assert answers(byte_tokenizer(marked), messages) == ["bye <|im_end|> you<|im_end|>", "bye<|im_end|>"]


def test_br02_user_text_that_quotes_the_header():
    assert supervised(word_tokenizer(TOY), TWO_TURNS) == (29, [9, 10, 26, 27])


@pytest.mark.parametrize("filter_", ["trim", "replace('  ', ' ') | trim"])
def test_br02_template_that_alters_user_text(filter_):
    tokenizer = word_tokenizer(TOY.replace("m.content", f"m.content | {filter_}"))
    padded = [{**x, "content": f"  {x['content']} "} for x in TWO_TURNS]
    assert supervised(tokenizer, padded) == (29, [9, 10, 26, 27])


def test_cut_answer_ends_the_text_without_end_of_turn():
    tokenizer = word_tokenizer(TOY)
    assert supervised(tokenizer, TWO_TURNS, complete=False) == (27, [9, 10, 26])
    rendered = render_conversation(byte_tokenizer(CHATML), chat("hi", "half an ans"), complete=False)
    assert rendered.text.endswith("assistant\nhalf an ans")
    with pytest.raises(ValueError, match="last message"):
        render_conversation(tokenizer, chat("hi", "ok", "hi"), complete=False)


LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n\n{{ m.content | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}"
)
# Reasoning is dropped from old answers; the last one gets a block, empty where there was none.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% set parts = m.content.split('</think>') %}"
    "{% if loop.last %}<think>\n{{ parts[0].split('<think>')[-1].strip('\n') if parts | length > 1 else '' }}\n"
    "</think>\n\n{% endif %}{{ parts[-1].lstrip('\n') }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
EXTRA_END = CHATML.replace("{% if add", "{% if messages[-1].role == 'assistant' %}<|im_start|>{% endif %}{% if add")


def test_trimming_template():
    assert answers(byte_tokenizer(LLAMA3), chat(" a ", "\n b b ", "c", " d")) == ["b b<|im_end|>", "d<|im_end|>"]


def test_template_additions_are_template():
    tokenizer = byte_tokenizer(THINKING)
    plain = chat("q", "one", "r", "two")
    assert answers(tokenizer, plain) == ["one<|im_end|>", "two<|im_end|>"]
    options = ChatOptions(supervise_template_additions=True)
    assert answers(tokenizer, plain, options) == ["one<|im_end|>", "<think>\n\n</think>\n\ntwo<|im_end|>"]
    reasoned = chat("q", "<think>\nhm\n</think>\n\none")
    assert answers(tokenizer, reasoned) == ["<think>\nhm\n</think>\n\none<|im_end|>"]
    dropped = chat("q", "<think>\nhm\n</think>\n\none", "r", "two")
    assert answers(tokenizer, dropped) == ["one<|im_end|>", "two<|im_end|>"]


def test_text_after_the_last_turn_is_not_part_of_it():
    tokenizer = byte_tokenizer(EXTRA_END)
    assert answers(tokenizer, chat("q", "one", "r", "two")) == ["one<|im_end|>", "two<|im_end|>"]
    assert answers(tokenizer, chat("q", "one", "r")) == ["one<|im_end|>"]


def test_tool_calls_are_answers_and_must_be_rendered():
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look", "arguments": {"x": 1}}}]}
    messages = [*chat("q"), call, {"role": "tool", "content": "42"}, {"role": "assistant", "content": "It is 42."}]
    rendering = CHATML.replace(
        "{{ m.content }}",
        "{% if m.tool_calls %}<call>{{ m.tool_calls[0].function.name }}</call>{% else %}{{ m.content }}{% endif %}",
    )
    assert answers(byte_tokenizer(rendering), messages) == ["<call>look</call><|im_end|>", "It is 42.<|im_end|>"]
    both = CHATML.replace(
        "{{ m.content }}", "{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}"
    )
    first, second = answers(byte_tokenizer(both), messages)
    assert "look" in first and second == "It is 42.<|im_end|>"
    with pytest.raises(SpanNotFoundError, match="does not render the tool call 'look'"):
        render_conversation(byte_tokenizer(CHATML), messages)


def test_system_prompt_and_prefix_are_the_same_in_training_and_evaluation():
    tokenizer = byte_tokenizer(CHATML)
    options = ChatOptions(system_prompt="Be brief.", assistant_prefix="<p>")
    messages = chat("q", "one", "r", "<p>two")
    rendered = render_conversation(tokenizer, messages, options)
    assert [rendered.text[a:b] for a, b in rendered.spans] == ["one<|im_end|>", "two<|im_end|>"]
    prompt = render_prompt(tokenizer, messages[:1], options)
    assert (
        prompt == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<p>"
    )
    assert rendered.text.startswith(prompt + "one")
    closed = render_prompt(tokenizer, messages[:1], options, add_generation_prompt=False)
    assert closed.endswith("q<|im_end|>\n")
    own = [{"role": "system", "content": "Own."}, *messages]
    assert "Be brief." not in render_conversation(tokenizer, own, options).text


def test_truncation_cuts_ids_and_mask_alike():
    tokenizer = word_tokenizer(TOY)
    rendered = render_conversation(tokenizer, chat("hi there", "hello you"))
    for length in range(1, 16):
        tokens, mask = encode_conversations(tokenizer, [rendered], length)[0]
        assert len(tokens) == len(mask) == min(length, 14)
        assert mask.sum() == max(0, min(length, 13) - 10)
    assert encode_conversations(tokenizer, []) == []


PIECES = [
    "a",
    " ",
    "\n",
    "ü",
    "🙂",
    "<|im_start|>",
    "<|im_end|>",
    "assistant\n",
    "<|im_start|>assistant\n",
    "answer0x0z",
]
TEXT = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=st.lists(TEXT, min_size=2, max_size=7), complete=st.booleans())
def test_masked_tokens_spell_exactly_the_answers(turns, complete):
    tokenizer = byte_tokenizer(CHATML)
    messages = chat(*turns)
    complete = complete or len(turns) % 2 == 1
    rendered = render_conversation(tokenizer, messages, complete=complete)
    tokens, mask = encode_conversations(tokenizer, [rendered])[0]
    expected = [x["content"] + "<|im_end|>" for x in messages if x["role"] == "assistant"]
    if not complete:
        expected[-1] = expected[-1].removesuffix("<|im_end|>")
    assert [rendered.text[a:b] for a, b in rendered.spans] == expected
    assert tokenizer.decode(tokens[mask]) == "".join(expected)
    assert tokenizer.decode(tokens) == rendered.text
