"""DFlash for Qwen3-14B: the backbone of `qwen3_14b_dspark` without heads, trained by cross entropy.

    python -m dspark_jax.train --config configs/qwen3_14b_dflash.py --data conversations.jsonl --output runs/mine

1,782,641,920 parameters; taps 1, 10, 19, 28, 37 of 40 layers. Published, not reproduced here: DSpark's accepted lengths
are 18.3 % above this drafter's.

Mesh and rows by slice as in `qwen3_14b_dspark`: tensor 2 on v5e 4x4, `--mesh.fsdp 8` (the setting) on v6e 2x4 and tpu7x
2x2x1, 4 on v5p 2x2x1; 512 rows in 32 parts.
"""

from dataclasses import replace
from pathlib import Path

from qwen3_4b_dflash import config as qwen3_4b

config = replace(
    qwen3_4b,
    target="Qwen/Qwen3-14B",
    data=("data/qwen3_14b_train.jsonl",),
    output=Path("runs/qwen3_14b_dflash"),
)
