"""DSpark for Qwen3-14B: five layers, blocks of seven, Markov rank 256, 512 anchors a row.

    python -m dspark_jax.train --config configs/qwen3_14b_dspark.py --data conversations.jsonl --output runs/mine

1,860,438,529 parameters; taps 1, 10, 19, 28, 37 of 40 layers. Published, not reproduced here: accepted lengths 30.0 %
above EAGLE-3's and 18.3 % above DFlash's.

Mesh by slice, with the 512 rows of a step in 32 parts of 16 rows, so that a checkpoint moves between all of them
(a target of 14.8 billion parameters, 30 GB in bfloat16, is divided by `fsdp`):

    v5e 4x4      16 chips   --mesh.fsdp 8 --mesh.tensor 2 --accumulation 64   1 row on two chips at a time
    v6e 2x4       8 chips   --mesh.fsdp 8    2 rows (the setting below)
    v5p 2x2x1     4 chips   --mesh.fsdp 4    4 rows
    tpu7x 2x2x1   8 cores   --mesh.fsdp 8    2 rows

What fits, docs/tpu.md says by the compiler; no run of this file has been made yet.
"""

from dataclasses import replace
from pathlib import Path

from qwen3_4b_dspark import config as qwen3_4b

config = replace(
    qwen3_4b,
    target="Qwen/Qwen3-14B",
    data=("data/qwen3_14b_train.jsonl",),
    output=Path("runs/qwen3_14b_dspark"),
)
