"""DSpark for Gemma-4 12B: five layers of the target's kind, blocks of seven, Markov rank 256, 512 anchors a row.

    python -m dspark_jax.train --config configs/gemma4_12b_dspark.py --data conversations.jsonl --output runs/mine

Taps 5, 17, 29, 41, 46 of 48 layers, those of the release. Which accepted lengths to expect is not known here; no run
of this file has been made yet.

The target's other sizes come from its own config.json when it is loaded. This package does not know them, so neither
parameters nor memory are stated here; with that file at hand any machine can say whether a slice is large enough:

    python -m dspark_jax.compile --config configs/gemma4_12b_dspark.py --target-config config.json --topology v6e:2x4

Mesh by slice, with the 512 rows of a step in 32 parts of 16 rows, so that a checkpoint moves between all of them
(the target, some 24 GB in bfloat16, is divided by `fsdp`):

    v5e 4x4      16 chips   --mesh.fsdp 16   1 row a chip at a time
    v6e 2x4       8 chips   --mesh.fsdp 8    2 rows (the setting below)
    v5p 2x2x1     4 chips   --mesh.fsdp 4    4 rows
    tpu7x 2x2x1   8 cores   --mesh.fsdp 8    2 rows

Nor is it known which token the release fills blocks with; a checkpoint says its own.
"""

from dataclasses import replace
from pathlib import Path

from qwen3_4b_dspark import config as qwen3_4b

config = replace(
    qwen3_4b,
    drafter=replace(
        qwen3_4b.drafter,
        taps=(5, 17, 29, 41, 46),
        mask_token_id=4,  # <mask> of Gemma's tokenizers, which no text holds
    ),
    target="google/gemma-4-12B-it",
    data=("data/gemma4_12b_train.jsonl",),
    output=Path("runs/gemma4_12b_dspark"),
)
