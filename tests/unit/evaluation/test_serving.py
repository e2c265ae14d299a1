"""Load and step costs on tiny random models: what is counted and compared; nothing compiles on the clock."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from random_models import VOCAB, random_drafter, random_target

from dspark_jax.bench.serve import Replay, bench_replay
from dspark_jax.engine.profile import StepProfile, measure_profile
from dspark_jax.evaluation.closed_loop import LoadSettings
from dspark_jax.evaluation.replay import record_traces, replay, save_traces
from dspark_jax.evaluation.serving import (
    TURNS,
    Load,
    LoadPoint,
    ServingSystem,
    best_other_ratio,
    load_from_report,
    load_grid,
    load_report,
    matched_ratio,
    measure_load,
    summarize_load,
)
from dspark_jax.evaluation.serving_plots import write_load_plots, write_profile_plot
from dspark_jax.evaluation.tables import markdown
from dspark_jax.spec.schedule import Fixed, NoDraft

TARGET = random_target()
PROMPTS = [np.random.default_rng(i).integers(0, VOCAB, 3 + i).tolist() for i in range(4)]


@pytest.fixture(scope="module")
def measured():
    drafter = random_drafter("vanilla")
    systems = [
        ServingSystem("plain", None, NoDraft()),
        ServingSystem("fixed 2", drafter, Fixed(2)),
        ServingSystem("scheduled", drafter, None),
    ]
    settings = LoadSettings(
        concurrency=(2,), requests=2, least=5, max_new_tokens=6, max_length=40, repeats=2, profile_context=8
    )
    said = []
    loads = list(measure_load(TARGET, systems, PROMPTS, settings, 2, on_progress=said.append))
    assert [len(load.points) for load in loads] == [3, 6]
    return loads[-1], settings, said


def test_every_system_serves_the_same_load(measured, tmp_path):
    load, settings, said = measured
    points, profiles = load.points, load.profiles
    assert [(p.repeat, p.system) for p in points] == [(r, s) for r in (0, 1) for s in ("plain", "fixed 2", "scheduled")]
    for point in points:
        assert len(point.request_rates) >= 5 and point.tokens >= 5 * 3 and point.compilations == 0
        assert 0 <= point.padding < 1 and 0 < point.planning < 1
    assert all(p.drafts == 0 for p in points if p.system == "plain")
    assert all(p.budget <= 6 for p in points if p.system == "fixed 2")
    assert set(profiles) == {2} and len(said) == 3 + 2 * TURNS
    assert load.lossless.compared >= 8 and not load.lossless.faults
    rows = summarize_load(points)
    assert [r.system for r in rows] == ["plain", "fixed 2", "scheduled"]
    mixed = [*points, *(dataclasses.replace(p, concurrency=1) for p in points)]
    assert [r.concurrency for r in summarize_load(mixed)] == [1] * 3 + [2] * 3
    assert "| 2 | scheduled |" in markdown(load_grid(rows))
    report = json.loads(json.dumps(load_report(load, settings)))
    assert load_from_report(report, tmp_path) == load == load.finished(6) and load.finished(7) == Load()
    pytest.importorskip("matplotlib")
    assert all(path.stat().st_size > 1000 for path in write_load_plots(rows, tmp_path))


def test_requests_differ_in_length_but_not_between_systems():
    settings = LoadSettings(max_new_tokens=32)
    budgets = [settings.budget(i) for i in range(16)]
    assert len(set(budgets)) > 12 and min(budgets) >= 16 and max(budgets) <= 48
    assert abs(np.mean(budgets) - 32) < 2
    assert {dataclasses.replace(settings, spread=0.0).budget(i) for i in range(16)} == {32}
    with pytest.raises(ValueError, match=r"spread by 1.5: expected a share"):
        next(measure_load(TARGET, [ServingSystem("plain", None, NoDraft())], PROMPTS, LoadSettings(spread=1.5), 1))


def test_a_measured_load_is_replayed_beside_its_measurements(measured, tmp_path):
    load, settings, _ = measured
    profile = load.profiles[2]
    load = dataclasses.replace(load, profiles={2: dataclasses.replace(profile, mixed=2 * profile.plain[-1])})
    traces = record_traces(TARGET, random_drafter("vanilla"), PROMPTS, max_new_tokens=6)
    save_traces(traces, tmp_path / "traces.json")
    (tmp_path / "load.json").write_text(json.dumps({"results": load_report(load, settings)}))
    command = Replay(traces=tmp_path / "traces.json", measured=tmp_path / "load.json", fixed=(2,), steps=20)
    found = {p["policy"]: p for p in bench_replay(command)["points"]}
    assert [p["measured"] > 0 for p in found.values()] == [True] * 3
    # A prompt takes time: a load of nothing but decoding is faster under the same costs.
    decoding = replay(traces, NoDraft(), load.profiles[2].curve, load.profiles[2].plain_curve, concurrency=2, steps=20)
    plain = next(p for p in found.values() if p["policy"] == str(NoDraft()))
    assert plain["throughput"] < decoding.throughput
    with pytest.raises(ValueError, match="either --curves"):
        bench_replay(dataclasses.replace(command, measured=None))
    with pytest.raises(FileNotFoundError, match="bench serve --output"):
        bench_replay(dataclasses.replace(command, measured=tmp_path / "none.json"))


def test_a_profile_belongs_to_its_machine_and_models(measured, tmp_path):
    profile, drafter = measured[0].profiles[2], random_drafter("vanilla")
    assert profile.rows[-1] == 2 * 5 and len(profile.plain) >= 2 and profile.propose > 0
    seconds = profile.curve.bucket_seconds
    assert list(seconds) == sorted(seconds)
    profile.save(tmp_path / "profile.json")
    assert StepProfile.load(tmp_path / "profile.json", TARGET, drafter) == profile
    dataclasses.replace(profile, device="another").save(tmp_path / "other.json")
    with pytest.raises(ValueError, match="device 'another'"):
        StepProfile.load(tmp_path / "other.json", TARGET, drafter)
    assert StepProfile.load(tmp_path / "other.json", TARGET, drafter, force=True).device == "another"
    with pytest.raises(ValueError, match="drafter"):
        StepProfile.load(tmp_path / "profile.json", TARGET, random_drafter("gated"))
    with pytest.raises(FileNotFoundError, match=r"dspark_jax\.profile"):
        StepProfile.load(tmp_path / "none.json", TARGET, drafter)
    with pytest.raises(ValueError, match="positions 1"):
        measure_profile(TARGET, drafter, slots=1, context=64)
    pytest.importorskip("matplotlib")
    write_profile_plot(profile, tmp_path / "curve.png")


def point(system, concurrency, repeat, throughput, user):
    return LoadPoint(system, concurrency, repeat, int(throughput), 1.0, (user,), 1.0, 0, 0, 0.0, 0.0, 0, 0)


def test_ratios_compare_within_a_repeat_and_at_equal_speed():
    points = [
        *(point("plain", 1, r, x, 10.0) for r, x in enumerate((100, 110, 50))),
        *(point("fixed", 1, r, x, 10.0) for r, x in enumerate((90, 90, 90))),
        *(point("scheduled", 1, r, x, 20.0) for r, x in enumerate((120, 110, 100))),
    ]
    # The best of the others by median is plain (100), also in the repeat in which it was slow.
    np.testing.assert_allclose(best_other_ratio(points, "scheduled", ["plain", "fixed"])[1], [1.2, 1.0, 2.0])
    rows = summarize_load(
        [
            point("a", 1, 0, 100, 20.0),
            point("a", 4, 0, 300, 10.0),
            point("b", 1, 0, 80, 16.0),
            point("b", 4, 0, 180, 8.0),
        ]
    )
    # Common speeds are 10 and 16: a gives 300 and 180; b gives 155 and 80.
    np.testing.assert_allclose(matched_ratio(rows, "a", "b"), [(10.0, 300 / 155), (16.0, 180 / 80)])
    assert matched_ratio(rows, "a", "missing") == []
