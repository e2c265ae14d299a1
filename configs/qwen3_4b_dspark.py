"""DSpark for Qwen3-4B: five layers, blocks of seven, Markov rank 256, 512 anchors a row.

    python -m dspark_jax.train --config configs/qwen3_4b_dspark.py --data conversations.jsonl --output runs/mine

615,221,249 parameters; taps 1, 9, 17, 25, 33 of 36 layers. Published accepted length at temperature 1, not reproduced
here: GSM8K 6.11, MATH500 5.70, AIME25 4.89, MBPP 5.13, HumanEval 5.38, LiveCodeBench 4.86, MT-Bench 3.64, Alpaca 3.54,
Arena-Hard 3.29.

Mesh by slice, with the 512 rows of a step in 32 parts of 16 rows, so that a checkpoint moves between all of them
(a target of 4.0 billion parameters, 8 GB in bfloat16, is divided by `fsdp`):

    v5e 4x4      16 chips   --mesh.fsdp 16   1 row a chip at a time
    v6e 2x4       8 chips   --mesh.fsdp 8    2 rows (the setting below)
    v5p 2x2x1     4 chips   --mesh.fsdp 4    4 rows
    tpu7x 2x2x1   8 cores   --mesh.fsdp 8    2 rows

What fits, docs/tpu.md says by the compiler; no run of this file has been made yet.
"""

from pathlib import Path

from dspark_jax.training.config import DrafterShape, MeshShape, TrainConfig
from dspark_jax.training.losses import LossConfig
from dspark_jax.training.optimizer import OptimizerConfig

config = TrainConfig(
    drafter=DrafterShape(
        kind="dspark",
        layers=5,
        block_size=7,
        mask_token_id=151669,  # the first row of Qwen3's embedding that no token of its tokenizer uses
        markov_rank=256,
        confidence_head=True,
    ),
    target="Qwen/Qwen3-4B",
    data=("data/qwen3_4b_train.jsonl",),
    output=Path("runs/qwen3_4b_dspark"),
    loss=LossConfig(ce=0.1, tv=0.9, confidence=1.0),
    optimizer=OptimizerConfig(learning_rate=6e-4, warmup=0.04, clip=1.0),
    epochs=10,
    sequence_length=4096,
    batch_size=512,
    accumulation=32,
    num_anchors=512,
    packed=False,  # the recipe's 512 anchors belong to one conversation each
    vocab_chunk=16,
    dtype="bfloat16",
    mesh=MeshShape(fsdp=8),
    checkpoint_every=250,
    keep_checkpoints=3,
    validate_every=500,
    validation_batches=32,
)
