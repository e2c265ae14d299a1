"""Whole runs on a tiny target: resume bit for bit, refusals, interruption, checks, budgets."""

from __future__ import annotations

import dataclasses
import json
import os
import signal

import jax
import numpy as np
import pytest
from training_setup import tiny_config, tiny_corpus, tiny_target

from dspark_jax.draft.loading import load_drafter
from dspark_jax.training import loop
from dspark_jax.training.loop import train
from dspark_jax.training.processes import Agreement


def lines(output, kind="train"):
    records = [json.loads(x) for x in (output / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in x.items() if k != "seconds"} for x in records if x["kind"] == kind]


def run(output, **changes):
    decode_check = changes.pop("decode_check", None)
    config = tiny_config(changes.pop("kind", "dspark"), output=output, checkpoint_every=5, **changes)
    return train(config, tiny_target(), changes.pop("corpus", tiny_corpus()), decode_check=decode_check)


def stop_after(monkeypatch, step):
    """Send SIGTERM while step `step` is under way."""
    original, calls = loop.Run.next_batch, []

    def next_batch(self, batches):
        calls.append(batches)
        if len(calls) == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, batches)

    monkeypatch.setattr(loop.Run, "next_batch", next_batch)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    output = tmp_path_factory.mktemp("straight")
    checked = []

    def decode_check(drafter, prompts):
        checked.append((drafter.name, prompts))
        return {"tau": 1.5}

    result = run(
        output, validate_every=10, decode_every=5, decode_prompts=3, decode_check=decode_check, tensorboard=True
    )
    return output, result, checked


def test_br40_resume_is_the_same_run(straight, tmp_path, monkeypatch):
    output, result, _ = straight
    with monkeypatch.context() as patch:
        stop_after(patch, 5)
        first = run(tmp_path)
    assert (first.reason, first.step) == ("signal", 5)
    assert lines(tmp_path) == lines(output)[:1]
    second = run(tmp_path)
    assert (second.reason, second.step) == ("finished", 10)
    assert second.seconds > first.seconds
    for ours, theirs in zip(
        jax.tree.leaves(second.drafter.params), jax.tree.leaves(result.drafter.params), strict=True
    ):
        assert np.array_equal(ours, theirs)
    # Lines cover steps 1-3, 4-6 (across the interruption), 7-9 and 10.
    assert [x["step"] for x in lines(tmp_path)] == [3, 6, 9, 10]
    assert lines(tmp_path) == lines(output)
    assert lines(tmp_path)[-1]["sequences"] == 40


def test_checks_run_on_time(straight):
    output, result, checked = straight
    assert (result.reason, result.step) == ("finished", 10)
    assert checked == [("step 5", 3), ("step 10", 3)]
    assert [x["tau"] for x in lines(output, "decode")] == [1.5, 1.5]
    (validation,) = lines(output, "validation")
    assert validation["step"] == 10 and len(validation["accept_rate"]) == 3
    assert list((output / "tensorboard").iterdir())
    for record in lines(output):
        assert record["tau_probabilistic"] >= 1 and record["blocks"] > 0
        assert {"loss", "ce", "tv", "confidence", "grad_norm", "learning_rate", "accept_rate"} <= record.keys()


def test_export_loads_as_a_drafter(straight):
    output, result, _ = straight
    assert sorted(p.name for p in (output / "export").iterdir()) == ["000005", "000010"]
    drafter = load_drafter(str(output / "export" / "000010"), tiny_target())
    assert drafter.config == result.drafter.config
    rounded = lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=2**-8, atol=1e-30)
    jax.tree.map(rounded, drafter.params, result.drafter.params)
    config = json.loads((output / "export" / "000010" / "config.json").read_text())
    assert config["training"]["step"] == 10


def test_a_finished_run_is_not_repeated(straight):
    output, result, _ = straight
    before = (output / "metrics.jsonl").read_bytes()
    again = run(output)
    assert again.step == 10 and again.seconds == pytest.approx(result.seconds, abs=1)
    assert (output / "metrics.jsonl").read_bytes() == before


def test_other_data_or_settings_refuse(straight):
    output, _, _ = straight
    with pytest.raises(ValueError, match="trained on batches"):
        train(tiny_config(output=output), tiny_target(), tiny_corpus(seed=1))
    with pytest.raises(ValueError, match=r"other settings: .*'seed': \(0, 1\)"):
        run(output, seed=1)


def test_settings_that_do_not_fit_refuse(tmp_path):
    with pytest.raises(ValueError, match="give both or neither"):
        run(tmp_path, decode_every=5)
    with pytest.raises(ValueError, match="mask_token_id 5 occurs"):
        run(tmp_path, drafter=dataclasses.replace(tiny_config().drafter, mask_token_id=5))
    with pytest.raises(ValueError, match="only 0 row ids are divisible by 50"):
        train(tiny_config(output=tmp_path, validate_every=1), tiny_target(), tiny_corpus().subset(range(1, 20)))


def test_a_time_budget_counts_over_resumes(tmp_path):
    """The first run spends the budget, the second starts where it stopped and is over after a step."""
    first = run(tmp_path, max_minutes=1e-6, kind="dflash")
    assert (first.reason, first.step) == ("time", 1)
    second = run(tmp_path, max_minutes=1e-6, kind="dflash")
    assert (second.reason, second.step) == ("time", 2)
    assert second.seconds > first.seconds > 0


def test_a_run_starts_from_a_saved_drafter(straight, tmp_path):
    """With a learning rate of nothing it ends where it began, and the step count begins anew."""
    output, _, _ = straight
    saved = str(output / "export" / "000010")
    still = dataclasses.replace(tiny_config().optimizer, learning_rate=1e-30, weight_decay=0.0)
    again = run(tmp_path, initial_drafter=saved, steps=2, optimizer=still)
    assert again.step == 2
    expected = load_drafter(saved, tiny_target()).params
    for ours, theirs in zip(jax.tree.leaves(again.drafter.params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-20)
    with pytest.raises(ValueError, match=r"another shape: .*markov_rank 4 .the run: 0."):
        run(tmp_path / "other", kind="dflash", initial_drafter=saved, steps=2)


def test_steps_without_finite_gradients_are_skipped_and_then_too_many(tmp_path):
    target = tiny_target()
    broken = dataclasses.replace(target.tables, head=target.tables.head.at[0, 0].set(np.nan))
    target = dataclasses.replace(
        target, tables=broken, config=dataclasses.replace(target.config, tie_word_embeddings=False)
    )
    config = tiny_config(output=tmp_path, max_bad_steps=4)
    with pytest.raises(FloatingPointError, match=r"4 steps in a row had gradients that are not finite.*loss nan"):
        train(config, target, tiny_corpus())


def test_the_kernel_is_refused_where_it_cannot_run(tmp_path):
    with pytest.raises(ValueError, match="attention 'kernel' runs on TPUs, found cpu"):
        run(tmp_path, attention="kernel")


def test_the_speed_of_a_run_is_logged_and_steps_are_traced(tmp_path):
    run(tmp_path, steps=6, log_every=3, profile_steps=(2, 3))
    speeds = lines(tmp_path, "speed")
    assert [x["step"] for x in speeds] == [3, 6]
    for speed in speeds:
        assert speed["step_seconds"] > 0 and speed["tokens_per_second"] > 0 and speed["blocks_per_second"] > 0
        assert 0 < speed["goodput"] < 1 and 0 < speed["input_wait"] < 1 and speed["host_gb"] > 0
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
    with pytest.raises(ValueError, match=r"profile_steps \(5, 4\): expected a first step"):
        run(tmp_path / "other", steps=6, profile_steps=(5, 4))


def test_several_processes_agree_two_steps_later(monkeypatch):
    """One process that plays two: what any device's process wants is the answer to all, `lag` calls later."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    agreement = Agreement(lag=2)
    assert [agreement(wish) for wish in (0, 2, 1, 0, 0)] == [0, 0, 0, 2, 1]
    monkeypatch.undo()
    assert [Agreement(lag=2)(wish) for wish in (0, 2)] == [0, 2]
