"""MTP-1 for SmolLM2-135M-Instruct: one layer over the last hidden state, one draft token; data of `smollm2_dspark`.

    XLA_FLAGS=--xla_force_host_platform_device_count=2 python -m dspark_jax.train \\
        --config configs/smollm2_mtp.py --data data/smollm2_train.jsonl --features-cache data/features

The cache may be the one that was written for the other drafters: MTP reads its last hidden states and no taps. The
checkpoint takes 4.9 MB (2.4 million parameters).
"""

from dataclasses import replace
from pathlib import Path

from smollm2_dspark import config as dspark

from dspark_jax.training.config import DrafterShape
from dspark_jax.training.losses import LossConfig

config = replace(
    dspark,
    drafter=DrafterShape(kind="mtp", layers=1, intermediate_size=384, block_size=1),
    loss=LossConfig(),
    num_anchors=None,
    batch_size=4,
    vocab_chunk=64,
    steps=1200,
    output=Path("runs/smollm2_mtp"),
)
