"""The compile command from its arguments to its tables: a step that fits, one that does not, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import pytest

from dspark_jax.compile import EXIT_DOES_NOT_FIT, main
from dspark_jax.files import atomic_write
from dspark_jax.terminal import EXIT_ERROR

REPOSITORY = Path(__file__).parents[2]
CONFIG = '''"""Small."""
from pathlib import Path

from dspark_jax.training.config import DrafterShape, MeshShape, TrainConfig

config = TrainConfig(
    drafter=DrafterShape(
        kind="dspark", layers=1, block_size=3, mask_token_id=39, markov_rank=16, confidence_head=True, taps=(0,)
    ),
    data=(), output=Path("unused"), target="small", steps=10, sequence_length=256, batch_size=16, accumulation=2,
    num_anchors=16, vocab_chunk=4, mesh=MeshShape(fsdp=4),
)
'''
TARGET = {
    "model_type": "qwen3", "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture
def arguments(tmp_path):
    """A small run for a slice of four chips."""
    for name, text in (("small.py", CONFIG), ("config.json", json.dumps(TARGET))):
        with atomic_write(tmp_path / name, "w") as file:
            file.write(text)
    return [
        "--config", str(tmp_path / "small.py"), "--target-config", str(tmp_path / "config.json"),
        "--topology", "v5e:2x2",
    ]  # fmt: skip


def test_a_small_step_fits(arguments, tmp_path, capsys):
    pytest.importorskip("libtpu", reason="libtpu, the compiler for TPUs, is not installed")
    output, text = tmp_path / "report.json", tmp_path / "program.txt"
    assert main([*arguments, "--output", str(output), "--text", str(text)]) == 0
    report, printed = json.loads(output.read_text()), capsys.readouterr().out
    assert report["fits"] and report["mesh"] == {"data": 1, "fsdp": 4, "tensor": 1}
    memory = report["memory"]
    assert 0 < memory["arguments"] < memory["peak"] < report["capacity"] == 16 << 30
    # The state stays in its place.
    assert memory["reused"] > 0.99 * memory["outputs"] - 4096
    flops = report["flops"]
    assert flops["program_per_device"] > 0.9 * flops["model_per_device"]
    assert report["collective_totals"].keys() >= {"all-gather"}
    assert "It fits." in printed and "all-gather" in printed
    assert text.read_text().startswith("HloModule")


def test_a_program_without_a_text_is_measured_all_the_same(arguments, tmp_path, monkeypatch, capsys):
    pytest.importorskip("libtpu", reason="libtpu, the compiler for TPUs, is not installed")

    def unreadable(self):
        raise jax.errors.JaxRuntimeError("INTERNAL: async-update instruction should have 1 operands but sees 3")

    monkeypatch.setattr(jax.stages.Compiled, "as_text", unreadable)
    output, text = tmp_path / "report.json", tmp_path / "program.txt"
    assert main([*arguments, "--output", str(output), "--text", str(text)]) == 0
    report = json.loads(output.read_text())
    assert report["fits"] and report["memory"]["peak"] > 0
    assert "collective_totals" not in report and not text.exists()
    assert "Exchanges are unknown" in capsys.readouterr().out


def test_a_step_that_does_not_fit_is_told_why(arguments, tmp_path, capsys):
    pytest.importorskip("libtpu", reason="libtpu, the compiler for TPUs, is not installed")
    output = tmp_path / "report.json"
    large = ["--sequence-length", "4096", "--num-anchors", "2048", "--batch-size", "128", "--attention", "dense"]
    assert main([*arguments, *large, "--accumulation", "1", "--output", str(output)]) == EXIT_DOES_NOT_FIT
    report = json.loads(output.read_text())
    assert not report["fits"] and "hbm" in report["reason"].lower()
    assert "It does not fit: " in capsys.readouterr().out


def test_a_round_of_the_engine_fits(arguments, tmp_path, capsys):
    pytest.importorskip("libtpu", reason="libtpu, the compiler for TPUs, is not installed")
    output = tmp_path / "report.json"
    engine = ["--what", "decode", "--decode.slots", "4", "--decode.max-length", "512", "--decode.chunk", "32"]
    files = ["--output", str(output), "--text", str(tmp_path / "round.txt")]
    assert main([*arguments, *engine, "--mesh.fsdp", "1", "--mesh.tensor", "4", *files]) == 0
    draft, verify = ((tmp_path / f"round_{name}.txt").read_text() for name in ("draft", "verify"))
    assert draft != verify and draft.startswith("HloModule") and verify.startswith("HloModule")
    report, printed = json.loads(output.read_text()), capsys.readouterr().out
    assert report["fits"] and report["programs"].keys() == {"draft", "verify 16 rows and 32 prompt tokens"}
    assert all(0 < x["memory"]["peak"] < report["capacity"] for x in report["programs"].values())
    assert "4 slots of 512 tokens" in printed and "It fits." in printed
    assert main([*arguments, *engine]) == EXIT_ERROR
    assert "an engine's mesh has one axis, tensor: found" in capsys.readouterr().err


@pytest.mark.slow
def test_a_real_configuration_compiles(tmp_path):
    """Qwen3-4B's EAGLE-3 on sixteen chips: minutes. Whether it fits is docs' to say; here the answer is one."""
    pytest.importorskip("libtpu", reason="libtpu, the compiler for TPUs, is not installed")
    output = tmp_path / "report.json"
    config = str(REPOSITORY / "configs" / "qwen3_4b_eagle3.py")
    status = main(["--config", config, "--topology", "v5e:4x4", "--mesh.fsdp", "16", "--output", str(output)])
    report = json.loads(output.read_text())
    assert (status == 0) == report["fits"]
    assert report["parameters"] == {"drafter": 149_432_576, "target": 3_633_511_936, "tables": 388_956_160}


def test_what_is_refused_is_said_in_one_line(arguments, monkeypatch, capsys):
    def refused(*changes):
        assert main([*arguments, *changes]) == EXIT_ERROR
        return capsys.readouterr().err

    assert "expected one of v4, v5e" in refused("--topology", "h100:8")
    monkeypatch.setattr("dspark_jax.training.tpu.find_spec", lambda name: None)
    assert "pip install 'dspark_jax[tpu]'" in refused()
    monkeypatch.setattr("dspark_jax.compile.topology_devices", lambda name: [None] * 4)
    monkeypatch.setattr("dspark_jax.compile.create_mesh", lambda **sizes: type("Mesh", (), {"size": 2}))
    assert "leaves 2 of 4 devices idle" in refused()
