"""DFlash for SmolLM2-135M-Instruct: the backbone of `smollm2_dspark` without heads, trained by cross entropy.

    XLA_FLAGS=--xla_force_host_platform_device_count=2 python -m dspark_jax.train \\
        --config configs/smollm2_dflash.py --data data/smollm2_train.jsonl --features-cache data/features
"""

from dataclasses import replace
from pathlib import Path

from smollm2_dspark import config as dspark

from dspark_jax.training.losses import LossConfig

config = replace(
    dspark,
    drafter=replace(dspark.drafter, kind="dflash", markov_rank=0, confidence_head=False),
    loss=LossConfig(ce=1.0, tv=0.0, confidence=0.0),
    output=Path("runs/smollm2_dflash"),
)
