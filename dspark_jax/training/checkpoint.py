"""Checkpoints of a run: device state and host progress saved together, restored into shards, refused when foreign.

Layout of the output folder:
    checkpoints/000500/   orbax: state (parameters, moments, counters) and progress (JSON)
    export/000500/        the drafter at that step in the DeepSpec layout, ready for `load_drafter`
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from dspark_jax.draft.contract import Drafter
from dspark_jax.draft.dspark import DSparkFunctions
from dspark_jax.draft.eagle3 import Eagle3Functions
from dspark_jax.draft.loading import save_drafter
from dspark_jax.training.step import TrainState
from dspark_jax.types import Params

# Settings that may change between resumes: they decide when a run stops and what it says, not what it computes.
FREE_SETTINGS = frozenset(
    {
        "output",
        "data",  # the content is compared by fingerprint; the path may move
        "features_cache",
        "max_minutes",
        "checkpoint_every",
        "keep_checkpoints",
        "log_every",
        "validate_every",
        "validation_batches",
        "decode_every",
        "decode_prompts",
        "tensorboard",
        "profile_steps",
        "max_bad_steps",
        "mesh",
        "processes",
        "attention",
    }
)


class Checkpoints:
    """Checkpoints and exports of one output folder."""

    def __init__(self, output: Path, functions: DSparkFunctions | Eagle3Functions, keep: int, config: dict[str, Any]):
        """Open the folder.

        Args:
            output: folder of the run.
            functions: the drafter that is exported.
            keep: newest checkpoints that stay.
            config: plain values of the run's settings, stored and compared at resume.
        """
        self._functions, self._config = functions, config
        self._exports = output.resolve() / "export"
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, create=True, step_format_fixed_length=6, enable_async_checkpointing=True
        )
        self._manager = ocp.CheckpointManager(output.resolve() / "checkpoints", options=options)

    def latest(self) -> int | None:
        """Step of the newest checkpoint."""
        return self._manager.latest_step()

    def save(self, state: TrainState, progress: dict[str, Any], params: Params) -> None:
        """Save the state and the run's progress, and export the drafter beside them.

        Args:
            state: what the last step returned; it may be donated to the next step as soon as this returns.
            progress: plain values: next batch, data fingerprint, seconds, counters.
            params: the drafter's parameters, whole on every process, for the export.

        Raises:
            Exception: whatever an earlier save in the background failed with.
        """
        self._manager.check_for_errors()
        step = int(state.step)
        if step in self._manager.all_steps():
            return
        content = {**progress, "config": self._config}
        self._manager.save(
            step, args=ocp.args.Composite(state=ocp.args.StandardSave(state), progress=ocp.args.JsonSave(content))
        )
        if jax.process_index() == 0:
            self._export(step, params)

    def restore(self, abstract: TrainState, data_fingerprint: str) -> tuple[TrainState, dict[str, Any]]:
        """Load the newest checkpoint into its shards.

        Args:
            abstract: shapes and shardings of the state.
            data_fingerprint: of the batches that would follow.

        Raises:
            ValueError: the checkpoint belongs to other data or other settings; the differing ones are named.
        """
        step = self._manager.latest_step()
        progress = self._manager.restore(step, args=ocp.args.Composite(progress=ocp.args.JsonRestore())).progress
        differing = _differing(progress["config"], self._config)
        if differing:
            raise ValueError(
                f"the checkpoint at step {step} belongs to a run with other settings: {differing}. Continue with "
                "those, or choose another --output"
            )
        if progress["data"] != data_fingerprint:
            raise ValueError(
                f"the checkpoint at step {step} was trained on batches {progress['data']}, the data now gives "
                f"{data_fingerprint}: put the old files back, or choose another --output"
            )
        found = self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract)))
        return found.state, progress

    def close(self) -> None:
        """Wait for the last save and raise what it failed with."""
        self._manager.wait_until_finished()
        self._manager.check_for_errors()
        self._manager.close()

    def _export(self, step: int, params: Params) -> None:
        name = f"{self._functions.config.name} at step {step}"
        drafter = Drafter(name, self._functions.config, params, self._functions)
        save_drafter(drafter, self._exports / f"{step:06d}", extra={"training": {"step": step, **self._config}})
        kept = {f"{x:06d}" for x in (*self._manager.all_steps(), step)}
        for folder in self._exports.iterdir():
            if folder.name not in kept:
                shutil.rmtree(folder)


def _differing(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    """Settings that differ and matter, each as (checkpoint, now)."""
    names = sorted((found.keys() | expected.keys()) - FREE_SETTINGS)
    return {n: (found.get(n), expected.get(n)) for n in names if found.get(n) != expected.get(n)}
