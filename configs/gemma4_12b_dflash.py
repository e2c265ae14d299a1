"""DFlash for Gemma-4 12B: the backbone of `gemma4_12b_dspark` without heads, trained by cross entropy.

    python -m dspark_jax.train --config configs/gemma4_12b_dflash.py --data conversations.jsonl --output runs/mine

Taps 5, 17, 29, 41, 46 of 48 layers. What is not known of the target, and how to ask whether a slice is large enough:
`gemma4_12b_dspark`. No run of this file has been made yet.

Mesh and rows by slice as there: `--mesh.fsdp 16` on v5e 4x4, 8 (the setting) on v6e 2x4 and tpu7x 2x2x1, 4 on v5p
2x2x1; 512 rows in 32 parts.
"""

from dataclasses import replace
from pathlib import Path

from gemma4_12b_dspark import config as dspark

from dspark_jax.training.losses import LossConfig

config = replace(
    dspark,
    drafter=replace(dspark.drafter, kind="dflash", markov_rank=0, confidence_head=False),
    loss=LossConfig(ce=1.0, tv=0.0, confidence=0.0),
    output=Path("runs/gemma4_12b_dflash"),
)
