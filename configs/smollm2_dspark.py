"""DSpark for SmolLM2-135M-Instruct, small enough for a laptop CPU.

    python -m dspark_jax.train --config configs/smollm2_dspark.py --data data/smollm2_train.jsonl

Features come from the target in every step, or from a cache that is written once:

    python -m dspark_jax.cache --data data/smollm2_train.jsonl --output data/features --max-length 448

and then read with `--features-cache data/features`.
"""

from pathlib import Path

from dspark_jax.training.config import DrafterShape, TrainConfig
from dspark_jax.training.losses import LossConfig
from dspark_jax.training.optimizer import OptimizerConfig

config = TrainConfig(
    drafter=DrafterShape(
        kind="dspark",
        layers=2,
        intermediate_size=768,
        block_size=7,
        taps=(1, 8, 14, 20, 27),
        mask_token_id=4,  # <reponame>: a special token that chats do not hold
        markov_rank=48,
        confidence_head=True,
    ),
    target="smollm2-135m",
    data=(Path("data/smollm2_train.jsonl"),),
    output=Path("runs/smollm2_dspark"),
    loss=LossConfig(ce=0.1, tv=0.9, confidence=1.0),
    optimizer=OptimizerConfig(learning_rate=1e-3),
    steps=4000,
    sequence_length=448,
    batch_size=16,
    num_anchors=24,
    packed=False,
    dtype="bfloat16",
    checkpoint_every=500,
    validate_every=500,
    validation_batches=4,
)
