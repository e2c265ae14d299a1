"""EAGLE-3 for Gemma-4 12B: one autoregressive layer unrolled for seven steps; data and schedule of `gemma4_12b_dspark`.

    python -m dspark_jax.train --config configs/gemma4_12b_eagle3.py --data conversations.jsonl --output runs/mine

Taps 5, 17, 29, 41, 46 of 48 layers. What is not known of the target, and how to ask whether a slice is large enough:
`gemma4_12b_dspark`. No run of this file has been made yet.

Mesh and rows by slice as there: `--mesh.fsdp 16` on v5e 4x4, 8 (the setting) on v6e 2x4 and tpu7x 2x2x1, 4 on v5p
2x2x1; 512 rows in 32 parts.
"""

from dataclasses import replace
from pathlib import Path

from gemma4_12b_dspark import config as dspark

from dspark_jax.training.config import DrafterShape
from dspark_jax.training.losses import LossConfig

config = replace(
    dspark,
    drafter=DrafterShape(kind="eagle3", layers=1, block_size=7, taps=dspark.drafter.taps, step_loss_decay=0.8),
    loss=LossConfig(),
    num_anchors=None,
    output=Path("runs/gemma4_12b_eagle3"),
)
