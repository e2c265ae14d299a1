"""Collecting proposals from real decoding, assessing them, and drawing what came out."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from random_models import BLOCK, VOCAB, random_drafter, random_target

from dspark_jax.engine.generate import generate
from dspark_jax.evaluation import calibration
from dspark_jax.evaluation.calibration import (
    Collected,
    Settings,
    assess,
    check_disjoint,
    collect,
    grids,
    notes,
    report,
    split_prompts,
    without_temperatures,
)
from dspark_jax.evaluation.calibration_plots import reliability_figure, sweep_figure, write_calibration_plots
from dspark_jax.evaluation.tables import markdown, rich_table
from dspark_jax.evaluation.tasks import Prompt
from dspark_jax.spec.calibration import Proposals

SETTINGS = Settings(max_new_tokens=10, batch_size=2)
STOP = 3


def prompts(*texts, domain="x"):
    return [Prompt(f"{domain}:{i}", domain, text) for i, text in enumerate(texts)]


def calibrated(drafter, temperatures):
    config = dataclasses.replace(drafter.config, confidence_temperatures=temperatures)
    return dataclasses.replace(drafter, config=config, functions=dataclasses.replace(drafter.functions, config=config))


@pytest.fixture
def tokenless(monkeypatch):
    """Prompts as token ids (the tiny target has no tokenizer), and one stop token."""
    texts = {"ab": [1, 2], "cd": [4, 5], "ef": [6, 7]}

    def decode(target, drafter, messages, **settings):
        ids = [texts[m[0]["content"]] for m in messages]
        decode.results = generate(target, drafter, ids, stop_token_ids=[STOP], **settings)
        return decode.results

    monkeypatch.setattr(calibration, "generate", decode)
    return decode


def test_collected_proposals_are_the_rounds(tokenless):
    drafter = random_drafter("vanilla")
    found = collect(random_target(), drafter, prompts("ab", "cd", "ef"), SETTINGS)
    rounds = [r for g in tokenless.results for r in g.rounds]
    p = found.proposals
    assert len(p) == len(rounds) == len(found.domains) > 5
    assert p.cases.tolist() == [r.accepted if r.stopped else BLOCK for r in rounds]
    assert p.accepted.tolist() == [r.accepted for r in rounds]
    np.testing.assert_allclose(1 / (1 + np.exp(-p.logits)), [r.confidences for r in rounds], rtol=1e-9)
    assert np.all((p.accept_rates > 0) & (p.accept_rates <= 1 + 1e-6)), "whole blocks were verified"

    # Temperatures in the drafter change neither the proposals nor, therefore, what is fitted on them.
    again = collect(random_target(), calibrated(drafter, (0.5, 2.0, 3.0, 4.0)), prompts("ab", "cd", "ef"), SETTINGS)
    np.testing.assert_array_equal(again.proposals.logits, p.logits)
    assert assess(again, again).temperatures == assess(found, found).temperatures


def test_diagnostics_leave_the_text_alone():
    target, drafter = random_target(), random_drafter("vanilla")
    ask = {"max_new_tokens": 10, "temperature": 1.0, "seed": 5}
    plain = generate(target, drafter, [[1, 2], [4, 5, 6]], **ask)
    more = generate(target, drafter, [[1, 2], [4, 5, 6]], diagnostics=True, **ask)
    assert [g.tokens for g in plain] == [g.tokens for g in more]
    stripped = [[dataclasses.replace(r, confidence_logits=None, accept_rates=None) for r in g.rounds] for g in more]
    assert stripped == [list(g.rounds) for g in plain]
    assert all(len(r.accept_rates) == r.proposed for g in more for r in g.rounds)


def test_recorded_accept_rates_are_the_frequencies():
    """First block after one prompt, many seeds: the mean rate at position 1 is how often it was accepted."""
    target, drafter = random_target(), random_drafter("vanilla")
    count = 800
    results = generate(
        target,
        drafter,
        [[1, 2]] * count,
        max_new_tokens=2,
        temperature=1.0,
        stop_token_ids=[VOCAB],
        batch_size=200,
        diagnostics=True,
    )
    first = [g.rounds[0] for g in results]
    rates, accepted = np.array([r.accept_rates[0] for r in first]), np.array([r.accepted > 0 for r in first])
    assert rates.std() > 0.01, "the rate depends on the anchor that was drawn"
    assert abs(rates.mean() - accepted.mean()) < 4 * np.sqrt(rates.mean() * (1 - rates.mean()) / count)


def test_a_drafter_without_the_head_is_refused():
    for kind in ("dflash", "eagle3"):
        with pytest.raises(ValueError, match="no confidence head to calibrate"):
            without_temperatures(random_drafter(kind))


def test_no_block_at_all(tokenless):
    with pytest.raises(ValueError, match="no block was drafted"):
        collect(
            random_target(), random_drafter("vanilla"), prompts("ab"), dataclasses.replace(SETTINGS, max_new_tokens=1)
        )


def test_prompts_are_dealt_alternately_and_equal_texts_stay_together():
    fit, check = split_prompts(prompts("a", "b", "a", "c", "b"))
    assert [p.text for p in fit] == ["a", "a", "c"] and [p.text for p in check] == ["b", "b"]
    check_disjoint(fit, check)
    with pytest.raises(ValueError, match=r"1 prompts of the check are .* first y:0 \(x:0\)"):
        check_disjoint(prompts("a"), prompts("a", "d", domain="y"))
    with pytest.raises(ValueError, match=r"two different prompts at least.*found 1"):
        split_prompts(prompts("a", "a"))


@pytest.mark.parametrize("name", ["max_new_tokens", "batch_size"])
def test_settings_out_of_range(name):
    with pytest.raises(ValueError, match=f"{name} is 0"):
        Settings(**{name: 0})


def synthetic(seed, factor=2.0, count=3000, domains=("math", "chat"), rates=True):
    """A head whose logits are `factor` times too large."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(1.0, 1.0, (count, 3))
    chance = 1 / (1 + np.exp(-logits))
    accepted = np.cumprod(rng.random((count, 3)) < chance, axis=1).sum(1)
    proposals = Proposals.from_rounds(
        factor * logits, np.full(count, 3), accepted, np.zeros(count, bool), chance if rates else None
    )
    return Collected(proposals=proposals, domains=tuple(domains[i % len(domains)] for i in range(count)))


@pytest.fixture(scope="module")
def assessment():
    return assess(synthetic(0), synthetic(1))


def test_assessment(assessment):
    # Three thousand blocks say no more than this.
    np.testing.assert_allclose(assessment.temperatures, 2.0, rtol=0.3)
    assert np.all(assessment.calibrated.ece < assessment.raw.ece)
    assert np.all(assessment.oracle.brier < assessment.raw.brier)
    assert list(assessment.sweeps) == ["math", "chat", "overall"]
    rates = [p.acceptance for p in assessment.sweeps["overall"]]
    assert [p.threshold for p in assessment.sweeps["overall"]] == [k / 10 for k in range(10)]
    assert rates == sorted(rates), "a higher threshold rejects less in vain"
    assert list(assess(synthetic(0, domains=("x",)), synthetic(1, domains=("x",))).sweeps) == ["x"]


def test_tables_and_notes(assessment):
    titles = [grid.title for grid in grids(assessment)]
    assert titles == ["Calibration of the predicted survival", "Ranking and squared error", "Thresholds"]
    for grid in grids(assessment):
        assert rich_table(grid).row_count == sum(map(len, grid.sections))
        assert all(len(row) == len(grid.header) for section in grid.sections for row in section)
    assert "ECE oracle" in markdown(grids(assessment)[0])
    without = assess(synthetic(0), synthetic(1, rates=False))
    assert without.oracle is None and "oracle" not in " ".join(grids(without)[0].header + grids(without)[1].header)
    lines = notes(assessment)
    assert lines[0] == "Fitted on 3,000 proposals, checked on 3,000 others."
    assert "fewer than 20,000 proposals" in lines[1] and len(lines) == 2
    worst = dataclasses.replace(assessment, temperatures=(1.0, 10.0, 0.1), fitted_on=20_000, checked_on=20_000)
    assert "position 2, 3 is at the end of what is tried (0.1 to 10)" in notes(worst)[1]


def test_report_is_json(assessment):
    drafter = calibrated(random_drafter("vanilla"), (1.0, 2.0, 3.0, 4.0))
    sets = {"fit": prompts("a"), "check": prompts("b")}
    content = report(random_target(), drafter, sets, SETTINGS, assessment)
    read = json.loads(json.dumps(content, allow_nan=False))
    assert read["proposals"] == {"fit": 3000, "check": 3000}
    assert read["temperatures"] == list(assessment.temperatures)
    assert read["drafter"]["temperatures_before"] == [1, 2, 3, 4]
    assert read["quality"]["calibrated"]["ece"] == assessment.calibrated.ece.tolist()
    assert np.array(read["quality"]["raw"]["bin_count"]).shape == (3, 20)
    assert read["mean_ece"].keys() == {"raw", "calibrated", "oracle", "chance"}


def test_figures(assessment, tmp_path):
    panels = reliability_figure(assessment).axes
    assert [p.get_title().split(":")[0] for p in panels] == ["position 1", "position 2", "position 3"]
    lines = {line.get_label(): line for line in panels[0].get_lines()}
    many = assessment.raw.bin_count[0] >= 20
    np.testing.assert_array_equal(lines["as trained"].get_ydata(), assessment.raw.bin_observed[0][many])
    bars = sweep_figure(assessment).axes
    assert [p.get_title() for p in bars[:3]] == ["math", "chat", "overall"]
    heights = [bar.get_height() for bar in bars[2].patches[:10]]
    np.testing.assert_allclose(heights, [p.accepted for p in assessment.sweeps["overall"]])
    files = write_calibration_plots(assessment, tmp_path / "plots")
    assert [f.name for f in files] == ["reliability.png", "threshold_sweep.png"]
    assert all(f.read_bytes().startswith(b"\x89PNG") for f in files)
