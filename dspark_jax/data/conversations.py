"""Conversation files to token ids: read, apply stated policies, tokenize, count what was kept and why not.

Three row forms are read: `{"conversations": [{"role", "content"}, …]}`, `{"messages": …}`, and
`{"prompt", "response", "finish"}`, where `finish == "length"` says that the answer was cut: no end-of-turn token.

Policy: rows that begin with the assistant are dropped; consecutive turns of one role are kept as they are; tool calls
and tool turns are kept; a row whose answers are all empty teaches nothing and is dropped. Every drop has a reason in
the summary.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import transformers
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from dspark_jax.data import chat
from dspark_jax.data.chat import (
    RenderedConversation,
    SpanNotFoundError,
    encode_conversations,
    render_conversation,
)
from dspark_jax.data.corpus import TokenizedCorpus, TokenizedRow, check_token_ids, read_corpus, write_corpus
from dspark_jax.data.sources import file_lines, is_url, local_file
from dspark_jax.files import fingerprint
from dspark_jax.progress import Progress
from dspark_jax.types import ChatOptions

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
ROLE_ALIASES = {"human": "user", "gpt": "assistant", "model": "assistant"}
TOKENIZE_ROWS = 512


@dataclass(frozen=True, kw_only=True)
class IngestOptions:
    """Policies of turning conversation files into training rows.

    Attributes:
        max_length: tokens kept of a row; the rest is cut off on the right.
        min_loss_tokens: rows with fewer supervised tokens after the cut are dropped.
        chat: rendering policy.
    """

    max_length: int = 4096
    min_loss_tokens: int = 14
    chat: ChatOptions = field(default_factory=ChatOptions)


@dataclass(frozen=True)
class Conversation:
    """One row of a conversation file.

    Attributes:
        id: its `id`, or file name and line number where it has none.
        domain: its `domain`, or "".
        messages: `role`/`content` mappings.
        complete: False when the last answer was cut by a length limit.
        source_index: number of the row in the files as read, dropped rows included.
    """

    id: str
    domain: str
    messages: list[dict[str, Any]]
    complete: bool
    source_index: int


@dataclass
class IngestSummary:
    """What became of the rows of conversation files: `kept + dropped.total() == rows`.

    Attributes:
        rows: non-blank lines read.
        kept: rows that went into the corpus.
        clipped: kept rows that lost tokens to `max_length`.
        dropped: number of rows by reason.
        examples: the first row id for every reason.
        tokens: tokens kept.
        loss_tokens: supervised tokens kept.
    """

    rows: int = 0
    kept: int = 0
    clipped: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    tokens: int = 0
    loss_tokens: int = 0

    def drop(self, reason: str, row_id: str) -> None:
        """Count one dropped row."""
        self.dropped[reason] += 1
        self.examples.setdefault(reason, row_id)

    def table(self) -> Table:
        """Return the summary as a table for the terminal."""
        table = Table(title=f"{self.rows:,} conversations read", title_justify="left")
        table.add_column("outcome")
        table.add_column("rows", justify="right")
        table.add_column("note")
        table.add_row("kept", f"{self.kept:,}", f"{self.tokens:,} tokens, {self.loss_tokens:,} supervised")
        table.add_row("  of these clipped", f"{self.clipped:,}", "longer than max_length")
        for reason, count in self.dropped.most_common():
            table.add_row("dropped", f"{count:,}", f"{reason} (first: {self.examples[reason]})")
        return table


class _RowError(ValueError):
    """A row is dropped; the message is the reason that is counted."""


def load_corpus(
    paths: str | Path | Sequence[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    options: IngestOptions | None = None,
    *,
    vocab_size: int | None = None,
    store: Path | None = None,
) -> tuple[TokenizedCorpus, IngestSummary]:
    """Read, render and tokenize conversation files.

    Args:
        paths: JSONL or ArrayRecord files, in order: paths, or URLs such as `gs://bucket/name`, which are copied first.
        tokenizer: the target's fast tokenizer with its chat template.
        options: policies; the defaults when None.
        vocab_size: rows of the target's embedding; ids outside are refused. None takes `len(tokenizer)`.
        store: folder that keeps tokenized corpora. What is there already is not tokenized again, and rows stay on disk,
            mapped into memory. None tokenizes into memory.

    Returns:
        The corpus and the account of every row.

    Raises:
        FileNotFoundError: a file does not exist; found out before any is read.
        ValueError: when no row survives (the message holds the reasons), or a token id is outside the vocabulary.
    """
    options = options or IngestOptions()
    paths = [paths] if isinstance(paths, (str, Path)) else list(paths)
    missing = [str(path) for path in paths if not is_url(path) and not Path(path).is_file()]
    if missing:
        raise FileNotFoundError(
            f"no conversation file {', '.join(missing)}: give JSON lines with `conversations` (--data)"
        )
    files = [local_file(path) for path in paths]
    limit = len(tokenizer) if vocab_size is None else vocab_size
    summary = IngestSummary()
    rows = _tokenized_rows(files, tokenizer, options, limit, summary)
    if store is None:
        return TokenizedCorpus.from_rows(list(rows)), summary
    # The code that decides about rows is part of the key: no entry outlives a change of it.
    code = [Path(__file__), Path(chat.__file__)]
    made_of = [files, [file.stem for file in files], *code, asdict(options), limit, _tokenizer_settings(tokenizer)]
    folder = store / fingerprint(made_of)
    if not folder.exists():
        write_corpus(folder, rows, lambda: vars(summary))
    corpus, saved = read_corpus(folder)
    return corpus, IngestSummary(**{**saved, "dropped": Counter(saved["dropped"])})


def _tokenizer_settings(tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    """All that decides how text becomes tokens."""
    backend = tokenizer.backend_tokenizer.to_str()  # type: ignore[attr-defined]
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}  # templates may write them
    return [backend, tokenizer.chat_template, special, transformers.__version__, tokenizers.__version__]


def _tokenized_rows(
    files: Sequence[Path],
    tokenizer: PreTrainedTokenizerBase,
    options: IngestOptions,
    vocab_size: int,
    summary: IngestSummary,
) -> Iterator[TokenizedRow]:
    """Yield the rows of files that are kept; `summary` is complete at the end.

    Raises:
        ValueError: at the end, when there was none; at a row with a token id outside the vocabulary.
    """
    pending: list[tuple[Conversation, RenderedConversation]] = []
    with Progress("tokenizing", unit="rows") as progress:

        def tokenized() -> list[TokenizedRow]:
            rows = _tokenize(tokenizer, pending, options, summary)
            for row in rows:
                check_token_ids(row.tokens, vocab_size, f"row {row.id} of the corpus")
            progress.update(len(pending), kept=summary.kept)
            pending.clear()
            return rows

        for conversation in read_conversations(files, summary):
            try:
                rendered = render_conversation(
                    tokenizer, conversation.messages, options.chat, complete=conversation.complete
                )
            except SpanNotFoundError as error:
                summary.drop(f"assistant span: {str(error).splitlines()[0]}", conversation.id)
                continue
            pending.append((conversation, rendered))
            if len(pending) == TOKENIZE_ROWS:
                yield from tokenized()
        yield from tokenized()
    if not summary.kept:
        raise ValueError(f"No training row in {[str(x) for x in files]}: dropped {dict(summary.dropped)}.")


def read_conversations(paths: Sequence[str | Path], summary: IngestSummary) -> Iterator[Conversation]:
    """Yield the well-formed conversations of files and count the others in `summary`.

    Args:
        paths: JSONL or ArrayRecord files, in order.
        summary: receives the number of rows and a reason for every dropped one.

    Yields:
        Conversations that hold at least one answer.
    """
    for path in paths:
        for number, line in enumerate(file_lines(path)):
            if not line.strip():
                continue
            row_id = f"{Path(path).stem}-{number:07d}"
            try:
                conversation = _parse(line, row_id, summary.rows)
            except _RowError as error:
                summary.drop(str(error), f"{Path(path).name} line {number + 1}")
            else:
                yield conversation
            finally:
                summary.rows += 1


def _tokenize(
    tokenizer: PreTrainedTokenizerBase,
    pending: Sequence[tuple[Conversation, RenderedConversation]],
    options: IngestOptions,
    summary: IngestSummary,
) -> list[TokenizedRow]:
    kept = []
    encoded = encode_conversations(tokenizer, [x for _, x in pending])
    for (conversation, _), (tokens, mask) in zip(pending, encoded, strict=True):
        clipped = len(tokens) > options.max_length
        supervised_before = int(mask.sum())
        tokens, mask = tokens[: options.max_length], mask[: options.max_length]
        supervised = int(mask.sum())
        if clipped and supervised == 0 and supervised_before:
            summary.drop("answer lies beyond max_length", conversation.id)
        elif supervised < max(options.min_loss_tokens, 1):
            summary.drop(f"fewer than {options.min_loss_tokens} supervised tokens", conversation.id)
        else:
            summary.kept += 1
            summary.clipped += clipped
            summary.tokens += len(tokens)
            summary.loss_tokens += supervised
            kept.append(
                TokenizedRow(
                    id=conversation.id,
                    domain=conversation.domain,
                    source_index=conversation.source_index,
                    tokens=np.asarray(tokens, np.int32),
                    loss_mask=np.asarray(mask, np.uint8),
                )
            )
    return kept


def _parse(line: str, row_id: str, source_index: int) -> Conversation:
    try:
        row = json.loads(line.encode("utf-8", "surrogateescape"))
    except (json.JSONDecodeError, UnicodeError):
        raise _RowError("broken JSON") from None
    if not isinstance(row, dict):
        raise _RowError("row is not a JSON object")
    messages, complete = _messages_of(row)
    _check_roles(messages)
    return Conversation(
        id=str(row.get("id", row_id)),
        domain=str(row.get("domain", "")),
        messages=messages,
        complete=complete,
        source_index=source_index,
    )


def _messages_of(row: dict[str, Any]) -> tuple[list[dict[str, Any]], bool]:
    """Messages with plain-text contents, and whether the last answer is complete."""
    finish = row.get("finish", "stop")
    if finish not in ("stop", "length"):
        raise _RowError("unknown finish (expected stop or length)")
    if "conversations" in row or "messages" in row:
        raw = row.get("conversations", row.get("messages"))
        if not isinstance(raw, list):
            raise _RowError("conversation is not a list")
        messages = [_message(x) for x in raw]
    elif "prompt" in row and "response" in row:
        messages = [
            _message({"role": "user", "content": row["prompt"]}),
            _message({"role": "assistant", "content": row["response"]}),
        ]
    else:
        raise _RowError("no conversations, messages or prompt and response")
    cut = finish == "length" and bool(messages) and messages[-1]["role"] == "assistant"
    return messages, not cut


def _message(raw: Any) -> dict[str, Any]:
    if not isinstance(raw, dict) or not isinstance(raw.get("role", raw.get("from")), str):
        raise _RowError("message without a role")
    role = str(raw.get("role", raw.get("from")))
    role = ROLE_ALIASES.get(role, role)
    if role not in ROLES:
        raise _RowError(f"unknown role {role!r}")
    content = raw.get("content", raw.get("value"))
    if isinstance(content, list):
        if not all(isinstance(x, dict) and isinstance(x.get("text"), str) for x in content):
            raise _RowError("message content that is not text")
        content = "".join(x["text"] for x in content)
    if content is None and role != "assistant":
        raise _RowError(f"{role} message without content")
    if content is not None and not isinstance(content, str):
        raise _RowError("message content that is not text")
    try:
        (content or "").encode()
    except UnicodeEncodeError:
        raise _RowError("message content with lone surrogates") from None
    return {**raw, "role": role, "content": content}


def _check_roles(messages: Sequence[dict[str, Any]]) -> None:
    turns = [x for x in messages if x["role"] not in ("system", "developer")]
    if not messages:
        raise _RowError("empty conversation")
    answers = [x for x in turns if x["role"] == "assistant"]
    if not answers:
        raise _RowError("no assistant turn")
    if turns[0]["role"] == "assistant":
        raise _RowError("begins with the assistant")
    if not any((x["content"] or "").strip() or x.get("tool_calls") for x in answers):
        raise _RowError("every answer is empty")
