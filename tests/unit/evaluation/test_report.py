"""The JSON report: complete, valid, and the same numbers as the summary."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest
from decoded import answer, example, measurement, target

from dspark_jax.evaluation.lossless import check_lossless
from dspark_jax.evaluation.measure import PLAIN
from dspark_jax.evaluation.report import report, write_report
from dspark_jax.evaluation.summary import summarize


def make(result, seed=0):
    prompts = [s.prompt for s in result.samples[PLAIN]]
    return report(target(seed), prompts, result, summarize(result), check_lossless(result, jnp.float32))


def strict_json(content, path):
    """Written and read back; a NaN in the file would fail here."""

    def refuse(text):
        raise AssertionError(text)

    write_report(content, path)
    return json.loads(path.read_text(), parse_constant=refuse)


def test_numbers_survive(tmp_path):
    content = strict_json(make(example()), tmp_path / "results.json")
    rows = {(r["system"], r["domain"]): r for r in content["rows"]}
    good = rows["good", "overall"]
    assert good["tau"][0] == pytest.approx(16 / 5) and good["macro_tau"][0] == pytest.approx(10 / 3)
    assert (good["rounds"], good["drafted"], good["accepted"], good["emitted"]) == (5, 15, 11, 16)
    np.testing.assert_allclose(good["conditional_acceptance"], [1, 3 / 5, 1])
    assert good["speedup"][0] == pytest.approx(2)
    # Undefined numbers are null, not NaN.
    assert rows["poor", "math"]["conditional_acceptance"] == [0, None, None]
    assert content["comparisons"][0]["baseline"] == "poor"


def test_one_row_a_prompt_and_system(tmp_path):
    samples = strict_json(make(example()), tmp_path / "results.json")["samples"]
    assert [(s["system"], s["prompt"]) for s in samples] == [
        (name, f"file:{i}") for name in (PLAIN, "good", "poor") for i in (1, 2, 3)
    ]
    assert samples[3]["accepted"] == [3, 3] and samples[3]["drafted"] == [3, 3] and samples[3]["emitted"] == [4, 4]
    assert samples[3]["batch_seconds"]["decode"] == 1.0


def test_what_was_measured_can_be_told_apart():
    one, other = make(example()), make(example(), seed=1)
    assert one["target"]["fingerprint"] != other["target"]["fingerprint"]
    assert one["prompts"] == other["prompts"] and one["prompts"]["count"] == 3
    assert one["settings"]["dtype"] == "float32" and one["settings"]["max_new_tokens"] == 64
    assert one["versions"]["jax"] and one["machine"]["cores"] >= 1
    assert [s["name"] for s in one["systems"]] == [PLAIN, "good", "poor"]


def test_differences_are_listed():
    ours = [answer([1], tokens=[0, 9, 2])]
    content = make(measurement({PLAIN: [answer([0, 0], plain=True)], "a": ours}, ["x"]))
    assert content["lossless"]["faults"] == 1
    assert content["lossless"]["differences"][0]["position"] == 1
