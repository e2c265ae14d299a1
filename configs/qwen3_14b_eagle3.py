"""EAGLE-3 for Qwen3-14B: one autoregressive layer, unrolled for seven steps; data and schedule of `qwen3_14b_dspark`.

    python -m dspark_jax.train --config configs/qwen3_14b_eagle3.py --data conversations.jsonl --output runs/mine

498,094,336 parameters; taps 1, 10, 19, 28, 37 of 40 layers. Published, not reproduced here: DSpark's accepted lengths
are 30.0 % above this drafter's.

Mesh and rows by slice as in `qwen3_14b_dspark`: tensor 2 on v5e 4x4, `--mesh.fsdp 8` (the setting) on v6e 2x4 and tpu7x
2x2x1, 4 on v5p 2x2x1; 512 rows in 32 parts.
"""

from dataclasses import replace
from pathlib import Path

from qwen3_4b_eagle3 import config as qwen3_4b

config = replace(
    qwen3_4b,
    target="Qwen/Qwen3-14B",
    data=("data/qwen3_14b_train.jsonl",),
    output=Path("runs/qwen3_14b_eagle3"),
)
