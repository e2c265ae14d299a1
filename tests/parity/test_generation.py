"""Draft inference rounds and speculative generation against the reference."""

from __future__ import annotations

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from goldens import golden_cases
from safetensors.numpy import load_file

from dspark_jax.draft.contract import Drafter
from dspark_jax.draft.heads import sample_block
from dspark_jax.draft.loading import arrange_params, drafter_config, functions_for
from dspark_jax.engine.generate import generate
from dspark_jax.nn.attention import make_plan
from dspark_jax.sampling import make_sampling, request_keys
from dspark_jax.spec.verify import confidence_cut
from dspark_jax.target.loading import load_target
from dspark_jax.types import RaggedTokens, TargetFeatures

BLOCK = golden_cases("dspark_*") + golden_cases("dflash_*")
EAGLE = golden_cases("eagle3_*")
THRESHOLDS = (0.0, 0.3, 0.5, 0.7)


def load(folder, **changes):
    config = drafter_config(json.loads((folder / "config.json").read_text()), str(folder))
    config = dataclasses.replace(config, **changes)
    tensors = load_file(folder / "weights.safetensors")
    for name in ("embed_tokens.weight", "lm_head.weight"):
        tensors.pop(name, None)
    functions = functions_for(config)
    target_folder = folder.parent / json.loads((folder / "meta.json").read_text())["settings"]["tgt"]
    if not target_folder.is_dir():
        pytest.skip(f"{folder.name} drafts for {target_folder}, which is not there: set DSPARK_GOLDENS to all of them")
    target = load_target(str(target_folder), dtype=jnp.float32)
    return target, Drafter(folder.name, config, arrange_params(functions, tensors, str(folder)), functions)


def rows(start, count, slots=1):
    return RaggedTokens(
        tokens=jnp.zeros(count, jnp.int32),
        slots=jnp.zeros(count, jnp.int32),
        positions=jnp.arange(start, start + count, dtype=jnp.int32),
    )


@pytest.mark.parametrize("folder", BLOCK, ids=lambda p: p.name)
def test_inference_rounds_of_parallel_drafters(folder):
    target, drafter = load(folder)
    functions, params = drafter.functions, drafter.params
    inputs, expected = np.load(folder / "infer_inputs.npz"), np.load(folder / "infer_expected.npz")
    state = functions.init(1, 64)
    greedy = make_sampling(1, vocab_size=199, temperature=0.0)
    for r in range(3):
        taps = jnp.asarray(inputs[f"r{r}/target_hidden_states"][0], jnp.float32)
        start = int(inputs[f"r{r}/start"])
        plan = make_plan(rows(start - len(taps), len(taps)), 1, len(taps))
        length = jnp.asarray([start], jnp.int32)
        state = functions.extend(
            params, target.tables, state, plan, TargetFeatures(taps=taps), jnp.zeros(len(taps), jnp.int32), length
        )
        anchor = jnp.asarray(inputs[f"r{r}/draft_input_ids"][:, 0], jnp.int32)
        proposed, proposal = functions.propose(
            params,
            target.tables,
            state,
            anchor,
            length,
            jnp.ones(1, bool),
            request_keys(jnp.zeros(1, jnp.uint32)),
            greedy,
            functions.config.block_size,
        )
        np.testing.assert_array_equal(proposal.tokens, expected[f"r{r}/draft_tokens"])
        if proposal.confidence_logits is not None:
            np.testing.assert_allclose(proposal.confidence_logits, expected[f"r{r}/confidence_logits"], atol=1e-4)
            for threshold, want in zip(THRESHOLDS, expected[f"r{r}/prefix_len_thr"], strict=True):
                assert int(confidence_cut(proposal.confidence_logits, threshold)[0]) == int(want)
        # The scan from the reference's own hidden states and base logits gives the reference's tokens and logits.
        logits = []

        def choose(row, k, logits=logits):
            return jnp.argmax(row, axis=-1).astype(jnp.int32), row

        tokens, _, scanned = sample_block(
            functions.config,
            params,
            jnp.asarray(expected[f"r{r}/base_logits"]),
            jnp.asarray(expected[f"r{r}/block_hidden"]),
            anchor,
            choose,
        )
        np.testing.assert_array_equal(tokens, expected[f"r{r}/draft_tokens"])
        np.testing.assert_allclose(scanned, expected[f"r{r}/draft_logits"], atol=1e-4)
        if r == 2:
            total = int(expected["r2/cache_k0"].shape[2])
            for i, cache in enumerate(proposed.caches):
                for ours, name in ((cache.k, "k"), (cache.v, "v")):
                    want = expected[f"r2/cache_{name}{i}"][0]
                    np.testing.assert_allclose(np.asarray(ours)[0, :, :total], want, atol=1e-4)
        state = proposed


@pytest.mark.parametrize("folder", EAGLE, ids=lambda p: p.name)
def test_inference_rounds_of_eagle3(folder):
    target, drafter = load(folder)
    functions, params = drafter.functions, drafter.params
    inputs, expected = np.load(folder / "infer_inputs.npz"), np.load(folder / "infer_expected.npz")
    features = jnp.asarray(inputs["target_features"][0], jnp.float32)
    ids = jnp.asarray(inputs["committed_ids"][0], jnp.int32)
    greedy = make_sampling(1, vocab_size=199, temperature=0.0)
    state = functions.init(1, 64)
    ends = [int(inputs["r0/start"])]
    for r in range(3):
        ends.append(ends[-1] + inputs[f"r{r}/committed_tokens"].shape[1])

    def extend(state, begin, end):
        plan = make_plan(rows(begin, end - begin), 1, end - begin)
        return functions.extend(
            params,
            target.tables,
            state,
            plan,
            TargetFeatures(taps=features[begin:end]),
            ids[begin + 1 : end + 1],
            jnp.asarray([end], jnp.int32),
        )

    state = extend(state, 0, ends[0])
    np.testing.assert_allclose(state.hidden, expected["init_draft_hidden"][0], atol=1e-4)
    for r in range(3):
        anchor = ids[ends[r]][None]
        verify_ids = expected[f"r{r}/verify_input_ids"]
        np.testing.assert_array_equal(anchor, verify_ids[:, 0])
        state, proposal = functions.propose(
            params,
            target.tables,
            state,
            anchor,
            jnp.asarray([ends[r]], jnp.int32),
            jnp.ones(1, bool),
            request_keys(jnp.zeros(1, jnp.uint32)),
            greedy,
            functions.config.block_size,
        )
        np.testing.assert_array_equal(proposal.tokens, verify_ids[:, 1:])
        state = extend(state, ends[r], ends[r + 1])
        np.testing.assert_allclose(state.hidden, expected[f"r{r}/draft_hidden_after_update"][0], atol=1e-4)
    total = expected["cache_k0"].shape[2]
    np.testing.assert_allclose(np.asarray(state.cache.k)[0, :, :total], expected["cache_k0"][0], atol=1e-4)
    np.testing.assert_allclose(np.asarray(state.cache.v)[0, :, :total], expected["cache_v0"][0], atol=1e-4)


def release_run(run):
    """A run of the release without its extra round: it starts one when exactly max_new_tokens tokens exist."""
    tokens = run["output_ids"][len(run["prompt"]) :]
    rounds, emitted = [], 1
    for accepted, length in zip(run["accepted_draft_lengths"], run["acceptance_lengths"], strict=True):
        if emitted >= run["max_new_tokens"]:
            break
        rounds.append((accepted, length))
        emitted += length
    return tokens, rounds


@pytest.mark.parametrize("folder", BLOCK + EAGLE, ids=lambda p: p.name)
def test_speculative_generation(folder):
    """Every run of the release: tokens exactly, accepted lengths round by round, and equal to plain decoding."""
    target, drafter = load(folder)
    runs = json.loads((folder / "specgen.json").read_text())
    groups: dict[tuple, list] = {}
    for name, run in runs.items():
        stops = tuple(t for t in run["stop_token_ids"] or () if t < 199)
        groups.setdefault((run["confidence_threshold"], stops, "_ttt4" in name), []).append((name, run))
    for (threshold, stops, short), members in groups.items():
        results = generate(
            target,
            drafter,
            [run["prompt"] for _, run in members],
            max_new_tokens=members[0][1]["max_new_tokens"],
            stop_token_ids=stops,
            confidence_threshold=threshold or 0.0,
            block_size=4 if short else None,
            batch_size=3,
        )
        for (name, run), result in zip(members, results, strict=True):
            tokens, rounds = release_run(run)
            assert list(result.tokens) == tokens, name
            assert run["equals_greedy"] and tokens == run["greedy_ids"][len(run["prompt"]) :][: len(tokens)], name
            assert [r.accepted for r in result.rounds] == [a for a, _ in rounds], name
            assert [r.accepted_length for r in result.rounds] == [length for _, length in rounds], name
