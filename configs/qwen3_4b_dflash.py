"""DFlash for Qwen3-4B: the backbone of `qwen3_4b_dspark` without heads, trained by cross entropy.

    python -m dspark_jax.train --config configs/qwen3_4b_dflash.py --data conversations.jsonl --output runs/mine

537,427,200 parameters; taps 1, 9, 17, 25, 33 of 36 layers. Published accepted length at temperature 1, not reproduced
here: GSM8K 5.40, MATH500 4.85, AIME25 4.15, MBPP 4.40, HumanEval 4.74, LiveCodeBench 4.18, MT-Bench 3.07, Alpaca 2.96,
Arena-Hard 2.83.

Mesh and rows by slice as in `qwen3_4b_dspark`: `--mesh.fsdp 16` on v5e 4x4, 8 (the setting) on v6e 2x4 and tpu7x 2x2x1,
4 on v5p 2x2x1; 512 rows in 32 parts.
"""

from dataclasses import replace
from pathlib import Path

from qwen3_4b_dspark import config as dspark

from dspark_jax.training.losses import LossConfig

config = replace(
    dspark,
    drafter=replace(dspark.drafter, kind="dflash", markov_rank=0, confidence_head=False),
    loss=LossConfig(ce=1.0, tv=0.0, confidence=0.0),
    output=Path("runs/qwen3_4b_dflash"),
)
