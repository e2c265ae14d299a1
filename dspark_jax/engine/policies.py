"""What a policy asks of an engine: its kind and sizes for a drafter, and curves that reach as far as its steps."""

from __future__ import annotations

import warnings

from dspark_jax.draft.contract import Drafter
from dspark_jax.engine.steps import PolicyKind
from dspark_jax.spec.schedule import CostCurve, Fixed, Greedy, NoDraft, Policy, Scheduled, Threshold


def policy_curves(policy: Policy, slots: int, largest: int) -> tuple[CostCurve | None, CostCurve | None]:
    """Cost curves of a policy, with and without drafting.

    Raises:
        ValueError: they end before the engine's steps do.
    """
    curve = policy.curve if isinstance(policy, (Greedy, Scheduled)) else None
    plain = policy.plain if isinstance(policy, Scheduled) and curve is not None else None
    for name, found, needed in (("curve", curve, largest), ("curve without drafting", plain, slots)):
        if found is not None and found.buckets[-1] < needed:
            raise ValueError(
                f"the {name} of policy {policy} ends at {found.buckets[-1]} rows, this engine's steps have up to "
                f"{needed}: profile with at least as many slots"
            )
    return curve, plain


def policy_shape(policy: Policy, drafter: Drafter | None) -> tuple[PolicyKind, int, int]:
    """Kind of a policy, drafts verified at most, and drafts drafted.

    Raises:
        ValueError: the drafter cannot follow it.
    """
    if isinstance(policy, NoDraft):
        return "none", 0, 0
    if drafter is None:
        raise ValueError(f"policy {policy} verifies drafts, but there is no drafter: give one, or use policy none")
    block = drafter.config.block_size
    if isinstance(policy, Fixed):
        if policy.k > block and not drafter.functions.stops_early:
            raise ValueError(
                f"policy {policy} verifies more drafts than drafter {drafter.name!r} has in a block: {block}"
            )
        # An autoregressive drafter stops after k; a parallel one drafts the block it was trained for.
        return "fixed", policy.k, policy.k if drafter.functions.stops_early else block
    if not drafter.config.confidence_head:
        raise ValueError(f"policy {policy} needs confidences, but drafter {drafter.name!r} has no confidence head")
    kind: PolicyKind = (
        "threshold" if isinstance(policy, Threshold) else "greedy" if isinstance(policy, Greedy) else "scheduled"
    )
    if isinstance(policy, (Greedy, Scheduled)) and policy.verifies_everything:
        warnings.warn(
            f"policy {policy} has no step-cost profile and verifies every draft token: make one with "
            "`python -m dspark_jax.profile`",
            stacklevel=3,
        )
        kind = "fixed"
    return kind, block, block
