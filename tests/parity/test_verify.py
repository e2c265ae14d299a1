"""Verification against the reference's numbers: given draws, exact laws by enumeration, residual edge cases."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from goldens import golden_cases

from dspark_jax.sampling import is_greedy, make_sampling, probabilities, residual
from dspark_jax.spec.verify import accept_prefix, confidence_cut, is_stop, next_token_rows
from dspark_jax.types import Proposal

FOLDERS = golden_cases("verify*")


def cases() -> list:
    return [
        pytest.param(folder, index, id=f"{folder.name}-{index}-{case['name']}")
        for folder in FOLDERS
        for index, case in json.loads((folder / "meta.json").read_text())["cases"].items()
    ]


@pytest.mark.parametrize("folder, index", cases())
def test_given_draws(folder: Path, index: str):
    settings = json.loads((folder / "meta.json").read_text())["cases"][index]
    golden = np.load(folder / "expected.npz")
    case = {k.split("/", 1)[1]: golden[k] for k in golden if k.startswith(f"case{index}/")}
    tokens = jnp.asarray(case["draft_tokens"], jnp.int32)
    rows, block = tokens.shape
    assert block == settings["gamma"]

    sampling = make_sampling(rows, vocab_size=8, temperature=settings["temperature"]).replace(mode="plain")
    logits = jnp.broadcast_to(jnp.asarray(case["target_logits"]), (rows, *case["target_logits"].shape))
    p = probabilities(logits, sampling)
    q = jnp.broadcast_to(jnp.asarray(case["draft_probs"]), (rows, *case["draft_probs"].shape))
    proposal = Proposal(tokens=tokens, probs=q, confidence_logits=None, num_valid=jnp.full(rows, block))
    at = lambda x: jnp.take_along_axis(x, tokens[..., None], axis=-1)[..., 0]
    accepted = accept_prefix(at(p[:, :block]), at(q), jnp.asarray(case["uniforms"]), jnp.full(rows, block))
    np.testing.assert_array_equal(accepted, case["prefix_mask"].sum(1))

    stop_ids = jnp.array([settings["stop_token_ids"] or [-1]] * rows)
    stops = np.asarray(is_stop(tokens, stop_ids)) & (np.arange(block) < np.asarray(accepted)[:, None])
    stopped = stops.any(1)
    cut = np.where(stopped, stops.argmax(1) + 1, accepted)
    np.testing.assert_array_equal(stopped, case["terminated"])
    np.testing.assert_array_equal(cut, case["accepted"])
    np.testing.assert_array_equal(np.where(stopped, cut, block), case["effective"])

    p_next, q_next = next_token_rows(p, proposal, accepted)
    law = residual(p_next, jnp.where((accepted < block)[:, None], q_next, 0.0))
    np.testing.assert_allclose(law[~stopped], case["next_dist"][~stopped], atol=2e-6)
    if is_greedy(sampling)[0]:
        assert set(np.unique(law)) == {0.0, 1.0}


def outcome_law(p: np.ndarray, q: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Law of the accepted count, of the first token, and of the first two tokens of rounds that accepted x_1.

    All draft tokens are enumerated. The uniform number is integrated out: `accept_prefix` accepts below the ratio and
    rejects above it, which is checked here for every token, so the ratio is the accept probability.
    """
    block = len(q)
    ratio = np.minimum(1.0, p[:block] / np.maximum(q, 1e-8))
    for nudge, expected in ((1 - 1e-5, 1), (1 + 1e-5, 0)):
        u = np.where(ratio < 1, ratio * nudge, 1 - expected)[..., None]
        counts = accept_prefix(
            *(jnp.asarray(x, jnp.float32) for x in (p[:block, :, None], q[..., None], u)), jnp.ones(ratio.shape, int)
        )
        np.testing.assert_array_equal(counts, np.full(ratio.shape, expected))
    correction = np.asarray(residual(jnp.asarray(p[:block], jnp.float32), jnp.asarray(q, jnp.float32)), np.float64)
    survive = (q * ratio).sum(1)
    counts = np.array([np.prod(survive[:k]) * (1 - survive[k] if k < block else 1.0) for k in range(block + 1)])
    first = q[0] * ratio[0] + (1 - survive[0]) * correction[0]
    second = q[1] * ratio[1] + (1 - survive[1]) * correction[1]
    return counts, first, np.outer(q[0] * ratio[0], second)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda f: f.name)
def test_exact_laws(folder: Path):
    golden = np.load(folder / "expected.npz")
    p, q = golden["target_probs"], golden["draft_probs"]
    counts, first, joint = outcome_law(p, q)
    np.testing.assert_allclose(counts, golden["num_accepted_dist"], atol=1e-7)
    np.testing.assert_allclose(first, golden["first_token_dist"], atol=1e-7)
    np.testing.assert_allclose(first, p[0], atol=1e-7)
    np.testing.assert_allclose(joint, golden["second_token_joint"], atol=1e-7)
    np.testing.assert_allclose(counts @ np.arange(len(counts)), golden["expected_accepted"], atol=1e-6)
    block = len(q)
    np.testing.assert_allclose(
        residual(jnp.asarray(p[:block], jnp.float32), jnp.asarray(q, jnp.float32)), golden["residual"], atol=1e-6
    )


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda f: f.name)
def test_residual_edge_cases(folder: Path):
    golden = np.load(folder / "expected.npz")
    law = residual(jnp.asarray(golden["residual_fn/target"]), jnp.asarray(golden["residual_fn/draft"]))
    np.testing.assert_allclose(law, golden["residual_fn/dist"], atol=1e-6)


@pytest.mark.parametrize("folder", golden_cases("dspark_*"), ids=lambda f: f.name)
def test_confidence_threshold(folder: Path):
    golden = np.load(folder / "infer_expected.npz")
    rounds = [k.split("/")[0] for k in golden if k.endswith("/prefix_len_thr")]
    if not rounds:
        pytest.skip("this drafter has no confidence head")
    for name in rounds:
        logits = jnp.asarray(golden[f"{name}/confidence_logits"]).reshape(1, -1)
        kept = [int(confidence_cut(logits, threshold)[0]) for threshold in (0.0, 0.3, 0.5, 0.7)]
        np.testing.assert_array_equal(kept, golden[f"{name}/prefix_len_thr"], err_msg=name)
