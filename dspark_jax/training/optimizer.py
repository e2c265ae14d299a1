"""AdamW with warm-up, cosine decay and global-norm clipping (SPEC §5).

The learning rate is an argument of the update, not a counter inside the optimizer: it depends on the step of the run
alone, however many updates were skipped, and tests can feed any rate.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from dspark_jax.nn.decoder import is_constant
from dspark_jax.types import Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW and its schedule.

    Attributes:
        learning_rate: peak, reached at the end of the warm-up.
        warmup: fraction of the steps, rounded down.
        clip: global norm that gradients are scaled down to; None leaves them.
        beta1, beta2, eps, weight_decay: of AdamW.
    """

    learning_rate: float = 6e-4
    warmup: float = 0.04
    clip: float | None = 1.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup is a fraction of the steps in [0, 1), found {self.warmup}")


def learning_rate(step: Int[Array, ""] | int, peak: float, warmup_steps: int, total_steps: int) -> Float[Array, ""]:
    """Rate of `step` (from 0): `(step + 1) / warmup_steps * peak`, then half a cosine that reaches 0 at `total_steps`.

    Example, peak 1e-3, 4 warm-up steps of 20: 2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3, 9.90393e-4, 9.6194e-4, ...

    Args:
        step: step of the run.
        peak: highest rate.
        warmup_steps: steps of the linear part; 0 starts at the peak.
        total_steps: the rate is 0 from here on.
    """
    rising = (step + 1) / max(warmup_steps, 1)
    done = jnp.clip((step - warmup_steps) / max(total_steps - warmup_steps, 1), 0.0, 1.0)
    falling = 0.5 * (1 + jnp.cos(jnp.pi * done))
    return peak * jnp.where(step < warmup_steps, rising, falling).astype(jnp.float32)


def warmup_steps(config: OptimizerConfig, total_steps: int) -> int:
    """Whole steps of the warm-up."""
    return int(config.warmup * total_steps)


def create_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Clipping and AdamW's direction, without the learning rate; `apply_update` multiplies it in."""
    return optax.chain(
        optax.identity() if config.clip is None else optax.clip_by_global_norm(config.clip),
        optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.eps),
        optax.add_decayed_weights(config.weight_decay),
    )


def apply_update(
    optimizer: optax.GradientTransformation,
    params: Params,
    gradients: Params,
    opt_state: optax.OptState,
    rate: Float[Array, ""],
) -> tuple[Params, optax.OptState]:
    """One AdamW step: `params - rate * (adam(clip(gradients)) + weight_decay * params)`.

    Args:
        optimizer: from `create_optimizer`.
        params: float32 master weights.
        gradients: of the same structure.
        opt_state: the optimizer's state.
        rate: learning rate of this step.

    Returns:
        New parameters and state; constants stay as they are.
    """
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    updates = optax.tree.scale(-rate, updates)
    # Their gradient is zero, but weight decay would move them.
    updates = jax.tree_util.tree_map_with_path(lambda path, x: jnp.zeros_like(x) if is_constant(path) else x, updates)
    return optax.apply_updates(params, updates), opt_state
