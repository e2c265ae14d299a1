"""Ingest of user files: every row is kept or dropped for a stated reason, and ids are checked before the model."""

from __future__ import annotations

import json
import string

import numpy as np
import pytest
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dspark_jax.data import conversations
from dspark_jax.data.conversations import (
    IngestOptions,
    IngestSummary,
    load_corpus,
    read_conversations,
)
from dspark_jax.data.corpus import check_token_ids, row_number, split_validation
from dspark_jax.types import ChatOptions

TEMPLATE = (
    "{% for m in messages %}start {{ m.role }} nl {{ m.content }}"
    "{% for c in m.tool_calls or [] %} call {{ c.function.name }}{% endfor %} end nl {% endfor %}"
    "{% if add_generation_prompt %}start assistant nl {% endif %}"
)
WORDS = ["unk", "start", "end", "nl", "user", "assistant", "system", "tool", "call", "look", *string.ascii_lowercase]


@pytest.fixture(scope="module")
def tokenizer():
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="unk"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="end", name_or_path="toy-words")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **fields):
    return {"role": "assistant", "content": text, **fields}


def write(path, rows):
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in rows))
    return path


SMALL = IngestOptions(min_loss_tokens=1)
LOOK = assistant(None, tool_calls=[{"function": {"name": "look", "arguments": {}}}])
BR04 = [
    [user("a"), assistant("b c")],
    [],
    [{"role": "system", "content": "a"}],
    [assistant("a"), user("b"), assistant("c")],
    [user("a"), user("b"), assistant("c")],
    [user("a"), assistant("")],
    [user("a"), LOOK, {"role": "tool", "content": "b"}, assistant("c")],
    [user("a"), assistant("b"), user("c")],
    [user("a b c d e f g h i j"), assistant("k l m n")],
    None,
]


def test_br04_user_files_that_should_teach_nothing(tokenizer, tmp_path):
    rows = [{"id": f"row-{i}", "conversations": x} for i, x in enumerate(BR04, 1)]
    path = write(tmp_path / "rows.jsonl", [*rows[:9], '{"conversations": [{"role": "us'])
    # In row 9 the prompt and the header of the answer take all 18 tokens; row 7 is cut as well but keeps an answer.
    corpus, summary = load_corpus(path, tokenizer, IngestOptions(min_loss_tokens=1, max_length=18))
    assert corpus.ids == ("row-1", "row-5", "row-7", "row-8")
    assert summary.rows == 10 == summary.kept + summary.dropped.total()
    assert dict(summary.dropped) == {
        "empty conversation": 1,
        "no assistant turn": 1,
        "begins with the assistant": 1,
        "every answer is empty": 1,
        "answer lies beyond max_length": 1,
        "broken JSON": 1,
    }
    full, _ = load_corpus(path, tokenizer, SMALL)
    texts = {x: tokenizer.decode(full.row(i)[0]) for i, x in enumerate(full.ids)}
    assert texts["row-7"] == (
        "start user nl a end nl start assistant nl call look end nl start tool nl b end nl start assistant nl c end nl"
    )
    assert texts["row-8"] == "start user nl a end nl start assistant nl b end nl start user nl c end nl"
    assert texts["row-5"] == "start user nl a end nl start user nl b end nl start assistant nl c end nl"
    tokens, mask = full.row(full.ids.index("row-7"))
    assert tokenizer.decode(tokens[mask == 1]) == "call look end c end"
    out = Console(record=True, width=120)
    out.print(summary.table())
    text = out.export_text()
    assert all(x in text for x in ["10 conversations", "every answer is empty", "row-9", "rows.jsonl line 10"])


def test_nothing_left_is_an_error_with_the_reasons(tokenizer, tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"conversations": []}, "{"])
    with pytest.raises(ValueError, match=r"No training row.*'empty conversation': 1, 'broken JSON': 1"):
        load_corpus(path, tokenizer)


def test_missing_files_are_all_named_before_any_is_read(tokenizer, tmp_path):
    (tmp_path / "there.jsonl").write_text("not read\n")
    with pytest.raises(FileNotFoundError, match=r"one\.jsonl, .*two\.jsonl: give JSON lines"):
        load_corpus([tmp_path / "there.jsonl", tmp_path / "one.jsonl", tmp_path / "two.jsonl"], tokenizer)


def test_few_supervised_tokens_and_clipping_are_counted(tokenizer, tmp_path):
    rows = [{"conversations": [user("a"), assistant("b " * n)]} for n in (12, 13, 30)]
    path = write(tmp_path / "rows.jsonl", rows)
    corpus, summary = load_corpus(path, tokenizer, IngestOptions(max_length=30))
    assert (summary.kept, summary.clipped, dict(summary.dropped)) == (2, 1, {"fewer than 14 supervised tokens": 1})
    assert corpus.lengths.tolist() == [24, 30] and summary.tokens == 54
    assert [int(corpus.row(i)[1].sum()) for i in range(2)] == [14, 21] and summary.loss_tokens == 35
    assert corpus.ids == ("rows-0000001", "rows-0000002") and corpus.source_index.tolist() == [1, 2]


def test_prompt_response_rows_and_cut_answers(tokenizer, tmp_path):
    row = {"id": "x-1", "domain": "math", "prompt": "a", "response": "b c"}
    rows = [{**row, "finish": "stop"}, {**row, "finish": "length"}, row, {**row, "finish": "tired"}]
    corpus, summary = load_corpus(write(tmp_path / "rows.jsonl", rows), tokenizer, SMALL)
    decoded = [tokenizer.decode(corpus.row(i)[0]) for i in range(3)]
    complete = "start user nl a end nl start assistant nl b c end nl"
    assert decoded == [complete, complete.removesuffix(" end nl"), complete]
    assert [tokenizer.decode(corpus.row(i)[0][corpus.row(i)[1] == 1]) for i in range(3)] == [
        "b c end",
        "b c",
        "b c end",
    ]
    assert corpus.domains == ("math",) * 3
    assert dict(summary.dropped) == {"unknown finish (expected stop or length)": 1}


def test_other_row_forms(tmp_path):
    rows = [
        {"messages": [user("a"), assistant("b")]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, assistant("b")]},
        {"messages": [{"role": "user", "content": [{"type": "image"}]}, assistant("b")]},
        {"messages": [{"role": "user", "content": 3}, assistant("b")]},
        {"messages": [{"role": "user", "content": None}, assistant("b")]},
        {"messages": [{"role": "narrator", "content": "a"}, assistant("b")]},
        {"messages": [{"content": "a"}]},
        {"messages": "a"},
        {"text": "a"},
        [1],
        "",
        '{"messages": [{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": "b"}]}',
    ]
    summary = IngestSummary()
    path = write(tmp_path / "rows.jsonl", rows)
    with open(path, "ab") as file:
        file.write(b'{"messages": [{"role": "user", "content": "\xff"}]}\n')
    kept = list(read_conversations([path], summary))
    assert [[(m["role"], m["content"]) for m in x.messages] for x in kept] == [[("user", "a"), ("assistant", "b")]] * 3
    assert [x.source_index for x in kept] == [0, 1, 2] and summary.rows == 13
    assert dict(summary.dropped) == {
        "message content that is not text": 2,
        "user message without content": 1,
        "unknown role 'narrator'": 1,
        "message without a role": 1,
        "conversation is not a list": 1,
        "no conversations, messages or prompt and response": 1,
        "row is not a JSON object": 1,
        "message content with lone surrogates": 1,
        "broken JSON": 1,
    }


def test_br19_ids_outside_the_table_are_refused(tokenizer, tmp_path):
    check_token_ids(np.asarray([0, 9]), 10, "here")
    for bad in (-1, 10):
        with pytest.raises(ValueError, match=rf"Token id {bad} in here is outside the vocabulary of 10"):
            check_token_ids(np.asarray([9, bad]), 10, "here")
    path = write(tmp_path / "rows.jsonl", [{"conversations": [user("a"), assistant("z")]}])
    with pytest.raises(ValueError, match=f"Token id {WORDS.index('z')} .* vocabulary of 20"):
        load_corpus(path, tokenizer, SMALL, vocab_size=20)


def test_br39_validation_is_split_by_id(tokenizer, tmp_path):
    rows = [{"id": f"d-{i:05d}", "conversations": [user("a"), assistant("b")]} for i in range(120)]
    corpus, _ = load_corpus(write(tmp_path / "a.jsonl", rows), tokenizer, SMALL)
    train, validation = split_validation(corpus)
    assert validation.ids == ("d-00000", "d-00050", "d-00100")
    assert len(train) == 117 and not set(train.ids) & set(validation.ids)
    backwards, _ = load_corpus(write(tmp_path / "b.jsonl", rows[::-1]), tokenizer, SMALL)
    assert set(split_validation(backwards)[1].ids) == set(validation.ids)
    assert row_number("no number") == row_number("no number") > 0
    assert row_number("math-00150") == 150


def test_corpus_fingerprint_and_subset(tokenizer, tmp_path):
    rows = [{"conversations": [user("a"), assistant(x)]} for x in ("b", "c d", "e")]
    path = write(tmp_path / "a.jsonl", rows)
    corpus, _ = load_corpus(path, tokenizer, SMALL)
    again, _ = load_corpus([path], tokenizer, SMALL)
    other, _ = load_corpus(path, tokenizer, IngestOptions(min_loss_tokens=1, chat=ChatOptions(system_prompt="a")))
    assert corpus.fingerprint == again.fingerprint != other.fingerprint
    part = corpus.subset([2, 0])
    assert part.ids == (corpus.ids[2], corpus.ids[0]) and part.source_index.tolist() == [2, 0]
    np.testing.assert_array_equal(part.row(0)[0], corpus.row(2)[0])
    assert part.tokens.dtype == np.int32 and part.loss_mask.dtype == np.uint8
    assert part.num_tokens == sum(len(part.row(i)[0]) for i in range(2)) < corpus.num_tokens
    assert len(corpus.subset([])) == 0
    alone, _ = load_corpus(write(tmp_path / "a.jsonl", rows[:1]), tokenizer, SMALL)
    assert corpus.subset([0]).fingerprint == alone.fingerprint != corpus.subset([1]).fingerprint


def test_a_stored_corpus_is_not_tokenized_again(tokenizer, tmp_path, monkeypatch):
    rows = [{"conversations": [user("a"), assistant(x)]} for x in ("b", "c d", "")]
    path, store = write(tmp_path / "a.jsonl", rows), tmp_path / "corpora"
    expected, counted = load_corpus(path, tokenizer, SMALL)
    stored, summary = load_corpus(path, tokenizer, SMALL, store=store)
    assert stored.fingerprint == expected.fingerprint and summary == counted
    assert not stored.tokens.flags.writeable and stored.domains == expected.domains
    with monkeypatch.context() as patch:
        patch.setattr(conversations, "render_conversation", None)
        again, summary = load_corpus(path, tokenizer, SMALL, store=store)
        assert again.fingerprint == expected.fingerprint and summary == counted
    # Anything that decides about rows makes another one: options, vocabulary, file name, contents, template.
    load_corpus(path, tokenizer, IngestOptions(min_loss_tokens=2), store=store)
    load_corpus(path, tokenizer, SMALL, vocab_size=99, store=store)
    load_corpus(write(tmp_path / "b.jsonl", rows), tokenizer, SMALL, store=store)
    load_corpus(write(tmp_path / "a.jsonl", rows[:1]), tokenizer, SMALL, store=store)
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "chat_template", TEMPLATE.replace("start", "look"))
        load_corpus(path, tokenizer, SMALL, store=store)
    assert len(list(store.iterdir())) == 6


def test_a_corpus_that_fails_leaves_nothing_behind(tokenizer, tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"conversations": []}])
    with pytest.raises(ValueError, match="No training row"):
        load_corpus(path, tokenizer, store=tmp_path / "corpora")
    assert not list((tmp_path / "corpora").iterdir())
