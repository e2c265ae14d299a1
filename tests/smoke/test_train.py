"""`python -m dspark_jax.train` from a target folder, a conversation file and a config file to a drafter that loads."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import pytest
import tiny_models

from dspark_jax import cache, train
from dspark_jax.data import conversations
from dspark_jax.draft.loading import load_drafter
from dspark_jax.engine.requests import token_ids
from dspark_jax.target.loading import load_target
from dspark_jax.training import loop

CONFIG = '''"""A run that takes seconds."""

from pathlib import Path

from dspark_jax.training.config import DrafterShape, MeshShape, TrainConfig

config = TrainConfig(
    drafter=DrafterShape(
        kind="dspark", layers=1, intermediate_size=16, block_size=3, taps=(0, 2), mask_token_id={mask}, markov_rank=4,
        confidence_head=True,
    ),
    target="{folder}/target",
    data=("{folder}/chats.jsonl",),
    output=Path("{folder}/run"),
    steps=3,
    sequence_length=96,
    batch_size=2,
    num_anchors=4,
    dtype="float32",
    validate_every=2,
    log_every=1,
    mesh=MeshShape(data=1),
)
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("train")
    tiny_models.write_target(folder / "target")
    with open(folder / "chats.jsonl", "w") as file:
        for i in range(12):
            row = {"id": f"chat-{i}", "prompt": f"count {i}", "response": "one two three four " * (1 + i % 3)}
            file.write(json.dumps({**row, "finish": "stop"}) + "\n")
    (folder / "tiny.py").write_text(CONFIG.format(folder=folder, mask=tiny_models.MASK))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSPARK_CACHE", str(folder / "cache"))
        yield folder


@pytest.fixture(scope="module")
def features(folder):
    """A cache of the conversations' features at the config's taps."""
    output = folder / "features"
    settings = {"target": str(folder / "target"), "taps": (0, 2), "max_length": 96, "dtype": "float32"}
    cache.main(cache.CacheCommand(data=(str(folder / "chats.jsonl"),), output=output, **settings))
    return output


def records(path: Path):
    return [json.loads(x) for x in (path / "metrics.jsonl").read_text().splitlines()]


def test_a_run_is_interrupted_continued_and_exported(folder, monkeypatch):
    command = ["--config", str(folder / "tiny.py")]
    with monkeypatch.context() as patch:
        original = loop.Run.read_metrics

        def read(self, keep):
            signal.raise_signal(signal.SIGTERM)
            return original(self, keep)

        patch.setattr(loop.Run, "read_metrics", read)
        assert train.main(command) == train.EXIT_INTERRUPTED == 75
    assert len(list((folder / "cache" / "corpora").iterdir())) == 1
    with monkeypatch.context() as patch:
        patch.setattr(conversations, "render_conversation", None)  # nothing is tokenized twice
        assert train.main(command) == 0
    assert [x["step"] for x in records(folder / "run") if x["kind"] == "train"] == [1, 2, 3]
    target = load_target(str(folder / "target"))
    drafter = load_drafter(str(folder / "run" / "export" / "000003"), target)
    assert drafter.config.name == "DSpark" and drafter.config.block_size == 3


def test_conversations_and_prompts_become_text_in_the_same_way(folder, monkeypatch):
    """Options of the command line reach both: a prompt is the beginning of the conversation trained on."""
    seen = {}

    def train_nothing(config, target, corpus, **_):
        seen["target"], seen["corpus"] = target, corpus
        return SimpleNamespace(reason="finished", step=0, seconds=0.0)

    monkeypatch.setattr(train, "train", train_nothing)
    options = ["--chat.system-prompt", "be brief", "--chat.assistant-prefix", "well: "]
    assert train.main(["--config", str(folder / "tiny.py"), *options]) == 0
    tokens, mask = seen["corpus"].row(0)
    prompt = token_ids(seen["target"], [{"role": "user", "content": "count 0"}], 0)
    text = seen["target"].tokenizer.decode(prompt)
    assert "be brief" in text and text.endswith("well: ")
    assert tokens[: len(prompt)].tolist() == prompt and mask.tolist().index(1) == len(prompt)


def test_cached_features_train_the_same_drafter(folder, features):
    """The cache rounds features to bfloat16, so the losses agree to its precision only."""
    common = ["--config", str(folder / "tiny.py"), "--steps", "1", "--validate-every", "None"]
    assert train.main([*common, "--output", str(folder / "online")]) == 0
    assert train.main([*common, "--output", str(folder / "cached"), "--features-cache", str(features)]) == 0
    (online,) = (x for x in records(folder / "online") if x["kind"] == "train")
    (cached,) = (x for x in records(folder / "cached") if x["kind"] == "train")
    assert cached["blocks"] == online["blocks"]
    assert jnp.allclose(cached["ce"], online["ce"], rtol=0.02)


def test_a_drafter_for_a_gemma4_target(folder):
    """It takes the target's layers, is exported under their name and loads for that target."""
    target, output = folder / "gemma4", folder / "gemma4_run"
    tiny_models.write_target(target, decoder=tiny_models.GEMMA4)
    changes = ["--target", str(target), "--output", str(output), "--steps", "2", "--validate-every", "None"]
    assert train.main(["--config", str(folder / "tiny.py"), *changes]) == 0
    exported = output / "export" / "000002"
    config = json.loads((exported / "config.json").read_text())
    assert config["architectures"] == ["Gemma4DSparkModel"] and config["model_type"] == "gemma4_text"
    drafter = load_drafter(str(exported), load_target(str(target)))
    assert drafter.params["layers_0"]["layer_scalar"] == 1 and drafter.config.decoder.sandwich_norms


def test_a_cache_of_other_taps_is_refused(folder, features):
    overrides = [
        "--output",
        str(folder / "other"),
        "--features-cache",
        str(features),
        "--drafter.taps",
        "0",
        "1",
    ]
    with pytest.raises(ValueError, match=r"target_layer_ids \[0, 2\], this run has \[0, 1\]"):
        train.main(["--config", str(folder / "tiny.py"), *overrides])


def test_mtp_trains_from_a_cache_of_any_taps(folder, features):
    """It reads last hidden states only, and loads under its own name."""
    text = CONFIG.format(folder=folder, mask=tiny_models.MASK)
    start, stop = text.index("    drafter="), text.index("    target=")
    text = text[:start] + '    drafter=DrafterShape(kind="mtp", layers=1, intermediate_size=16),\n' + text[stop:]
    (folder / "mtp.py").write_text(text.replace("    num_anchors=4,\n", ""))
    output = folder / "mtp"
    assert (
        train.main(["--config", str(folder / "mtp.py"), "--output", str(output), "--features-cache", str(features)])
        == 0
    )
    (validation,) = (x for x in records(output) if x["kind"] == "validation" and x["step"] == 3)
    assert len(validation["accept_rate"]) == 1 and 0 < validation["accept_rate"][0] < 1
    drafter = load_drafter(str(output / "export" / "000003"), load_target(str(folder / "target")))
    assert (drafter.config.name, drafter.config.block_size, drafter.config.target_layer_ids) == ("MTP", 1, ())
