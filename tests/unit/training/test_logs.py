"""Means of a window are sums divided once; the log survives crashes and resumes."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import numpy as np
import pytest

from dspark_jax.training.logs import MetricLog, Speed, Window
from dspark_jax.training.losses import LossTerms
from dspark_jax.training.step import StepMetrics


def terms(runs=(), accept=(0.0, 0.0), valid=(1, 1), **changes):
    values = dict.fromkeys(LossTerms.__dataclass_fields__, np.float32(0))
    values |= {
        "accept_rate": np.asarray(accept, np.float32), "valid": np.asarray(valid, np.float32),
        "correct": np.zeros(2, np.float32), "accepted_run": np.float32(sum(runs)), "blocks": np.float32(len(runs)),
        "measured": np.float32(len(runs)), "weight": np.float32(1), **changes,
    }  # fmt: skip
    return LossTerms(**values)


def metrics(applied=True, loss=1.0, **changes):
    return StepMetrics(
        loss=np.float32(loss), terms=terms(**changes), grad_norm=np.float32(2), learning_rate=np.float32(0.5),
        applied=np.bool_(applied),
    )  # fmt: skip


@pytest.mark.parametrize("grouping", [((3, 1), (2, 0)), ((3,), (1, 2, 0)), ((3, 1, 2, 0),)])
def test_br27_runs_do_not_depend_on_the_grouping(grouping):
    window = Window()
    for runs in grouping:
        window.add(metrics(runs=runs))
    assert window.means()["drafted_run"] == 1.5


def test_positions_are_divided_by_their_own_count():
    window = Window()
    window.add(metrics(runs=(1,), accept=(4, 1), valid=(5, 2)))
    window.add(metrics(runs=(1,), accept=(1, 0), valid=(5, 0)))
    assert window.means()["accept_rate"] == [0.5, 0.5]


def test_what_was_not_measured_is_left_out():
    window = Window()
    window.add(metrics(runs=(1,), measured=np.float32(0)))
    assert {"accept_rate", "tau_probabilistic", "tv"}.isdisjoint(window.means())
    assert window.means()["drafted_run"] == 1


def test_br04_a_step_that_taught_nothing_advances_no_average():
    window = Window()
    window.add(metrics(runs=(2,), loss=3.0))
    before = window.means()
    window.add(metrics(applied=False, loss=0.0, accept=(9, 9)))
    assert window.means() == before and window.steps == 2
    assert "loss" not in Window().means()


def test_a_stored_window_continues_exactly():
    one, other = Window(), Window()
    one.add(metrics(runs=(1, 2), ce=np.float32(0.1)))
    other = Window(json.loads(json.dumps(one.to_json())))
    for window in (one, other):
        window.add(metrics(runs=(3,), ce=np.float32(0.7)))
    assert one.means() == other.means()


def test_lines_after_the_resume_point_are_dropped(tmp_path):
    log = MetricLog(tmp_path, tensorboard=True, resume_step=0)
    for step in (5, 10, 15):
        log.write("train", step, {"loss": step / 10, "accept_rate": [0.5, 0.25]})
    log.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "st')  # cut by a crash
    log = MetricLog(tmp_path, tensorboard=False, resume_step=10)
    log.write("train", 12, {"loss": 0.0})
    log.close()
    records = [json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [x["step"] for x in records] == [5, 10, 12]
    assert records[0] == {"kind": "train", "step": 5, "loss": 0.5, "accept_rate": [0.5, 0.25]}
    assert list((tmp_path / "tensorboard").glob("events*"))


def test_speed_between_two_readings(monkeypatch):
    device = SimpleNamespace(device_kind="TPU v5 lite", memory_stats=lambda: {"peak_bytes_in_use": 3_000_000_000})
    monkeypatch.setattr("jax.local_devices", lambda: [device])
    monkeypatch.setattr("jax.device_count", lambda: 4)
    before = {"steps": 10.0, "seconds": 100.0, "tokens": 1000.0, "blocks": 50.0, "input_wait": 1.0, "saving": 0.0}
    after = {"steps": 14.0, "seconds": 108.0, "tokens": 5000.0, "blocks": 90.0, "input_wait": 1.4, "saving": 0.5}
    speed = Speed(flops=4 * 197e12, began=time.monotonic() - 20, seconds_before=98.0).measure(before, after)
    assert speed["step_seconds"] == 2 and speed["tokens_per_second"] == 500 and speed["blocks_per_second"] == 5
    assert speed["input_wait"] == pytest.approx(0.05) and speed["saving"] == 0.5 and speed["device_gb"] == 3
    assert speed["mfu"] == pytest.approx(0.5)  # a second's work of every device, in two
    assert speed["goodput"] == pytest.approx(10 / 20, rel=1e-2)
    device.device_kind = "some other chip"
    assert "mfu" not in Speed(1.0, time.monotonic(), 0.0).measure(before, after)
