"""Decoding statistics against the reference's evaluation rows, from the rounds of its own recorded runs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from goldens import golden_root

from dspark_jax.spec.metrics import AcceptanceStatistics, pool

ROOT = golden_root()
EXPECTED = json.loads((ROOT / "eval_metrics" / "expected.json").read_text()) if ROOT else {}


def statistics(run: dict, block_size: int, *, drop_extra_round: bool) -> AcceptanceStatistics:
    """The rounds of one recorded run; `emitted` is cut at the budget as the output is."""
    lengths = run["acceptance_lengths"]
    if drop_extra_round and has_extra_round(run):
        lengths = lengths[:-1]
    rounds = run["rounds"][: len(lengths)]
    emitted = np.diff(np.minimum(1 + np.cumsum([0, *lengths]), run["max_new_tokens"]))
    return AcceptanceStatistics.from_rounds(
        np.array([r["accepted"] for r in rounds], np.int64),
        np.array([r["draft_token_count"] for r in rounds], np.int64),
        np.array([r["terminated"] for r in rounds], bool),
        emitted,
        block_size=block_size,
    )


def has_extra_round(run: dict) -> bool:
    """The release decodes once more when exactly `max_new_tokens` tokens exist already; we do not."""
    return sum(run["acceptance_lengths"][:-1]) + 1 == run["max_new_tokens"] and bool(run["acceptance_lengths"])


@pytest.mark.parametrize("name", EXPECTED)
def test_evaluation_row(name: str):
    """The expected rows count every recorded round, the extra ones included, and every last round in full."""
    assert ROOT is not None
    expected = EXPECTED[name]
    runs = json.loads((ROOT / name.split("/")[0] / "specgen.json").read_text())
    runs = [runs[run] for run in expected["runs"]]
    size = expected["max_proposal_tokens"]
    pooled = pool([statistics(run, size, drop_extra_round=False) for run in runs], block_size=size)

    summary, row = expected["summary"], expected["row"]
    assert pooled.accepted_length == summary["acceptance_length_sum"]
    assert pooled.rounds == summary["proposal_count"]
    assert pooled.proposed == summary["proposal_length_sum"]
    assert pooled.accepted_at.tolist() == summary["accepted_at_pos"]
    assert pooled.proposed_at.tolist() == summary["proposals_at_pos"]
    assert pooled.tau == pytest.approx(row["acceptance_length"])
    assert pooled.mean_proposed == pytest.approx(row["draft_tokens_per_proposal"])
    assert pooled.verify_rate == pytest.approx(row["verify_rate"])
    np.testing.assert_allclose(pooled.acceptance_by_position, row["accept_rates_by_position"])


@pytest.mark.parametrize("name", EXPECTED)
def test_where_we_differ(name: str):
    """Without the release's extra rounds the emitted tokens are the same, and the output is exactly as long."""
    assert ROOT is not None
    expected = EXPECTED[name]
    runs = json.loads((ROOT / name.split("/")[0] / "specgen.json").read_text())
    runs = [runs[run] for run in expected["runs"]]
    size = expected["max_proposal_tokens"]
    for run in runs:
        ours = statistics(run, size, drop_extra_round=True)
        raw = statistics(run, size, drop_extra_round=False)
        assert raw.rounds - ours.rounds == has_extra_round(run)
        assert 1 + ours.emitted == 1 + raw.emitted == run["num_output_tokens"]


def test_number_of_extra_rounds(goldens: Path):
    """The goldens' note says 16 of 146 runs; a different count means that the rule above is not theirs."""
    runs = [
        run
        for folder in sorted(goldens.glob("*/specgen.json"))
        for run in json.loads(folder.read_text()).values()
        if isinstance(run, dict) and "acceptance_lengths" in run
    ]
    assert (sum(map(has_extra_round, runs)), len(runs)) == (16, 146)
