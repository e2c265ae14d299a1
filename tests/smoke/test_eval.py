"""`python -m dspark_jax.eval` from files on disk to tables, JSON and plots, with models that fit in a few kilobytes."""

from __future__ import annotations

import dataclasses
import json
import os

import pytest
import tiny_models

from dspark_jax import eval as command
from dspark_jax.evaluation import measure as measure_module
from dspark_jax.evaluation.tables import RESULTS_BEGIN, RESULTS_END


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    tiny_models.write_target(folder / "target")
    for kind in ("dspark", "eagle3"):
        tiny_models.write_drafter(folder / kind, kind)
    tasks = folder / "tasks"
    tasks.mkdir()
    # Equally long prompts need one set of compiled programs.
    (tasks / "left.jsonl").write_text('{"turns": ["one?"]}\n{"turns": ["two?"]}\n')
    (tasks / "right.jsonl").write_text('{"turns": ["six?"]}\n')
    return folder


def arguments(models, *more, drafters=("dspark", "eagle3")):
    drafts = [x for name in drafters for x in ("--draft", str(models / name))]
    tasks = ["--tasks", str(models / "tasks")]
    return ["--target", str(models / "target"), *drafts, *tasks, "--max-new-tokens", "12", *more]


def test_from_files_to_tables(models, tmp_path, capsys):
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{RESULTS_BEGIN}\n{RESULTS_END}\nafter\n")
    outputs = ["--output", f"{tmp_path}/results.json", "--plots", f"{tmp_path}/docs", "--markdown", str(readme)]
    assert command.main(arguments(models, *outputs)) == 0
    printed = capsys.readouterr().out
    assert "Lossless: all 6 speculative outputs equal plain decoding" in printed
    for title in ("Accepted length", "Conditional acceptance by position", "Accepted length compared", "Speed"):
        assert title in printed
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["lossless"] == {**results["lossless"], "compared": 6, "differences": [], "faults": 0}
    assert [s["kind"] for s in results["systems"][1:]] == ["DSpark", "EAGLE-3"]
    assert {r["domain"] for r in results["rows"]} == {"left", "right", "overall"}
    assert {len(s["tokens"]) for s in results["samples"] if s["finish_reason"] == "length"} <= {12}
    document = readme.read_text()
    assert document.startswith("before\n") and document.endswith("after\n")
    assert "![accepted length](docs/accepted_length.png)" in document
    assert os.path.getsize(tmp_path / "docs" / "conditional_acceptance.png") > 1000


def test_drafters_that_need_no_training(models, tmp_path, capsys):
    """Prompt lookup, and a language model: here the target itself, whose drafts are all right."""
    more = ("--draft", "ngram", "--draft", f"lm:{models / 'target'}", "--output", f"{tmp_path}/results.json")
    assert command.main(arguments(models, *more, drafters=())) == 0
    assert "Lossless: all 6 speculative outputs equal plain decoding" in capsys.readouterr().out
    systems = json.loads((tmp_path / "results.json").read_text())["systems"][1:]
    assert [(s["name"], s["kind"], s["block_size"]) for s in systems] == [
        ("ngram", "n-gram", 7),
        (f"lm:{models / 'target'}", "language model", 5),
    ]
    assert systems[0]["parameters"] == 0 < systems[1]["parameters"]


def test_sampled_text_is_not_compared(models, capsys):
    more = ("--temperature", "1", "--max-samples", "1", "--batch-size", "2", "--block-size", "2")
    assert command.main(arguments(models, *more, drafters=["dspark"])) == 0
    assert "different tokens from the same distribution" in capsys.readouterr().out


def test_a_difference_fails(models, capsys, monkeypatch):
    """Greedy float32 text that is not the plain one: the command says so and ends with status 1."""
    real = measure_module.generate

    def wrong(target, drafter, prompts, **settings):
        found = real(target, None, prompts, **{**settings, "block_size": None})
        if drafter is None:
            return found
        return [dataclasses.replace(g, tokens=(*g.tokens[:-1], g.tokens[-1] ^ 1)) for g in found]

    monkeypatch.setattr(measure_module, "generate", wrong)
    assert command.main(arguments(models, "--max-samples", "1", drafters=["dspark"])) == 1
    assert "NOT LOSSLESS: 0 of 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--tasks", "nowhere.jsonl"], "nowhere.jsonl does not exist"),
        (["--max-new-tokens", "0"], "max_new_tokens is 0"),
        (["--draft", "nowhere"], "nowhere does not exist"),
    ],
)
def test_mistakes_are_said_in_a_sentence(models, more, message, capsys):
    assert command.main(["--target", str(models / "target"), *more]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_without_shipped_drafters(monkeypatch, capsys):
    monkeypatch.setattr(command, "shipped_drafters", lambda: ())
    assert command.main([]) == 2
    assert "ships no drafters" in capsys.readouterr().err


def test_the_papers_drafters_come_in_its_order_and_others_by_name_only(monkeypatch):
    monkeypatch.setattr(command, "shipped_drafters", lambda: ("dflash", "dspark", "eagle3", "mtp"))
    assert command.default_drafters() == ("dspark", "dflash", "eagle3")
