"""DSpark for Qwen3-8B: five layers, blocks of seven, Markov rank 256, 512 anchors a row.

    python -m dspark_jax.train --config configs/qwen3_8b_dspark.py --data conversations.jsonl --output runs/mine

1,126,422,017 parameters; taps 1, 9, 17, 25, 33 of 36 layers. Published, not reproduced here: accepted lengths 26.7 %
above EAGLE-3's and 18.4 % above DFlash's.

Mesh by slice, with the 512 rows of a step in 32 parts of 16 rows, so that a checkpoint moves between all of them
(a target of 8.2 billion parameters, 16 GB in bfloat16, is divided by `fsdp`):

    v5e 4x4      16 chips   --mesh.fsdp 16   1 row a chip at a time
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
    target="Qwen/Qwen3-8B",
    data=("data/qwen3_8b_train.jsonl",),
    output=Path("runs/qwen3_8b_dspark"),
)
