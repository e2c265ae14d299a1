"""`python -m dspark_jax.bench`: step costs measured side by side in one run.

`decode` times the target's steps over 1, 2, 4, … rows of one sequence and a drafter's round beside them: what
verification costs in one-token steps, and the sequential head's share of a round. `train` times forward and backward of
the drafters at SmolLM2's sizes with features given, against a plain matrix product of the same shapes. `serve` puts
the engine under closed-loop load, plain decoding and drafters with several policies side by side.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import platform
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from dspark_jax.config import DecoderConfig, DrafterConfig, RopeConfig
from dspark_jax.draft.contract import Drafter, chooser
from dspark_jax.draft.dspark import DSparkFunctions
from dspark_jax.draft.eagle3 import Eagle3Functions
from dspark_jax.draft.heads import sample_block
from dspark_jax.draft.loading import functions_for, load_drafter
from dspark_jax.engine.rounds import DecodeState, Requests, Rounds, Weights
from dspark_jax.evaluation.figures import require_matplotlib
from dspark_jax.evaluation.serving import (
    LoadSettings,
    ServingSystem,
    best_other_ratio,
    load_grid,
    load_report,
    matched_ratio,
    measure_load,
    summarize_load,
)
from dspark_jax.evaluation.serving_plots import write_load_plots
from dspark_jax.evaluation.tables import rich_table
from dspark_jax.evaluation.tasks import load_tasks
from dspark_jax.files import atomic_write
from dspark_jax.progress import Progress
from dspark_jax.sampling import make_sampling, request_keys
from dspark_jax.spec.schedule import Fixed, NoDraft
from dspark_jax.target.loading import load_target
from dspark_jax.training.anchors import block_labels, draw_anchors, row_keys
from dspark_jax.training.losses import LossConfig, block_loss, eagle3_loss, slot_weights
from dspark_jax.types import Proposal, TargetTables


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decode:
    """Time target steps and a drafter's round.

    Attributes:
        target: the target.
        draft: the drafter.
        rows: rows of one sequence run through the target at once.
        context: cache positions.
        repeats: timed repeats; the median and the minimum are reported.
        output: JSON file for the numbers.
    """

    target: str = "smollm2-135m"
    draft: str = "dspark"
    rows: tuple[int, ...] = (1, 2, 4, 8, 16)
    context: int = 512
    repeats: int = 15
    output: Path | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train:
    """Time forward and backward of the drafters at SmolLM2's sizes (5 layers, rank 256; EAGLE-3: 1 layer, 7 steps).

    Attributes:
        batch: rows.
        length: tokens of a row.
        anchors: anchors of a row.
        chunk: anchors of a row whose logits exist at once.
        dtype: of products and activations.
        repeats: timed repeats; the minimum counts.
        output: JSON file for the numbers.
    """

    batch: tuple[int, ...] = (1, 4)
    dtype: Literal["float32", "bfloat16"] = "float32"
    length: int = 512
    anchors: int = 32
    chunk: int = 8
    repeats: int = 3
    output: Path | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Serve:
    """Put the engine under closed-loop load and compare systems at every concurrency.

    Attributes:
        target: the target.
        draft: the drafter with a confidence head.
        baseline: a second drafter, verified whole; None for none.
        tasks: prompt files or folders; the built-in prompts by default.
        fixed: fixed verify lengths to compare with.
        load: how load is made.
        output: JSON file for the numbers.
        plots: folder for the pictures.
    """

    target: str = "smollm2-135m"
    draft: str = "dspark"
    baseline: str | None = None
    tasks: tuple[str, ...] = ()
    fixed: tuple[int, ...] = (1, 3, 5, 7)
    load: LoadSettings = dataclasses.field(default_factory=LoadSettings)
    output: Path | None = None
    plots: Path | None = None


def seconds(call: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Median and minimum wall-clock seconds of a call whose result is waited for; the first call does not count."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - started)
    return {"median": float(np.median(times)), "minimum": float(np.min(times))}


def bench_decode(command: Decode) -> dict[str, Any]:
    """Target steps over several widths, the proposal, and the sequential head alone."""
    target = load_target(command.target, dtype=jnp.float32)
    drafter = load_drafter(command.draft, target)
    block = drafter.config.block_size
    vocab = target.tables.embed.shape[0]
    requests = Requests(
        keys=request_keys(jnp.zeros(1, jnp.uint32)),
        sampling=make_sampling(1, vocab_size=vocab, temperature=0.0),
        stop_ids=jnp.full((1, 4), -1, jnp.int32),
        prompt_lengths=jnp.ones(1, jnp.int32),
        budgets=jnp.full((1,), 1 << 20, jnp.int32),
        threshold=jnp.float32(0),
    )
    weights = Weights(target.params, target.tables, drafter.params)
    rounds = Rounds(target.config, drafter.functions, target.dtype, command.context, target.config.max_position)
    plain = dataclasses.replace(rounds, drafter=None)
    results: dict[str, Any] = {"target_step": {}}

    def running(which: Rounds) -> DecodeState:
        state = jax.jit(which.init)(requests)
        return dataclasses.replace(state, lengths=jnp.full((1,), command.context // 2, jnp.int32))

    def timed(which: Rounds, program: Callable[..., Any], *extra: Any) -> dict[str, float]:
        """Time a program that consumes and returns the state; it stays at the same position."""
        states = [running(which)]
        compiled = jax.jit(program, donate_argnums=2)

        def call() -> Any:
            before = states[0].lengths + 0
            after, *rest = compiled(weights, requests, states[0], *extra)
            states[0] = dataclasses.replace(after, lengths=before)
            return after, rest

        return seconds(call, command.repeats)

    for width in command.rows:
        results["target_step"][width] = timed(plain, _target_rows(plain, width))
    propose = lambda w, q, s: rounds.propose(w, q, s, block_size=block)  # noqa: E731
    results["propose"] = timed(rounds, propose)
    _, proposal, keep = jax.jit(propose)(weights, requests, running(rounds))
    verify = lambda w, q, s, p, k: rounds.verify(w, q, s, p, k, width=block + 1)  # noqa: E731
    results["verify"] = timed(rounds, verify, proposal, keep)
    if drafter.config.markov_rank:
        total = results["propose"]["median"] + results["verify"]["median"]
        results["sequential_head"] = _sequential_head(drafter, requests, vocab, total, command.repeats)
    return results


def _sequential_head(drafter: Drafter, requests: Requests, vocab: int, total: float, repeats: int) -> dict[str, float]:
    """Seconds of the sampling scan beyond a plain argmax of the same base logits, and its share of a round."""
    shape = drafter.config
    base = jax.random.normal(jax.random.key(0), (1, shape.block_size, vocab))
    hidden = jax.random.normal(jax.random.key(1), (1, shape.block_size, shape.decoder.hidden_size))
    anchors = jnp.ones((1,), jnp.int32)
    choose = chooser(requests.sampling, requests.keys, anchors)
    times = []
    for config in (shape, dataclasses.replace(shape, markov_rank=0)):
        run = jax.jit(functools.partial(sample_block, config, choose=choose))
        call = functools.partial(run, drafter.params, base, hidden, anchors)
        times.append(seconds(call, repeats)["median"])
    return {"median": times[0] - times[1], "share_of_round": (times[0] - times[1]) / total}


def _target_rows(rounds: Rounds, width: int) -> Callable[..., Any]:
    """Run `width` rows of the sequence through the target and take their argmax: a verification without a drafter."""

    def program(weights: Weights, requests: Requests, state: DecodeState) -> Any:
        drafts = jnp.zeros((1, width - 1), jnp.int32)
        proposal = Proposal(drafts, None, None, jnp.full((1,), width - 1, jnp.int32))
        return rounds.verify(weights, requests, state, proposal, None, width=width)

    return program


SMOLLM2_LAYER = DecoderConfig(
    family="qwen3",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=5,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope=RopeConfig(),
    max_position=8192,
    qk_norm=True,
)


def bench_train(command: Train) -> dict[str, Any]:
    """Seconds of forward and backward, features given, and their rates against a plain product."""
    results: dict[str, Any] = {"product": _plain_product(command)}
    taps = (0, 1, 2, 3, 4)
    common: dict[str, Any] = {"target_layers": 6, "target_layer_ids": taps, "block_size": 7}
    dspark = DrafterConfig(
        kind="dspark", decoder=SMOLLM2_LAYER, mask_token_id=0, markov_rank=256, confidence_head=True, **common
    )
    eagle = DrafterConfig(kind="eagle3", decoder=dataclasses.replace(SMOLLM2_LAYER, num_layers=1), **common)
    for batch in command.batch:
        for config in (dspark, eagle):
            results[f"{config.name}, batch {batch}"] = _forward_backward(config, batch, command)
    return results


def _forward_backward(config: DrafterConfig, batch: int, command: Train) -> dict[str, float]:
    dtype = jnp.dtype(command.dtype)
    functions = functions_for(config, dtype)
    width, vocab, length = config.decoder.hidden_size, config.decoder.vocab_size, command.length
    keys = jax.random.split(jax.random.key(0), 5)
    table = jax.random.normal(keys[0], (vocab, width)) * 0.05
    tables = TargetTables(embed=table, head=table)
    tokens = jax.random.randint(keys[1], (batch, length), 0, vocab)
    taps = jax.random.normal(keys[2], (batch, length, width * len(config.target_layer_ids)))
    hidden = jax.random.normal(keys[3], (batch, length, width))
    positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
    segments, mask = jnp.ones_like(tokens), jnp.ones(tokens.shape, bool)
    params = functions.initialise(keys[4], taps.shape[-1])

    def loss(params: Any, tables: Any, taps: Any, hidden: Any) -> Any:
        if isinstance(functions, Eagle3Functions):
            states = functions.train_states(params, tables, taps, tokens, positions, segments)
            scale, chunk = jnp.float32(batch * length), 8 * command.chunk
            return eagle3_loss(states, tables, hidden, mask, segments, 0.8, scale, chunk=chunk, dtype=dtype)[0]
        return _block_objective(functions, params, tables, tokens, positions, segments, mask, taps, hidden, command)

    program = jax.jit(jax.grad(loss)).lower(params, tables, taps, hidden).compile()
    memory = program.memory_analysis()
    assert memory is not None
    result = seconds(lambda: program(params, tables, taps, hidden), command.repeats)
    result["temporaries_gb"] = memory.temp_size_in_bytes / 1e9
    result["gflop"] = _gflop(config, batch, command)
    result["gflop_per_s"] = result["gflop"] / result["minimum"]
    return result


def _gflop(config: DrafterConfig, batch: int, command: Train) -> float:
    """Billions of operations in the products that forward and backward need, none of them counted twice.

    A product with a trained weight counts three times (forward, input's gradient, weight's gradient), one with the
    frozen head twice, the teacher's logits once.
    """
    d, size = config.decoder, config.block_size
    hidden, vocab, rank = d.hidden_size, d.vocab_size, config.markov_rank
    queries, keys = d.num_heads * d.head_dim, d.num_kv_heads * d.head_dim
    context = batch * command.length
    slots = size * (batch * command.anchors if config.kind == "dspark" else context)
    wide = hidden if config.kind == "dspark" else 2 * hidden  # EAGLE-3 attends over embedding and state side by side
    layer = wide * (queries + 2 * keys) + queries * hidden + 3 * hidden * d.intermediate_size
    attention = 2 * queries * (command.length + size)
    total = 3 * slots * d.num_layers * (layer + attention)
    total += 3 * context * len(config.target_layer_ids) * hidden * hidden
    if config.kind == "dspark":
        total += 3 * context * d.num_layers * 2 * hidden * keys + 3 * slots * vocab * rank
    teachers = slots if config.kind == "dspark" else context
    total += vocab * hidden * (2 * slots + teachers)
    return 2 * total / 1e9


def _block_objective(functions, params, tables, tokens, positions, segments, mask, taps, hidden, command: Train) -> Any:
    assert isinstance(functions, DSparkFunctions)
    draws = row_keys(0, jnp.int32(0), jnp.arange(tokens.shape[0]))
    anchors = draw_anchors(mask, segments, draws, command.anchors)
    labels = block_labels(anchors, tokens, mask, segments, functions.config.block_size)
    outputs = functions.train_blocks(
        params, tables, taps, tokens, positions, segments, anchors.index, anchors.keep, labels.tokens
    )
    config = LossConfig()
    denominator = jnp.sum(slot_weights(labels, config.loss_decay))
    return block_loss(
        outputs,
        params,
        tables,
        hidden,
        anchors,
        labels,
        config,
        denominator,
        chunk=command.chunk,
        dtype=functions.dtype,
    )[0]


def _plain_product(command: Train) -> dict[str, float]:
    """A product of block states with the head, the shape most of a step consists of."""
    a, b = (jnp.ones((rows, 576), jnp.dtype(command.dtype)) for rows in (896, 49152))
    product = jax.jit(lambda a, b: jnp.einsum("td,vd->tv", a, b, preferred_element_type=jnp.float32))
    result = seconds(lambda: product(a, b), command.repeats)
    result["gflop_per_s"] = 2 * 896 * 576 * 49152 / result["minimum"] / 1e9
    return result


def bench_serve(command: Serve) -> dict[str, Any]:
    """Load at every concurrency, with its table, ratios and pictures."""
    if command.plots is not None:
        require_matplotlib()
    target = load_target(command.target, dtype=jnp.float32)
    drafter = load_drafter(command.draft, target)
    systems = [ServingSystem("plain", None, NoDraft())]
    if command.baseline is not None:
        baseline = load_drafter(command.baseline, target)
        systems.append(ServingSystem(baseline.name, baseline, Fixed(baseline.config.block_size)))
    systems += [ServingSystem(f"fixed {k}", drafter, Fixed(k)) for k in command.fixed]
    systems.append(ServingSystem("scheduled", drafter, None))
    prompts = [prompt.messages for prompt in load_tasks(command.tasks)]
    error, console = Console(stderr=True), Console()
    with Progress("load", None, "stages", console=error) as progress:
        points, profiles = measure_load(
            target, systems, prompts, command.load, on_progress=lambda what: progress.update(1, now=what)
        )
    rows = summarize_load(points)
    console.print(rich_table(load_grid(rows)))
    others = [s.name for s in systems if s.name == "plain" or s.name.startswith("fixed")]
    ratios = best_other_ratio(points, "scheduled", others)
    for concurrency, values in ratios.items():
        spread = f"{np.median(values):.3f} ({values.min():.3f} to {values.max():.3f})"
        console.print(f"{concurrency} in flight: scheduled over the best of plain and fixed: {spread}")
    results = load_report(points, profiles, command.load)
    results["scheduled_over_best"] = {str(c): values.tolist() for c, values in ratios.items()}
    if command.baseline is not None:
        results["over_baseline"] = matched_ratio(rows, "scheduled", systems[1].name)
        for speed, ratio in results["over_baseline"]:
            console.print(f"at {speed:.1f} tokens/s a request: scheduled over {systems[1].name}: {ratio:.2f}")
    if command.plots is not None:
        write_load_plots(rows, command.plots)
    return results


def main(command: Decode | Train | Serve) -> None:
    """Run a benchmark, print its table, and write the numbers."""
    console = Console()
    if isinstance(command, Serve):
        results = bench_serve(command)
    else:
        results = bench_decode(command) if isinstance(command, Decode) else bench_train(command)
        _print(console, type(command).__name__.lower(), results)
    if command.output is not None:
        settings = json.loads(json.dumps(dataclasses.asdict(command), default=str))
        device = jax.devices()[0].device_kind
        facts = {"date": str(date.today()), "device": device, "jax": jax.__version__, "settings": settings}
        with atomic_write(command.output, "w") as file:
            json.dump({**facts, "results": results}, file, indent=2)


def _print(console: Console, name: str, results: dict[str, Any]) -> None:
    device = jax.devices()[0].device_kind
    table = Table(title=f"{name} on {platform.processor() or device}, {date.today()}")
    table.add_column("what")
    table.add_column("measured")
    for label, value in _flat(results):
        table.add_row(label, f"{value:.4g}")
    console.print(table)


def _flat(values: dict[Any, Any], prefix: str = "") -> list[tuple[str, float]]:
    rows = []
    for name, value in values.items():
        label = f"{prefix}{name}"
        rows += _flat(value, f"{label} / ") if isinstance(value, dict) else [(label, float(value))]
    return rows


if __name__ == "__main__":
    main(
        tyro.cli(
            Annotated[Decode, tyro.conf.subcommand("decode")]  # type: ignore[arg-type]
            | Annotated[Train, tyro.conf.subcommand("train")]
            | Annotated[Serve, tyro.conf.subcommand("serve")],
            description=__doc__,
        )
    )
