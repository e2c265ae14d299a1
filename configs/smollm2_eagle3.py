"""EAGLE-3 for SmolLM2-135M-Instruct: one autoregressive layer on the data and taps of `smollm2_dspark`.

    python -m dspark_jax.train --config configs/smollm2_eagle3.py --data data/smollm2_train.jsonl

A step costs far more than DSpark's: every position, not 24 anchors, is unrolled for seven steps.
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
    output=Path("runs/smollm2_eagle3"),
)
