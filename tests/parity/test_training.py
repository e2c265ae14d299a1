"""Training of DSpark, DFlash and EAGLE-3 against the reference: hidden states, losses, gradients, optimizer steps."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from goldens import golden_cases
from safetensors.numpy import load_file

from dspark_jax.draft.loading import arrange_params, drafter_config, functions_for, tensor_name
from dspark_jax.nn.decoder import is_constant
from dspark_jax.nn.intervals import anchor_intervals
from dspark_jax.training.anchors import Anchors, block_labels, slot_decay
from dspark_jax.training.losses import LossConfig, block_loss, eagle3_loss, slot_weights
from dspark_jax.types import TargetTables

BLOCK = golden_cases("dspark_*") + golden_cases("dflash_*")
EAGLE = golden_cases("eagle3_*")
by_name = pytest.mark.parametrize("folder", BLOCK, ids=lambda p: p.name)
eagle_by_name = pytest.mark.parametrize("folder", EAGLE, ids=lambda p: p.name)


def load(folder):
    config = drafter_config(json.loads((folder / "config.json").read_text()), str(folder))
    tensors = load_file(folder / "weights.safetensors")
    tables = TargetTables(
        embed=jnp.asarray(tensors.pop("embed_tokens.weight"), jnp.float32),
        head=jnp.asarray(tensors.pop("lm_head.weight"), jnp.float32),
        embed_scale=config.decoder.embed_scale,
        soft_cap=config.decoder.soft_cap,
    )
    functions = functions_for(config)
    return functions, arrange_params(functions, tensors, str(folder)), tables


def rows(folder):
    data = np.load(folder / "inputs.npz")
    tokens = jnp.asarray(data["input_ids"], jnp.int32)
    return {
        "tokens": tokens,
        "positions": jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape),
        "segments": jnp.asarray(data["attention_mask"], jnp.int32),
        "loss_mask": jnp.asarray(data["loss_mask"], bool),
        "taps": jnp.asarray(data["target_hidden_states"], jnp.float32),
        "last_hidden": jnp.asarray(data["target_last_hidden_states"], jnp.float32),
        "anchors": Anchors(
            index=jnp.asarray(data["anchor_positions"], jnp.int32), keep=jnp.asarray(data["block_keep_mask"], bool)
        )
        if "anchor_positions" in data
        else None,
    }


def block_objective(functions, params, tables, r, config, chunk=4):
    labels = block_labels(r["anchors"], r["tokens"], r["loss_mask"], r["segments"], functions.config.block_size)
    outputs = functions.train_blocks(
        params,
        tables,
        r["taps"],
        r["tokens"],
        r["positions"],
        r["segments"],
        r["anchors"].index,
        r["anchors"].keep,
        labels.tokens,
    )
    denominator = jnp.sum(slot_weights(labels, config.loss_decay))
    loss, terms = block_loss(
        outputs, params, tables, r["last_hidden"], r["anchors"], labels, config, denominator, chunk=chunk
    )
    return loss, (terms, outputs, labels)


def loss_config(folder, functions):
    meta = json.loads((folder / "meta.json").read_text())
    ce, tv, confidence = meta["alphas"]
    return LossConfig(ce=ce, tv=tv, confidence=confidence if functions.config.confidence_head else 0.0), meta


@by_name
def test_masks_positions_and_labels(folder):
    functions, _, _ = load(folder)
    r, expected = rows(folder), np.load(folder / "expected.npz")
    size = functions.config.block_size
    anchors = r["anchors"]
    batch, length = r["tokens"].shape
    count = anchors.index.shape[1]
    mask = anchor_intervals(anchors.index, anchors.keep, r["segments"], size).mask(length)
    dense = np.asarray(expected["attention_mask_dense"]).reshape(batch, count, size, -1)
    keep = np.asarray(anchors.keep)
    got = np.asarray(mask).reshape(batch, count, size, length)
    np.testing.assert_array_equal(got[keep], dense[..., :length][keep])
    positions = np.asarray(expected["position_ids"])[:, length:].reshape(batch, count, size)
    ours = np.asarray(anchors.index)[..., None] + np.arange(size)
    np.testing.assert_array_equal(ours[keep], positions[keep])
    labels = block_labels(anchors, r["tokens"], r["loss_mask"], r["segments"], size)
    np.testing.assert_array_equal(labels.valid, expected["eval_mask"].astype(bool))
    valid = np.asarray(labels.valid)
    np.testing.assert_array_equal(np.asarray(labels.tokens)[valid], expected["target_ids"][valid])


@by_name
def test_forward_and_losses(folder):
    functions, params, tables = load(folder)
    r, expected = rows(folder), np.load(folder / "expected.npz")
    config, meta = loss_config(folder, functions)
    loss, (terms, outputs, labels) = block_objective(functions, params, tables, r, config)
    keep, valid = np.asarray(r["anchors"].keep), np.asarray(labels.valid)
    hidden = expected["output_hidden"].reshape(outputs.hidden.shape)
    np.testing.assert_allclose(np.asarray(outputs.hidden)[keep], hidden[keep], atol=1e-4)
    logits = tables.logits(outputs.hidden)
    if outputs.markov is not None:
        logits = logits + outputs.markov @ params["markov_head"]["markov_w2"]["weight"].T
    np.testing.assert_allclose(np.asarray(logits)[valid], expected["draft_logits"][valid], atol=1e-4)
    if outputs.confidence_logits is not None:
        got = np.asarray(outputs.confidence_logits)
        np.testing.assert_allclose(got[valid], expected["confidence_pred"][valid], atol=1e-4)
    np.testing.assert_allclose(loss, expected["total_loss"], rtol=1e-5)
    np.testing.assert_allclose(terms.ce / terms.weight, expected["loss/ce"], rtol=1e-5)
    np.testing.assert_allclose(terms.ce, expected["term/ce_loss_num"], rtol=1e-5)
    np.testing.assert_allclose(terms.weight, expected["term/ce_loss_den"], rtol=1e-6)
    if config.tv:  # the reference reports 0 where the term is off; ours measures it all the same
        np.testing.assert_allclose(terms.tv / terms.weight, expected["loss/l1"], rtol=1e-5)
    if functions.config.confidence_head:
        np.testing.assert_allclose(terms.confidence / terms.weight, expected["loss/confidence"], rtol=1e-5)
    metrics = meta["metrics"]
    for k in range(functions.config.block_size):
        np.testing.assert_allclose(
            terms.accept_rate[k] / terms.valid[k], metrics[f"train/accept_rate@{k}"], rtol=1e-4, err_msg=f"position {k}"
        )
    np.testing.assert_allclose(1 + terms.survival / terms.blocks, metrics["train/tau_probabilistic"], rtol=1e-5)
    if functions.config.confidence_head:
        for ours, name in (
            (terms.confidence_error, "abs_error"),
            (terms.confidence_bias, "bias"),
            (terms.confidence_cumprod_bias, "cumprod_bias"),
        ):
            np.testing.assert_allclose(
                ours / terms.weight, metrics[f"train/confidence_{name}"], atol=1e-5, err_msg=name
            )


@by_name
def test_other_alphas_and_decays(folder):
    functions, params, tables = load(folder)
    r = rows(folder)
    _, meta = loss_config(folder, functions)
    cases = meta.get("alt_total_losses", {})
    for text, value in cases.items():
        decay, alphas = text.removeprefix("gamma=").split(",alphas=")
        ce, tv, confidence = json.loads(alphas.replace("(", "[").replace(")", "]"))
        decay = None if decay == "None" else float(decay)
        if not functions.config.confidence_head:
            confidence = 0.0
        config = LossConfig(ce=ce, tv=tv, confidence=confidence, loss_decay=decay)
        loss, _ = block_objective(functions, params, tables, r, config)
        np.testing.assert_allclose(loss, value, rtol=1e-5, err_msg=text)


def assert_gradients(gradients, expected, prefix):
    """Every gradient against the reference's; constants have none there and a zero one here."""
    for path, gradient in jax.tree_util.tree_flatten_with_path(gradients)[0]:
        name, seen = tensor_name(path), 0
        gradient = np.asarray(gradient)
        if is_constant(path):
            assert not np.any(gradient) and not any(key.endswith(name) for key in expected), name
            continue
        if f"{prefix}grad/{name}" in expected:
            want = expected[f"{prefix}grad/{name}"]
            np.testing.assert_allclose(gradient, want, atol=1e-4 * np.abs(want).max(), rtol=0, err_msg=name)
            seen += 1
        if f"{prefix}grad_first16/{name}" in expected:
            want, norm = expected[f"{prefix}grad_first16/{name}"], expected[f"{prefix}grad_norm/{name}"]
            np.testing.assert_allclose(np.linalg.norm(gradient), norm, rtol=1e-4, err_msg=name)
            scale = np.abs(gradient).max()
            np.testing.assert_allclose(gradient.reshape(-1)[:16], want, atol=1e-4 * scale, rtol=0, err_msg=name)
            seen += 1
        assert seen, f"no reference gradient of {name}"


@by_name
def test_gradients(folder):
    functions, params, tables = load(folder)
    r, expected = rows(folder), np.load(folder / "expected.npz")
    config, _ = loss_config(folder, functions)
    gradients = jax.grad(lambda p: block_objective(functions, p, tables, r, config)[0])(params)
    assert_gradients(gradients, expected, "")
    if "grad_norm" in expected:
        total = np.sqrt(sum(float(jnp.sum(g * g)) for g in jax.tree.leaves(gradients)))
        np.testing.assert_allclose(total, expected["grad_norm"], rtol=1e-4)


@by_name
def test_no_gradient_reaches_the_target_br14(folder):
    functions, params, tables = load(folder)
    r = rows(folder)
    config, _ = loss_config(folder, functions)

    def objective(head, last_hidden):
        shared = dataclasses.replace(tables, head=head)
        return block_objective(functions, params, shared, {**r, "last_hidden": last_hidden}, config)[0]

    for gradient in jax.grad(objective, argnums=(0, 1))(tables.head, r["last_hidden"]):
        assert not np.any(np.asarray(gradient))


@eagle_by_name
@pytest.mark.parametrize("steps", [4, 7])
def test_eagle3(folder, steps):
    functions, params, tables = load(folder)
    functions = functions_for(
        functions.config.__class__(**{**functions.config.__dict__, "block_size": steps}), jnp.float32
    )
    r, expected = rows(folder), np.load(folder / "expected.npz")
    batch, length = r["tokens"].shape

    def objective(p):
        states = functions.train_states(p, tables, r["taps"], r["tokens"], r["positions"], r["segments"])
        loss, terms = eagle3_loss(
            states,
            tables,
            r["last_hidden"],
            r["loss_mask"],
            r["segments"],
            functions.config.step_loss_decay,
            jnp.float32(batch * length),
            chunk=5,
        )
        return loss, (terms, states)

    (loss, (terms, states)), gradients = jax.value_and_grad(objective, has_aux=True)(params)
    logits = np.moveaxis(np.asarray(tables.logits(states)), 2, 0)
    valid = np.asarray(r["segments"], bool)
    for t in range(steps):
        # Rows that predict past their segment see no key in the reference and in ours; what they yield is not read.
        alive = np.pad(valid, [(0, 0), (0, t)])[:, t:]
        np.testing.assert_allclose(logits[t][alive], expected["step_draft_logits"][t][alive], atol=1e-4, err_msg=f"{t}")
    np.testing.assert_allclose(loss, expected[f"ttt{steps}/total_loss"], rtol=1e-5)
    assert_gradients(gradients, expected, f"ttt{steps}/")
    metrics = json.loads((folder / "meta.json").read_text())["report"][f"metrics_ttt{steps}"]
    for k in range(steps):
        np.testing.assert_allclose(terms.valid[k], metrics[f"train/valid_tokens@{k}"])
        np.testing.assert_allclose(terms.accept_rate[k] / terms.valid[k], metrics[f"train/accept_rate@{k}"], rtol=1e-4)


def test_slot_decay_is_not_the_block_size():
    np.testing.assert_allclose(slot_decay(3, 4.0), np.exp([0, -0.25, -0.5]), rtol=1e-6)
