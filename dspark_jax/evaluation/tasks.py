"""Evaluation prompts: JSONL files with `turns`, grouped into domains.

One line is one prompt, `{"turns": ["…", …]}`; the first turn is asked. The domain is the file's name without its
ending, unless the source names another: `code=humaneval.jsonl` and `code=mbpp.jsonl` make one domain of two files.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

BUILT_IN = Path(__file__).resolve().parents[1] / "prompts"
# All between 65 and 128 tokens in SmolLM2's template: one prefill program a system, as a short run is half compiling.
_BUILT_IN_DOMAINS = ("math", "code", "chat")


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One prompt of a task.

    Attributes:
        id: file and line it came from, such as `gsm8k:12`.
        domain: what it is counted under.
        text: the user's message.
    """

    id: str
    domain: str
    text: str

    @property
    def messages(self) -> list[dict[str, str]]:
        """The prompt as a conversation."""
        return [{"role": "user", "content": self.text}]


def load_tasks(sources: Sequence[str | Path] = (), *, max_samples: int | None = None) -> list[Prompt]:
    """Load prompts, file by file.

    Args:
        sources: JSONL files or folders of them, each optionally as `domain=path`; empty takes the built-in prompts.
        max_samples: prompts kept of every domain, the first ones; None keeps all.

    Returns:
        The prompts, those of one domain together.

    Raises:
        FileNotFoundError: a path does not exist, or a folder holds no JSONL file.
        ValueError: a line that is not JSON or has no `turns` (file and line are named), an empty file, or
            `max_samples` below 1.
    """
    if max_samples is not None and max_samples < 1:
        raise ValueError(f"max_samples is {max_samples}: expected at least 1, or leave it out to take every prompt")
    named = [(d, BUILT_IN / f"{d}.jsonl") for d in _BUILT_IN_DOMAINS] if not sources else []
    for source in sources:
        named += _files(str(source))
    domains: dict[str, list[Prompt]] = {}
    for domain, path in named:
        domains.setdefault(domain, []).extend(_read(path, domain))
    return [prompt for prompts in domains.values() for prompt in prompts[:max_samples]]


def domains_in_turn(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The same prompts, a round of one of each domain after another: any few in a row are a fair sample."""
    domains: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        domains.setdefault(prompt.domain, []).append(prompt)
    rounds = itertools.zip_longest(*domains.values())
    return [prompt for one_of_each in rounds for prompt in one_of_each if prompt is not None]


def _files(source: str) -> list[tuple[str, Path]]:
    """(domain, file) pairs of one source."""
    name, separator, rest = source.partition("=")
    # A path may hold an equals sign itself.
    named = bool(separator) and not Path(source).expanduser().exists()
    path = Path(rest if named else source).expanduser()
    if not path.exists():
        raise FileNotFoundError(
            f"tasks: {path} does not exist; expected a JSONL file or a folder of them, optionally as domain=path"
        )
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files:
        raise FileNotFoundError(f"tasks: the folder {path} holds no .jsonl file")
    return [(name if named else file.stem, file) for file in files]


def _read(path: Path, domain: str) -> list[Prompt]:
    prompts = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                prompts.append(Prompt(f"{path.stem}:{number}", domain, _first_turn(line, f"{path}:{number}")))
    if not prompts:
        raise ValueError(f'{path} holds no prompt: expected one {{"turns": ["…"]}} a line')
    return prompts


def _first_turn(line: str, where: str) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON ({error}); every line is one object with 'turns'") from None
    turns = row.get("turns") if isinstance(row, dict) else None
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str) or not turns[0].strip():
        found = f"keys {sorted(row)}" if isinstance(row, dict) else type(row).__name__
        raise ValueError(f'{where} has no usable \'turns\' ({found}); expected {{"turns": ["first question", …]}}')
    return turns[0]
