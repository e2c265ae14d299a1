"""Render conversations with a chat template and find what the assistant wrote in the result.

A loss mask that is wrong by a few tokens trains without complaint, so spans are never found by searching the text for
headers. Every assistant text is replaced by a placeholder that occurs nowhere else, the conversation is rendered
again, and the fragments between the placeholders, joined by the real texts, must give the real rendering back,
character by character. What cannot be reproduced this way is found by rendering prefixes, then by the template's own
`{% generation %}` markers; if all three fail, `SpanNotFoundError` names the template.

Example (ChatML), spans of the second conversation turn marked with ^:

    <|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\nhello you<|im_end|>\\n
                                                           ^^^^^^^^^^^^^^^^^^^
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Int
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from dspark_jax.types import ChatOptions

Message = Mapping[str, Any]


class SpanNotFoundError(ValueError):
    """The place of an assistant turn in the rendered text could not be established beyond doubt."""


@dataclass(frozen=True)
class RenderedConversation:
    """Rendered text and the character spans `[start, end)` of what the assistant wrote, in order."""

    text: str
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class _Turn:
    """Character positions of one assistant turn: where the header ends, its text, its end-of-turn token, the rest."""

    header_end: int
    start: int
    content_end: int
    end: int
    trailing_end: int


def render_conversation(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    options: ChatOptions | None = None,
    *,
    complete: bool = True,
) -> RenderedConversation:
    """Render a conversation and locate every assistant turn up to and including its end-of-turn token.

    Args:
        tokenizer: has the chat template and knows the special tokens.
        messages: `role`/`content` mappings; an assistant message with `tool_calls` may have `content` None.
        options: rendering policy; the defaults when None.
        complete: False when the last answer was cut by a length limit: the text then ends with the answer, and no
            end-of-turn token is rendered or supervised.

    Returns:
        The text and the spans in characters.

    Raises:
        SpanNotFoundError: when a span cannot be established, or the template refuses the conversation.
        ValueError: when `complete` is False and the last message is not the assistant's.
    """
    options = options or ChatOptions()
    messages = _prepare(messages, options)
    if not complete and (not messages or messages[-1]["role"] != "assistant"):
        raise ValueError("complete=False says that the last answer was cut, but the last message is not an answer.")
    renderer = _Renderer(tokenizer, options)
    text = renderer.render(messages)
    turns = renderer.turns(messages, text)
    _check_tool_calls(messages, turns, text, renderer)
    spans = []
    for number, turn in enumerate(turns):
        start = turn.header_end if options.supervise_template_additions else turn.start
        end = turn.trailing_end if options.supervise_trailing_newline else turn.end
        if not complete and number == len(turns) - 1:
            end, text = turn.content_end, text[: turn.content_end]
        spans.append((start, end))
    return RenderedConversation(text, tuple(spans))


def render_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    options: ChatOptions | None = None,
    *,
    add_generation_prompt: bool = True,
) -> str:
    """Render the text after which the assistant writes, under the same policy as the training text.

    Args:
        tokenizer: has the chat template.
        messages: the conversation so far.
        options: rendering policy; the defaults when None.
        add_generation_prompt: whether the header of the next assistant turn is opened.

    Returns:
        The prompt text; tokenize it with `add_special_tokens=False`, the template writes its own BOS.

    Raises:
        SpanNotFoundError: when the template refuses the conversation.
    """
    options = options or ChatOptions()
    text = _Renderer(tokenizer, options).render(_prepare(messages, options), add_generation_prompt)
    prefix = options.assistant_prefix
    return text + prefix if prefix and add_generation_prompt and not text.endswith(prefix) else text


def encode_conversations(
    tokenizer: PreTrainedTokenizerBase, rendered: Sequence[RenderedConversation], max_length: int | None = None
) -> list[tuple[Int[np.ndarray, "L"], Bool[np.ndarray, "L"]]]:
    """Tokenize rendered conversations in one batch and turn their spans into loss masks.

    A token counts when it starts inside a span.

    Args:
        tokenizer: a fast tokenizer (its offsets are needed).
        rendered: texts with spans.
        max_length: longer rows are cut on the right.

    Returns:
        For every conversation its token ids (int32) and loss mask (bool), of equal length.

    Raises:
        ValueError: when the tokenizer is not a fast one.
    """
    if not rendered:
        return []
    if not tokenizer.is_fast:
        raise ValueError(f"{_name(tokenizer)} is not a fast tokenizer: loss masks need its character offsets.")
    encoded = tokenizer(
        [x.text for x in rendered],
        add_special_tokens=False,
        return_offsets_mapping=True,
        return_attention_mask=False,
        verbose=False,
    )
    out = []
    for conversation, ids, offsets in zip(rendered, encoded["input_ids"], encoded["offset_mapping"], strict=True):
        tokens = np.asarray(ids[:max_length], np.int32)
        starts = np.asarray(offsets[:max_length], np.int64).reshape(-1, 2)[:, 0]
        mask = np.zeros(tokens.shape, bool)
        for start, end in conversation.spans:
            mask |= (starts >= start) & (starts < end)
        out.append((tokens, mask))
    return out


class _Renderer:
    """One template with its options: renders, and finds turns by the three methods in order of trust."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: ChatOptions):
        self.tokenizer = tokenizer
        self.options = options
        self.variables: dict[str, Any] = dict(options.template_kwargs)
        self.name = _name(tokenizer)
        special = [str(x) for x in tokenizer.all_special_tokens]
        special += [x.content for x in tokenizer.added_tokens_decoder.values() if x.special]
        self._special = sorted(set(special) - {""}, key=len, reverse=True)
        self._stop = str(tokenizer.eos_token) if tokenizer.eos_token else None

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    [dict(x) for x in messages],
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    **self.variables,
                )
            )
        except Exception as error:  # templates raise whatever they like: jinja errors, KeyError, TypeError
            raise SpanNotFoundError(f"The chat template of {self.name} refuses this conversation: {error}") from error

    def turns(self, messages: Sequence[Message], text: str) -> list[_Turn]:
        where = [i for i, x in enumerate(messages) if x["role"] == "assistant"]
        if not where:
            return []
        for method in (self._by_placeholder, self._by_prefix, self._by_marker):
            found = method(messages, where, text)
            if found is not None:
                return found
        raise SpanNotFoundError(
            f"The assistant turns cannot be located in what the chat template of {self.name} renders: it alters or "
            "drops their text. Use a template with {% generation %} markers, or one that keeps assistant texts."
        )

    def _by_placeholder(self, messages: Sequence[Message], where: list[int], text: str) -> list[_Turn] | None:
        """Render with placeholders; the fragments around them and the real texts must give `text` again."""
        marks = _placeholders(text, messages, len(where))
        marked = [dict(x) for x in messages]
        for index, mark in zip(where, marks, strict=True):
            marked[index]["content"] = mark
        skeleton = self.render(marked)
        if any(skeleton.count(x) != 1 for x in marks):
            return None
        fragments, rest = [], skeleton
        for mark in marks:
            before, found, rest = rest.partition(mark)
            if not found:
                return None
            fragments.append(before)
        bounds = _fit(text, [*fragments, rest], [messages[i]["content"] for i in where])
        if bounds is None:
            return None
        turns = []
        for number, (index, (start, end)) in enumerate(zip(where, bounds, strict=True)):
            alone = skeleton if index == len(messages) - 1 else self.render(marked[: index + 1])
            if alone.count(marks[number]) != 1:
                return None
            tail = alone[alone.find(marks[number]) + len(marks[number]) :]
            turns.append(self._turn(messages, index, text, start, end, _common_prefix(tail, text[end:])))
        return turns

    def _by_prefix(self, messages: Sequence[Message], where: list[int], text: str) -> list[_Turn] | None:
        """Take what the conversation gains over its own generation prompt; only if it begins with the turn's text."""
        turns = []
        for index in where:
            opened, closed = self.render(messages[:index], True), self.render(messages[:index])
            upto = self.render(messages[: index + 1])
            content = messages[index]["content"]
            if opened == closed or not upto.startswith(opened + content) or not text.startswith(upto.rstrip()):
                return None
            end = len(opened) + len(content)
            tail = _common_prefix(upto[end:], text[end:])
            turns.append(self._turn(messages, index, text, len(opened), end, tail))
        return turns

    def _by_marker(self, messages: Sequence[Message], where: list[int], text: str) -> list[_Turn] | None:
        """Trust the template's own {% generation %} blocks where it has them, one for each assistant turn."""
        template = self.tokenizer.get_chat_template()
        if "{% generation" not in template and "{%- generation" not in template:
            return None
        result: Any = render_jinja_template(
            conversations=[[dict(x) for x in messages]],
            chat_template=template,
            return_assistant_tokens_mask=True,
            **{**self.tokenizer.special_tokens_map, **self.variables},
        )
        rendered, spans = result[0][0], list(result[1][0])
        if rendered != text or len(spans) != len(where):
            return None
        turns = []
        for index, (start, stop) in zip(where, spans, strict=True):
            closing = self._last_special(text[start:stop])
            if closing is not None and closing[1] == len(text[start:stop].rstrip()):
                content_end = start + closing[0]
                turns.append(self._turn(messages, index, text, start, content_end, text[content_end:stop]))
                continue
            # The block ends before the end-of-turn token: what follows belongs to the turn as far as it is rendered
            # when the conversation ends here.
            alone = self.render(messages[: index + 1])
            if alone[:stop] != text[:stop]:
                return None
            turns.append(self._turn(messages, index, text, start, stop, _common_prefix(alone[stop:], text[stop:])))
        return turns

    def _turn(self, messages: Sequence[Message], index: int, text: str, start: int, end: int, tail: str) -> _Turn:
        """Complete a turn whose text is `[start, end)` and whose template-written remainder is `tail`."""
        closing = self._closing(tail)
        if closing is None:
            raise SpanNotFoundError(
                f"The chat template of {self.name} writes no end-of-turn token after an assistant turn (it writes "
                f"{tail!r}): a drafter trained on it would never see the end of an answer."
            )
        header_end = start
        if self.options.supervise_template_additions:
            header_end = self._header_end(messages[:index], text, start)
        prefix = self.options.assistant_prefix
        if prefix and text.startswith(prefix, start):
            start += len(prefix)
            header_end = start
        return _Turn(header_end, start, end, end + closing[1], end + len(tail))

    def _header_end(self, history: Sequence[Message], text: str, start: int) -> int:
        """End of the header in front of an answer at `start`; what lies between is the template's addition."""
        opened, closed = self.render(history, True), self.render(history)
        if text.startswith(opened) and len(opened) <= start:
            return len(opened)
        # A template may render the history differently once it is history. Its header comes after everything that
        # anybody wrote before, so the last occurrence in front of the answer is the real one.
        header = opened[len(closed) :] if opened.startswith(closed) else ""
        at = text.rfind(header, 0, start) if header else -1
        return start if at < 0 else at + len(header)

    def _closing(self, tail: str) -> tuple[int, int] | None:
        """Place of the end-of-turn token in `tail`: the last stop token, else the last special token, else all text."""
        special = self._last_special(tail)
        if special is not None:
            return special
        stripped = tail.rstrip()
        return (len(stripped) - len(stripped.lstrip()), len(stripped)) if stripped else None

    def _last_special(self, text: str) -> tuple[int, int] | None:
        for candidates in ([self._stop] if self._stop else [], self._special):
            found = [(text.rfind(x), len(x)) for x in candidates if x in text]
            if found:
                at, length = max(found)
                return at, at + length
        return None


def _fit(text: str, fragments: Sequence[str], contents: Sequence[str]) -> list[tuple[int, int]] | None:
    """Place the contents, as the template may have trimmed them, between the fragments so that `text` results."""

    def place(number: int, position: int) -> list[tuple[int, int]] | None:
        if not text.startswith(fragments[number], position):
            return None
        position += len(fragments[number])
        if number == len(contents):
            return [] if position == len(text) else None
        for candidate in _variants(contents[number]):
            if text.startswith(candidate, position):
                rest = place(number + 1, position + len(candidate))
                if rest is not None:
                    return [(position, position + len(candidate)), *rest]
        return None

    return place(0, 0)


def _variants(content: str) -> list[str]:
    """The text itself, trimmed as templates trim, and without the reasoning that templates drop from old turns."""
    answer = content.rsplit("</think>", 1)[-1].lstrip("\n")
    trimmed = [content.lstrip("\n"), content.lstrip(), content.rstrip(), content.strip()]
    return list(dict.fromkeys([content, *trimmed, answer]))


def _common_prefix(one: str, other: str) -> str:
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return one[:length]


def _placeholders(text: str, messages: Sequence[Message], count: int) -> list[str]:
    """Return strings that occur neither in the rendering nor in any message."""
    everything = text + "".join(x["content"] for x in messages)
    nonce = 0
    while f"answer{nonce}x" in everything:
        nonce += 1
    return [f"answer{nonce}x{i}z" for i in range(count)]


def _prepare(messages: Sequence[Message], options: ChatOptions) -> list[dict[str, Any]]:
    prepared = [{**x, "content": x.get("content") or ""} for x in messages]
    if options.system_prompt is not None and (not prepared or prepared[0]["role"] != "system"):
        prepared.insert(0, {"role": "system", "content": options.system_prompt})
    prefix = options.assistant_prefix
    for message in prepared:
        if prefix and message["role"] == "assistant" and not message["content"].startswith(prefix):
            message["content"] = prefix + message["content"]
    return prepared


def _check_tool_calls(messages: Sequence[Message], turns: list[_Turn], text: str, renderer: _Renderer) -> None:
    """Refuse a template that leaves tool calls out: the turn would teach the model to answer with nothing."""
    assistants = [x for x in messages if x["role"] == "assistant"]
    for message, turn in zip(assistants, turns, strict=True):
        for call in message.get("tool_calls") or []:
            name = (call.get("function") or call).get("name")
            if name and name not in text[turn.start : turn.end]:
                raise SpanNotFoundError(f"The chat template of {renderer.name} does not render the tool call {name!r}.")


def _name(tokenizer: PreTrainedTokenizerBase) -> str:
    return tokenizer.name_or_path or type(tokenizer).__name__
