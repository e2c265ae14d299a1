"""Loading prompts: what is kept, under which domain, and what each bad file is told."""

from __future__ import annotations

import json

import pytest

from dspark_jax.evaluation.tasks import domains_in_turn, load_tasks


def write(path, *turns):
    path.write_text("".join(json.dumps({"turns": list(t)}) + "\n" for t in turns))
    return path


def test_built_in_prompts_cover_three_domains():
    prompts = load_tasks()
    counts = {d: sum(p.domain == d for p in prompts) for d in ("math", "code", "chat")}
    assert min(counts.values()) >= 6 and sum(counts.values()) == len(prompts)
    assert all("\\boxed{}" in p.text for p in prompts if p.domain == "math")
    assert len({p.id for p in prompts}) == len({p.text for p in prompts}) == len(prompts)


def test_domains_take_turns():
    prompts = load_tasks()
    mixed = domains_in_turn(prompts)
    assert sorted(p.id for p in mixed) == sorted(p.id for p in prompts)
    assert [p.domain for p in mixed[:6]] == ["math", "code", "chat"] * 2
    uneven = [p for p in prompts if p.domain != "code"][:8]
    assert [p.domain for p in domains_in_turn(uneven)] == ["math", "chat"] * 2 + ["math"] * 4


def test_first_turn_of_files_and_folders(tmp_path):
    write(tmp_path / "b.jsonl", ["second"])
    write(tmp_path / "a.jsonl", ["first", "ignored"], ["third"])
    (tmp_path / "notes.txt").write_text("not a task")
    found = [(p.id, p.domain, p.text) for p in load_tasks([tmp_path])]
    assert found == [("a:1", "a", "first"), ("a:2", "a", "third"), ("b:1", "b", "second")]
    assert [p.text for p in load_tasks([tmp_path], max_samples=1)] == ["first", "second"]
    assert load_tasks([tmp_path / "b.jsonl"])[0].messages == [{"role": "user", "content": "second"}]


def test_files_can_share_a_named_domain(tmp_path):
    one, two = write(tmp_path / "one.jsonl", ["a"]), write(tmp_path / "two.jsonl", ["b"])
    mixed = load_tasks([f"code={one}", str(two), f"code={two}"])
    assert [(p.domain, p.id) for p in mixed] == [("code", "one:1"), ("code", "two:1"), ("two", "two:1")]
    assert len(load_tasks([f"code={one}", f"code={two}"], max_samples=1)) == 1


def test_a_path_may_hold_an_equals_sign(tmp_path):
    assert load_tasks([write(tmp_path / "k=v.jsonl", ["a"])])[0].domain == "k=v"


def test_blank_lines_keep_line_numbers(tmp_path):
    path = tmp_path / "gaps.jsonl"
    path.write_text('\n{"turns": ["a"]}\n\n{"turns": ["b"]}\n')
    assert [p.id for p in load_tasks([path])] == ["gaps:2", "gaps:4"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"turns": ["a"', "bad.jsonl:2 is not JSON"),
        ('{"question": "a"}', r"bad.jsonl:2 has no usable 'turns' \(keys \['question'\]\)"),
        ('{"turns": []}', "bad.jsonl:2 has no usable"),
        ('{"turns": "a"}', "bad.jsonl:2 has no usable"),
        ('{"turns": ["  "]}', "bad.jsonl:2 has no usable"),
        ('["a"]', r"bad.jsonl:2 has no usable 'turns' \(list\)"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(f'{{"turns": ["fine"]}}\n{line}\n')
    with pytest.raises(ValueError, match=message):
        load_tasks([path])


def test_missing_and_empty_sources(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.jsonl does not exist"):
        load_tasks([tmp_path / "nowhere.jsonl"])
    with pytest.raises(FileNotFoundError, match=r"holds no \.jsonl"):
        load_tasks([tmp_path])
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ValueError, match="holds no prompt"):
        load_tasks([tmp_path / "empty.jsonl"])
    with pytest.raises(ValueError, match="max_samples is 0"):
        load_tasks(max_samples=0)
