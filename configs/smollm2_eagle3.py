"""EAGLE-3 for SmolLM2-135M-Instruct: one autoregressive layer on the data and taps of `smollm2_dspark`.

    XLA_FLAGS=--xla_force_host_platform_device_count=2 python -m dspark_jax.train \\
        --config configs/smollm2_eagle3.py --data data/smollm2_train.jsonl --features-cache data/features

A step costs far more than DSpark's, since every position, not a few anchors, is unrolled for seven steps; hence the
smaller batch.
"""

from dataclasses import replace
from pathlib import Path

from smollm2_dspark import config as dspark

from dspark_jax.training.config import DrafterShape
from dspark_jax.training.losses import LossConfig

config = replace(
    dspark,
    drafter=DrafterShape(kind="eagle3", layers=1, intermediate_size=1024, block_size=7, taps=dspark.drafter.taps),
    loss=LossConfig(),
    num_anchors=None,
    batch_size=2,
    vocab_chunk=32,
    steps=600,
    output=Path("runs/smollm2_eagle3"),
)
