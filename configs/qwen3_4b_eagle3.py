"""EAGLE-3 for Qwen3-4B: one autoregressive layer, unrolled for seven steps; data and schedule of `qwen3_4b_dspark`.

    python -m dspark_jax.train --config configs/qwen3_4b_eagle3.py --data conversations.jsonl --output runs/mine

149,432,576 parameters; taps 1, 9, 17, 25, 33 of 36 layers. Published accepted length at temperature 1, not reproduced
here: GSM8K 5.14, MATH500 4.62, AIME25 3.92, MBPP 3.69, HumanEval 4.16, LiveCodeBench 3.77, MT-Bench 2.39, Alpaca 2.26,
Arena-Hard 2.55.

Mesh and rows by slice as in `qwen3_4b_dspark`: `--mesh.fsdp 16` on v5e 4x4, 8 (the setting) on v6e 2x4 and tpu7x 2x2x1,
4 on v5p 2x2x1; 512 rows in 32 parts.
"""

from dataclasses import replace
from pathlib import Path

from qwen3_4b_dspark import config as dspark

from dspark_jax.training.config import DrafterShape
from dspark_jax.training.losses import LossConfig

config = replace(
    dspark,
    drafter=DrafterShape(kind="eagle3", layers=1, block_size=7, step_loss_decay=0.8),
    loss=LossConfig(),
    num_anchors=None,
    output=Path("runs/qwen3_4b_eagle3"),
)
