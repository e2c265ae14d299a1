"""Calibration error, AUROC and Brier score per position against the reference's numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from goldens import golden_cases

from dspark_jax.spec.metrics import confidence_metrics


@pytest.mark.parametrize("folder", golden_cases("confidence_metrics*"), ids=lambda f: f.name)
def test_confidence_metrics(folder: Path):
    inputs, expected = np.load(folder / "inputs.npz"), np.load(folder / "expected.npz")
    ours = confidence_metrics(
        inputs["confidence_logits"],
        np.cumprod(inputs["accept_prefix_mask"], axis=1).sum(1),
        np.minimum(inputs["effective_length"], inputs["draft_token_count"]),
    )
    np.testing.assert_array_equal(ours.count, expected["total_weight"])
    np.testing.assert_array_equal(ours.bin_count, expected["coarse_count"])
    np.testing.assert_allclose(np.nan_to_num(ours.bin_predicted) * ours.bin_count, expected["coarse_pred"], atol=1e-4)
    np.testing.assert_allclose(np.nan_to_num(ours.bin_observed) * ours.bin_count, expected["coarse_target"], atol=1e-9)
    for name, key in dict(
        ece="ece", auroc="auc", brier="brier", mean_predicted="pred_mean", mean_observed="target_mean"
    ).items():
        np.testing.assert_allclose(getattr(ours, name), expected[key], atol=1e-6, err_msg=name)
