"""DSpark for SmolLM2-135M-Instruct, small enough for a laptop CPU and for the package.

    python -m dspark_jax.cache --data data/smollm2_train.jsonl --output data/features --max-length 448
    XLA_FLAGS=--xla_force_host_platform_device_count=2 python -m dspark_jax.train \\
        --config configs/smollm2_dspark.py --data data/smollm2_train.jsonl --features-cache data/features

Without the cache the target runs inside every step. Two host devices on a two-core CPU: each takes half of the rows,
because much of a step is single-threaded there.
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
    data=("data/smollm2_train.jsonl",),
    output=Path("runs/smollm2_dspark"),
    loss=LossConfig(ce=0.1, tv=0.9, confidence=1.0),
    optimizer=OptimizerConfig(learning_rate=1.5e-3),
    steps=2400,
    sequence_length=896,
    batch_size=4,
    num_anchors=40,
    packed=True,
    vocab_chunk=4,
    vocab_columns=12288,
    dtype="bfloat16",
    checkpoint_every=200,
    log_every=20,
    validate_every=400,
    validation_batches=8,
    decode_every=800,
)
