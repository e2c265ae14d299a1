"""`python -m dspark_jax.calibrate` from files on disk to a calibrated copy, with models of a few kilobytes."""

from __future__ import annotations

import json

import pytest
import tiny_models

from dspark_jax import calibrate as command
from dspark_jax.draft.loading import load_drafter, write_temperatures
from dspark_jax.target.loading import load_target


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    tiny_models.write_target(folder / "target")
    for kind in ("dspark", "dflash"):
        tiny_models.write_drafter(folder / kind, kind)
    (folder / "left.jsonl").write_text("".join(f'{{"turns": ["{t}?"]}}\n' for t in ("one", "two", "six", "ten")))
    (folder / "right.jsonl").write_text('{"turns": ["why?"]}\n{"turns": ["who?"]}\n')
    return folder


def arguments(models, draft, *more):
    return ["--target", str(models / "target"), "--draft", str(draft), "--max-new-tokens", "24", *more]


def test_from_files_to_a_calibrated_copy_and_again(models, tmp_path, capsys):
    source = {f.name: f.read_bytes() for f in (models / "dspark").iterdir()}
    tasks = ["--tasks", str(models / "left.jsonl"), str(models / "right.jsonl")]
    places = ["--output", f"{tmp_path}/copy", "--report", f"{tmp_path}/report.json", "--plots", f"{tmp_path}/plots"]
    assert command.main(arguments(models, models / "dspark", *tasks, *places)) == 0
    printed = capsys.readouterr().out
    for text in (
        "Calibration of the predicted survival",
        "Ranking and squared error",
        "Thresholds",
        "fewer than 20,000",
    ):
        assert text in printed
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["prompts"]["fit"]["count"] == report["prompts"]["check"]["count"] == 3
    assert report["thresholds"].keys() == {"left", "right", "overall"}
    assert report["quality"]["oracle"]["count"] == report["quality"]["raw"]["count"]
    assert {f.name for f in (tmp_path / "plots").iterdir()} == {"reliability.png", "threshold_sweep.png"}

    assert {f.name: f.read_bytes() for f in (models / "dspark").iterdir()} == source
    target = load_target(str(models / "target"))
    copy = load_drafter(f"{tmp_path}/copy", target)
    assert copy.config.confidence_temperatures == tuple(report["temperatures"])

    # Fitting what is calibrated already gives the same temperatures and changes no byte.
    fitted = (tmp_path / "copy" / "config.json").read_bytes()
    again = arguments(models, tmp_path / "copy", "--in-place", *tasks)
    assert command.main(again) == 0
    assert (tmp_path / "copy" / "config.json").read_bytes() == fitted
    write_temperatures(tmp_path / "copy", [5.0, 5.0, 5.0])
    assert command.main(again) == 0
    assert (tmp_path / "copy" / "config.json").read_bytes() == fitted


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--fit-tasks", "left.jsonl"], "give --tasks, which is split into two halves, or"),
        (["--tasks", "left.jsonl", "--fit-tasks", "left.jsonl", "--check-tasks", "right.jsonl"], "give --tasks, which"),
        (["--fit-tasks", "left.jsonl", "--check-tasks", "left.jsonl"], "4 prompts of the check are prompts of the fit"),
        (["--output", "copy", "--in-place"], "exclude each other"),
        (["--output", "dspark"], "is the drafter's own folder: say --in-place"),
        (["--max-new-tokens", "0"], "max_new_tokens is 0"),
        (["--draft", "dflash"], "no confidence head"),
        (["--draft", "nowhere"], "nowhere does not exist"),
    ],
)
def test_mistakes_are_said_in_a_sentence(models, more, message, capsys, monkeypatch):
    monkeypatch.chdir(models)
    monkeypatch.setattr("dspark_jax.draft.loading.shipped_drafters", lambda: ())
    assert command.main(["--target", "target", "--draft", "dspark", *more]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_a_shipped_drafter_is_not_changed_in_place(models, monkeypatch, capsys):
    monkeypatch.setattr("dspark_jax.draft.loading.PRETRAINED", models)
    monkeypatch.setattr("dspark_jax.draft.loading.shipped_drafters", lambda: ("dspark",))
    assert command.main(["--target", str(models / "target"), "--draft", "dspark", "--in-place"]) == 2
    assert "'dspark' is a name: give the drafter's path" in capsys.readouterr().err
