"""`python -m dspark_jax.compile --config configs/qwen3_4b_dspark.py --topology v5e:4x4 --mesh.fsdp 16`: does it fit?

Builds a run's real train step over shapes alone (no weights, no data, no TPU), compiles it for a slice, and prints what
it takes of every chip: memory, operations, exchanges between devices. Any field of the config can be overridden, as for
`dspark_jax.train`. `--what decode --mesh.tensor 4` does the same for a round of the serving engine with the config's
target and drafter. Exit status: 0 when all fits, 1 with the reason when it does not, 2 for anything refused.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import tyro
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

from dspark_jax.config import DecoderConfig
from dspark_jax.draft.loading import functions_for
from dspark_jax.engine.abstract import abstract_round
from dspark_jax.engine.layout import MarkovTables
from dspark_jax.evaluation.report import versions
from dspark_jax.files import atomic_write
from dspark_jax.huggingface import decoder_config, read_json
from dspark_jax.sharding import create_mesh
from dspark_jax.target.loading import parameter_shapes
from dspark_jax.terminal import guarded, table_console
from dspark_jax.training.abstract import KNOWN_TARGETS, AbstractStep, abstract_step, abstract_target, parameter_count
from dspark_jax.training.collectives import collectives, total_bytes
from dspark_jax.training.config import TrainConfig, drafter_config, load_config, to_json
from dspark_jax.training.flops import model_flops, traced_flops
from dspark_jax.training.tpu import GIB, Memory, chip_of, out_of_memory, program_memory, topology_devices

EXIT_DOES_NOT_FIT = 1
TRAIN_STEP = "train step"
LISTED = 20
"""Exchanges that a report lists one by one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeShape:
    """Sizes of an engine.

    Attributes:
        slots: requests at a time.
        max_length: tokens that a slot holds.
        chunk: prompt tokens of a step.
        markov_tables: "split" by vocabulary over the mesh's tensor axis: every draft token needs sums and row lookups
            across it; or "replicated": logits are gathered once a block, and every device holds and reads whole tables.
    """

    slots: int = 16
    max_length: int = 2048
    chunk: int = 128
    markov_tables: MarkovTables = "split"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileCommand:
    """Compile a run's train step for a TPU slice, without a TPU.

    Arguments that are not listed here override fields of the config: `--mesh.fsdp 16 --num-anchors 256`.

    Attributes:
        config: the run's file.
        what: "train" compiles the train step; "decode" drafting a block in every slot, and verifying all blocks beside
            a prompt chunk.
        decode: sizes of the engine.
        topology: chip and shape of the slice: v5e:4x4, v6e:2x4, v5p:2x2x1, tpu7x:2x2x1, v4:2x2x1.
        target_config: config.json of the target (Hugging Face), for targets that are not known by name.
        output: write every number to this JSON file.
        text: write the compiled program to this file; of several, each to one with the program's name added.
    """

    config: Path
    topology: str
    what: Literal["train", "decode"] = "train"
    decode: DecodeShape = dataclasses.field(default_factory=DecodeShape)
    target_config: Path | None = None
    output: Path | None = None
    text: Path | None = None


def run(command: CompileCommand, config: TrainConfig, console: Console) -> int:
    """Compile, print, write; returns the exit status."""
    chip = chip_of(command.topology)
    devices = topology_devices(command.topology)
    mesh = create_mesh(data=config.mesh.data, fsdp=config.mesh.fsdp, tensor=config.mesh.tensor, devices=devices)
    if mesh.size < len(devices):
        sizes = f"data {config.mesh.data} x fsdp {config.mesh.fsdp} x tensor {config.mesh.tensor}"
        raise ValueError(f"mesh {sizes} leaves {len(devices) - mesh.size} of {len(devices)} devices idle: set --mesh.*")
    shape = target_shape(command, config)
    common = {
        "config": to_json(config),
        "topology": command.topology,
        "mesh": {axis: int(size) for axis, size in mesh.shape.items()},
        "capacity": chip.memory,
        "versions": versions(("jax", "jaxlib", "libtpu")),
    }
    if command.what == "train":
        config = dataclasses.replace(config, attention=config.attention or "kernel")
        step = abstract_step(config, abstract_target(config.target, shape, jnp.dtype(config.dtype)), mesh)
        common |= program_facts(config, step, shape, mesh.size)
        programs = {TRAIN_STEP: step.lower}
    else:
        programs = decode_programs(command.decode, config, shape, mesh)
        common["decode"] = dataclasses.asdict(command.decode)
    console.print(introduction(command, common, config), highlight=False, soft_wrap=True)
    reports = {name: compiled_report(lower, chip.memory, text_of(command, name)) for name, lower in programs.items()}
    for name, report in reports.items():
        for table in tables(name, common | report, chip.flops):
            console.print(table)
    fits = all(report["fits"] for report in reports.values())
    for line in notes(reports):
        console.print(line, highlight=False, soft_wrap=True)
    if command.output:
        # A train step is one program and its report flat.
        content = common | (reports[TRAIN_STEP] if command.what == "train" else {"programs": reports, "fits": fits})
        with atomic_write(command.output, "w") as file:
            json.dump(content, file, indent=1)
            file.write("\n")
    return 0 if fits else EXIT_DOES_NOT_FIT


def text_of(command: CompileCommand, program: str) -> Path | None:
    """File for a program's text: `round.txt` becomes `round_draft.txt` where there are several programs."""
    if command.text is None or program == TRAIN_STEP:
        return command.text
    return command.text.with_stem(f"{command.text.stem}_{program.split()[0]}")


def decode_programs(
    shape: DecodeShape, config: TrainConfig, target: DecoderConfig, mesh: Mesh
) -> dict[str, Callable[[], jax.stages.Lowered]]:
    """The programs of a round of the engine."""
    drafter = drafter_config(config, target)
    functions = functions_for(drafter, jnp.dtype(config.dtype))
    draft = jax.eval_shape(lambda: functions.initialise(jax.random.key(0), drafter.feature_width))
    engine = abstract_round(
        target,
        functions,
        (parameter_shapes(target), draft),
        mesh,
        slots=shape.slots,
        max_length=shape.max_length,
        markov_tables=shape.markov_tables,
        dtype=jnp.dtype(config.dtype),
    )
    rows = shape.slots * (drafter.block_size + 1)
    return {
        "draft": engine.lower_propose,
        f"verify {rows} rows and {shape.chunk} prompt tokens": lambda: engine.lower_step(rows, shape.chunk),
    }


def compiled_report(lower: Callable[[], jax.stages.Lowered], capacity: int, text: Path | None) -> dict[str, Any]:
    """Compile a program; returns what its compiler says of it, or that it does not fit."""
    began = time.monotonic()
    try:
        compiled = lower().compile()
    except jax.errors.JaxRuntimeError as error:
        reason = out_of_memory(error)
        if reason is None:
            raise
        report = {"fits": False, "reason": reason}
    else:
        program = program_text(compiled)
        report = measured(compiled, program, capacity)
        if text and program is not None:
            with atomic_write(text, "w") as file:
                file.write(program)
    return report | {"compile_seconds": time.monotonic() - began}


def target_shape(command: CompileCommand, config: TrainConfig) -> DecoderConfig:
    """Shape of the run's target, from the given config.json or by name.

    Raises:
        ValueError: a name that is not known, and no config.json.
    """
    if command.target_config is not None:
        return decoder_config(read_json(command.target_config), str(command.target_config))
    if config.target not in KNOWN_TARGETS:
        raise ValueError(
            f"the shape of target {config.target!r} is not known (known are {', '.join(KNOWN_TARGETS)}): give its "
            "config.json with --target-config"
        )
    return KNOWN_TARGETS[config.target]


def program_facts(config: TrainConfig, step: AbstractStep, target: DecoderConfig, devices: int) -> dict[str, Any]:
    """What is known before compilation: parameters, and operations of one device."""
    needed = model_flops(config, target)
    return {
        "parameters": {
            "drafter": parameter_count(step.state.params),
            "target": 0 if step.target_params is None else parameter_count(step.target_params),
            "tables": parameter_count(step.tables) // (2 if target.tie_word_embeddings else 1),
        },
        "flops": {
            "model": {"target": needed.target, "drafter": needed.drafter, "loss": needed.loss},
            "model_per_device": needed.total / devices,
            "program_per_device": traced_flops(step.trace()) / devices,
        },
    }


def program_text(compiled: Any) -> str | None:
    """Text of a compiled program; None where its runtime cannot read its own compiler's output back."""
    try:
        return compiled.as_text()
    except jax.errors.JaxRuntimeError:
        return None


def measured(compiled: Any, text: str | None, capacity: int) -> dict[str, Any]:
    """What the compiler says about its program; exchanges only where there is a text to find them in."""
    memory, cost = program_memory(compiled), compiled.cost_analysis() or {}
    exchanges = {}
    if text is not None:
        found = collectives(text)
        largest = sorted(found, key=lambda one: one.times * one.size, reverse=True)[:LISTED]
        exchanges = {
            "largest_collectives": [dataclasses.asdict(one) | {"bytes": one.size} for one in largest],
            "collective_totals": {kind: {"times": n, "bytes": size} for kind, (n, size) in total_bytes(found).items()},
        }
    fits = memory.peak <= capacity
    return {
        "fits": fits,
        "reason": None if fits else f"peak of {memory.peak / GIB:.2f} GiB, the chip has {capacity / GIB:.0f}",
        "memory": dataclasses.asdict(memory),
        # Programs with loops or kernels have times below zero.
        "compiler": {
            key: cost[key] for key in ("flops", "bytes accessed", "optimal_seconds") if cost.get(key, -1) >= 0
        },
        **exchanges,
    }


def introduction(command: CompileCommand, common: dict[str, Any], config: TrainConfig) -> str:
    """What is compiled, in one line."""
    mesh = " x ".join(f"{axis} {size}" for axis, size in common["mesh"].items())
    about = f"{config.drafter.kind} for {config.target} on {command.topology} ({mesh}): "
    if command.what == "decode":
        decode = command.decode
        return about + f"{decode.slots} slots of {decode.max_length} tokens, {config.dtype}"
    slots = "" if config.num_anchors is None else f", {config.num_anchors} anchors a row"
    rows = f"{config.batch_size} rows of {config.sequence_length} tokens in {config.accumulation} parts"
    return f"{about}{rows}{slots}, {config.dtype}"


def tables(name: str, report: dict[str, Any], peak_flops: float) -> list[Table]:
    """A program's report as tables; memory and exchanges only where it compiled."""
    facts = Table("per device", "", title=name, title_justify="left")
    for part, count in report.get("parameters", {}).items():
        facts.add_row(f"parameters of the {part}, all devices", f"{count:,}")
    if "memory" in report:
        memory = Memory(**report["memory"])
        for field in dataclasses.fields(memory):
            facts.add_row(f"memory: {field.name}", f"{getattr(memory, field.name) / GIB:.2f} GiB")
    facts.add_row("memory: of the chip", f"{report['capacity'] / GIB:.0f} GiB")
    if "flops" in report:
        flops = report["flops"]
        facts.add_row("operations the algorithm needs", f"{flops['model_per_device'] / 1e12:.2f} TFLOP")
        share = flops["program_per_device"] / flops["model_per_device"]
        facts.add_row("operations of the program", f"{flops['program_per_device'] / 1e12:.2f} TFLOP ({share:.2f} x)")
        facts.add_row("seconds at the chip's peak", f"{flops['program_per_device'] / peak_flops:.2f}")
    for key, value in report.get("compiler", {}).items():
        facts.add_row(f"compiler: {key.replace('_', ' ')}", f"{value:.4g}")
    if "collective_totals" not in report:
        return [facts]
    exchanged = Table("collective", "times", "GB of results", title="between devices", title_justify="left")
    for kind, total in report["collective_totals"].items():
        exchanged.add_row(kind, f"{total['times']:,}", f"{total['bytes'] / 1e9:.3f}")
    return [facts, exchanged]


def notes(reports: dict[str, dict[str, Any]]) -> list[str]:
    """How things are counted, and the verdict."""
    lines = [
        "Operations of the program: products as written, loops times their length and kernels as they declare "
        "themselves, before a compiler removes or repeats any.",
        "The compiler's own numbers count the body of a loop once.",
        "Times of collectives include the turns of loops; sizes are those of results on one device.",
        f"Compiled in {sum(report['compile_seconds'] for report in reports.values()):.0f} s.",
    ]
    if any("memory" in report and "collective_totals" not in report for report in reports.values()):
        lines.append("Exchanges are unknown: the runtime cannot read back the text of its compiler's program.")
    failed = [f"{name}: {report['reason']}" for name, report in reports.items() if not report["fits"]]
    return [*lines, f"It does not fit: {'; '.join(failed)}" if failed else "It fits."]


def parse(arguments: Sequence[str] | None) -> tuple[CompileCommand, TrainConfig]:
    """Read the command, and the config with what overrides it."""
    command, rest = tyro.cli(
        CompileCommand,
        prog="python -m dspark_jax.compile",
        args=arguments,
        description=__doc__,
        return_unknown_args=True,
    )
    return command, tyro.cli(TrainConfig, args=rest, default=load_config(command.config))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    # The host only traces; an accelerator it may have is left alone.
    jax.config.update("jax_platforms", "cpu")
    return guarded(lambda: run(*parse(arguments), table_console()))


if __name__ == "__main__":
    sys.exit(main())
