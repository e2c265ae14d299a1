"""`bench serve` and `bench replay`: the engine under closed-loop load, and the same for machines not at hand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from rich.console import Console

from dspark_jax.bench.numbers import earlier_numbers, write_numbers
from dspark_jax.draft.loading import load_drafter
from dspark_jax.engine.programs import PROGRAMS
from dspark_jax.evaluation.figures import require_matplotlib
from dspark_jax.evaluation.replay import PromptCost, load_traces, record_traces, replay, save_traces
from dspark_jax.evaluation.serving import (
    Load,
    LoadSettings,
    ServingSystem,
    best_other_ratio,
    load_from_report,
    load_grid,
    load_report,
    matched_ratio,
    measure_load,
    summarize_load,
)
from dspark_jax.evaluation.serving_plots import write_load_plots
from dspark_jax.evaluation.tables import Grid, rich_table
from dspark_jax.evaluation.tasks import domains_in_turn, load_tasks
from dspark_jax.progress import Progress
from dspark_jax.spec.schedule import CostCurve, Fixed, NoDraft, Policy, Scheduled
from dspark_jax.target.loading import load_target
from dspark_jax.terminal import table_console
from dspark_jax.types import ChatOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class Serve:
    """Put the engine under closed-loop load and compare systems at every concurrency.

    Attributes:
        target: the target.
        chat: how conversations become prompts; as in the drafters' training.
        draft: the drafter with a confidence head.
        baseline: a second drafter, verified whole; None for none.
        tasks: prompt files or folders; the built-in prompts by default.
        fixed: fixed verify lengths to compare with.
        load: how load is made.
        output: JSON file for the numbers.
        plots: folder for the pictures.
        traces: file for what the drafter predicted and what was accepted, for `bench replay`.
    """

    target: str = "smollm2-135m"
    chat: ChatOptions = dataclasses.field(default_factory=ChatOptions)
    draft: str = "dspark"
    baseline: str | None = None
    tasks: tuple[str, ...] = ()
    fixed: tuple[int, ...] = (1, 3, 5, 7)
    load: LoadSettings = dataclasses.field(default_factory=LoadSettings)
    output: Path | None = None
    plots: Path | None = None
    traces: Path | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replay:
    """Replay recorded acceptance under a cost curve, measured or written down for another machine.

    Attributes:
        traces: file that `bench serve --traces` wrote.
        curves: JSON with `round` and `plain`, each `{"buckets": [rows], "seconds": [seconds]}`.
        measured: file that `bench serve --output` wrote, in place of `curves`: replays what was measured under the step
            costs of that run, and shows both.
        concurrency: requests in flight; with `measured`, those of that run.
        fixed: fixed verify lengths to compare with.
        steps: rounds to replay.
        output: JSON file for the numbers.
    """

    traces: Path
    curves: Path | None = None
    measured: Path | None = None
    concurrency: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    fixed: tuple[int, ...] = (1, 3, 5, 7)
    steps: int = 400
    output: Path | None = None


def bench_serve(command: Serve) -> dict[str, Any]:
    """Load at every concurrency, with its table, ratios and pictures.

    The numbers are written after every repeat; called again, the concurrencies that are complete are kept and the rest
    measured.

    Raises:
        ValueError: the output holds numbers of other conditions.
    """
    if command.plots is not None:
        require_matplotlib()
    earlier = earlier_numbers(command, ("load.concurrency", "plots", "traces"))
    target = load_target(command.target, dtype=jnp.float32, chat=command.chat)
    drafter = load_drafter(command.draft, target)
    systems = [ServingSystem("plain", None, NoDraft())]
    if command.baseline is not None:
        baseline = load_drafter(command.baseline, target)
        systems.append(ServingSystem(command.baseline, baseline, Fixed(baseline.config.block_size)))
    systems += [ServingSystem(f"fixed {k}", drafter, Fixed(k)) for k in command.fixed]
    systems.append(ServingSystem("scheduled", drafter, None))
    prompts = [prompt.messages for prompt in domains_in_turn(load_tasks(command.tasks))]
    load = Load()
    if earlier and command.output is not None:
        load = load_from_report(earlier, command.output).finished(len(systems) * command.load.repeats)
    with Progress("load", None, "stages", console=Console(stderr=True)) as progress:
        for concurrency in command.load.concurrency:
            if concurrency in load.profiles:
                continue
            before = load
            for measured in measure_load(
                target,
                systems,
                prompts,
                command.load,
                concurrency,
                on_progress=lambda what: progress.update(1, now=what),
            ):
                load = before + measured
                write_numbers(command, load_report(load, command.load))
            PROGRAMS.clear()
    results = _load_results(command, load)
    if command.plots is not None:
        write_load_plots(summarize_load(load.points), command.plots)
    if command.traces is not None:
        traces = record_traces(
            target,
            drafter,
            prompts,
            max_new_tokens=command.load.max_new_tokens,
            temperature=command.load.temperature,
        )
        save_traces(traces, command.traces)
    return results


def _load_results(command: Serve, load: Load) -> dict[str, Any]:
    """Print the table and the ratios; returns all numbers."""
    console, rows = table_console(), summarize_load(load.points)
    console.print(rich_table(load_grid(rows)))
    console.print(load.lossless.statement())
    ratios = best_other_ratio(load.points, "scheduled", ["plain", *(f"fixed {k}" for k in command.fixed)])
    for concurrency, values in ratios.items():
        spread = f"{np.median(values):.3f} ({values.min():.3f} to {values.max():.3f})"
        console.print(f"{concurrency} in flight: scheduled over the best of plain and fixed: {spread}")
    results = load_report(load, command.load)
    results["scheduled_over_best"] = {str(c): values.tolist() for c, values in ratios.items()}
    if command.baseline is not None:
        results["over_baseline"] = matched_ratio(rows, "scheduled", command.baseline)
        for speed, ratio in results["over_baseline"]:
            console.print(f"at {speed:.1f} tokens/s a request: scheduled over {command.baseline}: {ratio:.2f}")
    return results


def bench_replay(command: Replay) -> dict[str, Any]:
    """The table of a replay.

    Raises:
        FileNotFoundError: no such traces, curves or measured load.
        ValueError: files of another kind, or not one of `curves` and `measured`.
    """
    traces = load_traces(command.traces)
    policies: dict[str, Policy] = {"plain": NoDraft(), **{f"fixed {k}": Fixed(k) for k in command.fixed}}
    policies["scheduled"] = Scheduled()
    if command.curves is not None and command.measured is None:
        conditions = _conditions(command.curves, command.concurrency)
    elif command.measured is not None and command.curves is None:
        conditions = _measured_conditions(command.measured)
    else:
        raise ValueError("give either --curves, costs of other hardware, or --measured, what `bench serve` wrote")
    points, sections = [], []
    for condition in conditions:
        section = []
        for name, policy in policies.items():
            point = replay(
                traces,
                policy,
                condition.round,
                condition.plain,
                concurrency=condition.concurrency,
                prompt=condition.prompts.get(name),
                steps=command.steps,
            )
            found = condition.throughput.get(name)
            points.append({**dataclasses.asdict(point), "measured": found})
            section.append(
                (
                    str(condition.concurrency),
                    name,
                    f"{point.throughput:.1f}",
                    "–" if found is None else f"{found:.1f}",
                    "–" if found is None else f"{point.throughput / found:.2f}",
                    f"{point.user:.1f}",
                    f"{point.budget:.1f}",
                )
            )
        sections.append(tuple(section))
    grid = Grid(
        title="Replay",
        note="Tokens a second under the given cost curves; prompts count only where a measured load says their cost.",
        header=("in flight", "policy", "tokens/s", "measured", "ratio", "of one request", "rows a step"),
        sections=tuple(sections),
    )
    table_console().print(rich_table(grid))
    return {"points": points}


@dataclasses.dataclass(frozen=True)
class _Condition:
    """Costs under which a load is replayed; what prompts cost and what was measured, by system, where that is known."""

    concurrency: int
    round: CostCurve
    plain: CostCurve
    prompts: dict[str, PromptCost] = dataclasses.field(default_factory=dict)
    throughput: dict[str, float] = dataclasses.field(default_factory=dict)


def _conditions(path: Path, concurrency: tuple[int, ...]) -> list[_Condition]:
    """Written curves, the same at every concurrency."""
    if not path.exists():
        raise FileNotFoundError(f"no cost curves at {path}: write them as docs/serving.md describes")
    content = json.loads(path.read_text())
    if not isinstance(content, dict) or set(content) != {"round", "plain"}:
        raise ValueError(f"{path} must hold `round` and `plain`, each with `buckets` and `seconds`")
    curve, plain = CostCurve.from_json(content["round"]), CostCurve.from_json(content["plain"])
    return [_Condition(c, curve, plain) for c in concurrency]


def _measured_conditions(path: Path) -> list[_Condition]:
    """The curves, prompts and outcomes of a measured load."""
    if not path.exists():
        raise FileNotFoundError(f"no measured load at {path}: write one with `bench serve --output`")
    load = load_from_report(json.loads(path.read_text()).get("results", {}), path)
    conditions = []
    for count, profile in load.profiles.items():
        some = [p for p in load.points if p.concurrency == count]
        prompts = {}
        for name in {p.system for p in some}:
            sums = [(p.prompt_steps, p.tokens, len(p.request_rates)) for p in some if p.system == name]
            steps, tokens, requests = np.sum(sums, axis=0)
            # With one slot, a prompt runs alone; with several, nearly always beside others.
            chunk = profile.prompt if count == 1 else profile.chunk * profile.prompt_token
            prompts[name] = PromptCost(seconds=chunk * steps / requests, tokens=tokens / requests)
        rates = {r.system: r.throughput for r in summarize_load(some)}
        conditions.append(_Condition(count, profile.curve, profile.plain_curve, prompts, rates))
    return conditions
