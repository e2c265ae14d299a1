"""Two processes of four devices train, are interrupted, and one process alone ends the run as if nothing had been."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tiny_models
from safetensors.numpy import load_file

from dspark_jax.train import EXIT_INTERRUPTED

STEPS, PATIENCE = 40, 240.0
CONFIG = '''"""A run of seconds on eight devices."""

from pathlib import Path

from dspark_jax.training.config import DrafterShape, MeshShape, TrainConfig
from dspark_jax.training.optimizer import OptimizerConfig

config = TrainConfig(
    drafter=DrafterShape(
        kind="dspark", layers=1, intermediate_size=16, block_size=3, taps=(0, 2), mask_token_id={mask}, markov_rank=4,
        confidence_head=True,
    ),
    target="{folder}/target", data=("{folder}/chats.jsonl",), output=Path("unused"), steps={steps},
    sequence_length=96, batch_size=8, num_anchors=4, dtype="float32", validate_every=2, log_every=1,
    checkpoint_every=1000, optimizer=OptimizerConfig(eps=1e-3),
)
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    tiny_models.write_target(folder / "target")
    with open(folder / "chats.jsonl", "w") as file:
        for i in range(450):
            row = {"id": f"chat-{i}", "prompt": f"count {i}", "response": "one two three four " * (1 + i % 3)}
            file.write(json.dumps({**row, "finish": "stop"}) + "\n")
    (folder / "tiny.py").write_text(CONFIG.format(folder=folder, mask=tiny_models.MASK, steps=STEPS))
    return folder


def start(folder: Path, output: str, devices: int, *arguments: str) -> subprocess.Popen:
    """One process of a training run with so many devices."""
    fast = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
    flags = f"--xla_force_host_platform_device_count={devices} {fast}"
    settings = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "DSPARK_CACHE": str(folder / f"cache-{devices}")}
    command = [sys.executable, "-m", "dspark_jax.train", "--config", str(folder / "tiny.py")]
    with open(folder / f"{output}.log", "a") as log:
        command += ["--output", str(folder / output), *arguments]
        return subprocess.Popen(command, env={**os.environ, **settings}, stdout=log, stderr=log)


def lines(folder: Path, output: str, kind: str) -> list[dict]:
    path = folder / output / "metrics.jsonl"
    records = [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []
    return [x for x in records if x["kind"] == kind]


def ended(process: subprocess.Popen, folder: Path, output: str) -> int:
    try:
        return process.wait(PATIENCE)
    finally:
        process.kill()
        print((folder / f"{output}.log").read_text()[-4000:])


@pytest.fixture(scope="module")
def straight(folder):
    """The run without interruption, by one process on one device."""
    assert ended(start(folder, "straight", 1), folder, "straight") == 0
    return lines(folder, "straight", "train")


def test_two_processes_stop_together_and_one_goes_on(folder, straight):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    together = ("--processes.coordinator", address, "--processes.count", "2", "--mesh.data", "2", "--mesh.fsdp", "4")
    pair = [start(folder, "pair", 4, *together, "--processes.index", str(i)) for i in range(2)]
    deadline = time.monotonic() + PATIENCE
    while not lines(folder, "pair", "train") and time.monotonic() < deadline:
        assert all(p.poll() is None for p in pair), (folder / "pair.log").read_text()[-4000:]
        time.sleep(0.01)
    # The process that does not write is told; both stop after the same step.
    pair[1].send_signal(signal.SIGTERM)
    assert [ended(p, folder, "pair") for p in pair] == [EXIT_INTERRUPTED] * 2
    first = lines(folder, "pair", "train")
    assert 0 < len(first) < STEPS
    assert [int(x.name) for x in (folder / "pair" / "checkpoints").iterdir()] == [len(first)]

    alone = ("--mesh.data", "1", "--mesh.fsdp", "2", "--mesh.tensor", "2")
    assert ended(start(folder, "pair", 4, *alone), folder, "pair") == 0
    found = lines(folder, "pair", "train")
    assert [x["step"] for x in found] == [x["step"] for x in straight] == list(range(1, STEPS + 1))
    for ours, theirs in zip(found, straight, strict=True):
        assert ours["sequences"] == theirs["sequences"] and ours["blocks"] == theirs["blocks"]
        for name in ("loss", "ce", "tv", "confidence", "tau_probabilistic", "grad_norm"):
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-5, err_msg=f"{name} of step {ours['step']}")
    for kind in ("validation", "speed"):
        assert [x["step"] for x in lines(folder, "pair", kind)] == [x["step"] for x in lines(folder, "straight", kind)]
    weights = [
        load_file(folder / run / "export" / f"{STEPS:06d}" / "model.safetensors") for run in ("pair", "straight")
    ]
    assert weights[0].keys() == weights[1].keys()
    for name, value in weights[0].items():
        expected = weights[1][name].astype(np.float32)
        np.testing.assert_allclose(value.astype(np.float32), expected, rtol=1e-2, atol=1e-4, err_msg=name)
