"""`python -m dspark_jax.reduce` from files on disk to a smaller drafter, with models of a few kilobytes."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tiny_models

from dspark_jax import reduce as command
from dspark_jax.draft.loading import load_drafter
from dspark_jax.draft.vocabulary import draft_ids
from dspark_jax.target.loading import load_target


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    tiny_models.write_target(folder / "target")
    for kind in ("dspark", "dflash", "eagle3", "mtp"):
        tiny_models.write_drafter(folder / kind, kind)
    config = json.loads((folder / "dspark" / "config.json").read_text())
    (folder / "dspark" / "config.json").write_text(json.dumps({**config, "training": {"seed": 7}}))
    # One token a byte: the answers hold x 24 times, y 16 times and z 8 times; prompts are not counted.
    turns = [{"role": "user", "content": "qqqq" * 20}, {"role": "assistant", "content": "xyxyxz" * 8}]
    (folder / "answers.jsonl").write_text(json.dumps({"conversations": turns}) + "\n")
    return folder


def arguments(models, draft, output, *more):
    places = ["--target", str(models / "target"), "--draft", str(draft), "--output", str(output)]
    return [*places, "--data", str(models / "answers.jsonl"), *more]


@pytest.mark.parametrize("kind", ["dspark", "dflash", "eagle3", "mtp"])
def test_the_most_frequent_tokens_of_the_answers_stay(models, kind, tmp_path, capsys):
    assert command.main(arguments(models, models / kind, tmp_path / kind, "--size", "2")) == 0
    assert "2 of 259 tokens kept; they are 81.6% of 49 answer tokens" in capsys.readouterr().out  # 40 of 48 and the end
    target = load_target(str(models / "target"))
    whole, reduced = load_drafter(str(models / kind), target), load_drafter(str(tmp_path / kind), target)
    ids = np.asarray(draft_ids(reduced.params))
    assert [target.tokenizer.decode([i]) for i in ids] == ["x", "y"]
    assert reduced.config.draft_vocab_size == 2
    np.testing.assert_array_equal(reduced.params["fc"]["weight"], whole.params["fc"]["weight"])


def test_what_the_config_says_of_the_training_stays(models, tmp_path):
    assert command.main(arguments(models, models / "dspark", tmp_path / "copy")) == 0
    assert json.loads((tmp_path / "copy" / "config.json").read_text())["training"] == {"seed": 7}
    config = load_drafter(str(tmp_path / "copy"), load_target(str(models / "target"))).config
    assert config.draft_vocab_size == 4  # x, y, z and the end of the turn: 8,192 are not there


def test_mistakes_are_said_in_a_sentence(models, tmp_path, capsys):
    for draft, output, more, message in [
        (models / "dspark", tmp_path / "a", ["--size", "0"], "--size 0: a drafter needs a token to draft"),
        (models / "dspark", models / "dspark", [], "is the drafter's own folder"),
        (models / "dspark", tmp_path / "a", ["--data", str(tmp_path / "none.jsonl")], "none.jsonl"),
        (tmp_path / "nowhere", tmp_path / "a", [], "nowhere does not exist"),
    ]:
        assert command.main(arguments(models, draft, output, *more)) == 2
        error = capsys.readouterr().err
        assert message in error and "Traceback" not in error
    assert not (tmp_path / "a").exists()
    assert command.main(arguments(models, models / "dspark", tmp_path / "b")) == 0
    assert command.main(arguments(models, tmp_path / "b", tmp_path / "c")) == 2
    assert "does not draft by its target's whole head" in capsys.readouterr().err
