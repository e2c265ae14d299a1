"""The programs of `Steps`, compiled by shape: which there are, and calling them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dspark_jax.engine.programs import PROGRAMS
from dspark_jax.engine.prompts import empty_chunk
from dspark_jax.engine.requests import MAX_STOP_TOKENS, Request
from dspark_jax.engine.state import Admission, Chunk, Draft, Limits, Memory, Report, Slots, Weights
from dspark_jax.engine.steps import Steps

MODES = ("greedy", "plain", "filtered")
"""Sampling modes; each also serves the requests of those before it."""


class CompiledSteps:
    """Programs of `Steps` for one engine or batch, kept by what their shapes depend on.

    Attributes:
        steps: the functions.
        weights: their parameters.
        threshold: of policy `threshold`.
        seconds: of policy `greedy`, by rows.
        mesh: where the weights lie; None for one device.
    """

    def __init__(self, steps: Steps, weights: Weights, threshold: float, seconds: np.ndarray, mesh: Mesh | None = None):
        self.steps, self.weights, self.mesh = steps, weights, mesh
        # Flattened once, not in every call: some 300 arrays in nested dictionaries take a millisecond of the host's.
        self._leaves, self._structure = jax.tree.flatten(weights)
        # Only drafting knows the policy: engines that differ in nothing else share their other programs.
        self._undecided = dataclasses.replace(steps, policy="none", block_size=0)
        self.threshold, self.seconds = np.float32(threshold), jnp.asarray(seconds)
        self._compiled: dict[Any, Any] = {}

    def init(self) -> tuple[Slots, Memory]:
        """Empty slots."""
        vocab = self.weights.tables.embed.shape[0]
        key = (self._undecided, "init", vocab)
        return PROGRAMS.get(key, lambda: self.steps.init(vocab, MAX_STOP_TOKENS), (), mesh=self.mesh)()

    def admit(self, slots: Slots, request: Request, slot: int) -> Slots:
        """Put a request into a slot."""
        args = (slots, admission(request, slot))
        return self._program("admit", "greedy", self.steps.admit, (0,), *args)(*args)

    def end(self, slots: Slots, slot: int) -> Slots:
        """Stop the request in a slot."""
        args = (slots, np.int32(slot))
        return self._program("end", "greedy", self.steps.end, (0,), *args)(*args)

    def propose(self, slots: Slots, memory: Memory, mode: str, capacity: int) -> tuple[Memory, Draft]:
        """Draft in every running slot; `capacity` is what policy `scheduled` may fill."""
        args = (self._leaves, in_mode(slots, mode), memory, self._limits(capacity))
        return self._program("propose", mode, self._with_weights(self.steps.propose), (2,), *args)(*args)

    def step(
        self,
        slots: Slots,
        memory: Memory,
        mode: str,
        draft: Draft | None,
        chunk: Chunk | None,
        rows: int,
        diagnostics: bool = False,
    ) -> tuple[Slots, Memory, Report]:
        """Run a step of so many rows for anchors and drafts, and a chunk of prompts."""
        args = (self._leaves, in_mode(slots, mode), memory, draft, chunk)
        slots, memory, report = self._step(rows, mode, args, diagnostics)(*args)
        return in_mode(slots, MODES[0]), memory, report

    def warm_up(
        self,
        slots: Slots,
        memory: Memory,
        modes: Sequence[str],
        shapes: Sequence[tuple[int, int]],
        undrafted: Sequence[tuple[int, int]],
    ) -> tuple[Memory, int]:
        """Compile ahead of the first call, and run once for nobody: a program's first run takes longer than others.

        Args:
            slots: as they are; nothing happens to them.
            memory: taken.
            modes: sampling modes.
            shapes: (rows, prompt tokens) of steps; those with rows verify drafts where there is a drafter.
            undrafted: shapes that are also needed without drafts.

        Returns:
            The memory, its contents as before, and how many programs were new.

        Raises:
            ValueError: an unknown mode.
        """
        before = PROGRAMS.count
        if unknown := sorted(set(modes) - set(MODES)):
            raise ValueError(f"unknown sampling modes {unknown}: expected some of {MODES}")

        def idle() -> Slots:
            return dataclasses.replace(jax.tree.map(jnp.copy, slots), done=jnp.ones_like(slots.done))

        widths = sorted({width for _, width in shapes if width})
        for mode in modes:
            draft = None
            if self.steps.drafter is not None:
                memory, draft = self.propose(idle(), memory, mode, 0)
            for rows, width in shapes:
                chunk = empty_chunk(widths, width, self.steps.slots) if width else None
                if rows == 0 or draft is None or (rows, width) in undrafted:
                    _, memory, _ = self.step(idle(), memory, mode, None, chunk, rows)
                if rows and draft is not None:
                    _, memory, _ = self.step(idle(), memory, mode, draft, chunk, rows)
        nobody = Request(0, [0], 1, _NEUTRAL, MODES[0], 0, np.full(MAX_STOP_TOKENS, -1, np.int32))
        self.admit(idle(), nobody, 0)
        self.end(idle(), 0)
        return memory, PROGRAMS.count - before

    def _limits(self, capacity: int) -> Limits:
        values: dict[str, Any] = {"threshold": self.threshold, "capacity": np.int32(capacity), "seconds": self.seconds}
        return Limits(**values)

    def _step(self, rows: int, mode: str, args: tuple[Any, ...], diagnostics: bool = False) -> Any:
        *_, draft, chunk = args
        name = ("step", rows, (0, 0) if chunk is None else chunk.tokens.shape, draft is not None, diagnostics)
        step = functools.partial(self.steps.step, rows=rows, diagnostics=diagnostics)
        return self._program(name, mode, self._with_weights(step), (1, 2), *args)

    def _with_weights(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of the weights as a function of their leaves."""
        return lambda leaves, *rest: function(jax.tree.unflatten(self._structure, leaves), *rest)

    def _program(self, name: Any, mode: str, function: Any, donate: tuple[int, ...], *args: Any) -> Any:
        """A compiled program; within one engine, name and mode say everything about its shapes."""
        key = (name, mode)
        if key not in self._compiled:
            steps = self.steps if name == "propose" else self._undecided
            self._compiled[key] = PROGRAMS.get((steps, self._structure, *key), function, donate, *args, mesh=self.mesh)
        return self._compiled[key]


_NEUTRAL = {
    "temperature": np.zeros((), np.float32),
    "top_k": np.ones((), np.int32),
    "top_p": np.ones((), np.float32),
    "min_p": np.zeros((), np.float32),
}


def in_mode(slots: Slots, mode: str) -> Slots:
    """The slots for a program of a sampling mode."""
    return dataclasses.replace(slots, sampling=dataclasses.replace(slots.sampling, mode=mode))


def admission(request: Request, slot: int) -> Admission:
    """The device form of a request."""
    values: dict[str, Any] = {
        "slot": np.int32(slot),
        "seed": np.uint32(request.seed),
        "stop_ids": request.stop_ids,
        "budget": np.int32(request.budget),
    }
    return Admission(**values, **cast(Any, request.settings))
