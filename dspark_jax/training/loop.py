"""A training run from top to bottom: mesh, data, abstract state, shardings, init, donated step, restore, loop."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

from dspark_jax.data.corpus import TokenizedCorpus
from dspark_jax.data.pipeline import Batch
from dspark_jax.draft.contract import Drafter
from dspark_jax.progress import Progress
from dspark_jax.sharding import create_mesh, gather, place, row_shards, tree_shardings
from dspark_jax.target.loading import Target
from dspark_jax.training.checkpoint import Checkpoints
from dspark_jax.training.config import TrainConfig, to_json
from dspark_jax.training.feed import Feed
from dspark_jax.training.flops import model_flops
from dspark_jax.training.logs import MetricLog, Speed, Window
from dspark_jax.training.processes import Agreement
from dspark_jax.training.profiling import Trace
from dspark_jax.training.setup import build_sources, create_step, initial_params, sampled_vocabulary
from dspark_jax.training.step import StepMetrics, TrainState, init_state
from dspark_jax.types import Params

DecodeCheck = Callable[[Drafter, int], dict[str, float]]
"""`decode_check(drafter, num_prompts) -> measurements` of real speculative decoding."""

# The host runs at most this many steps ahead of the metrics it has read.
STEPS_IN_FLIGHT = 2

Reason = Literal["finished", "time", "signal"]
CLOCKS = ("seconds", "tokens", "blocks", "input_wait", "saving")
"""Counters that a run's speed follows from."""
REASONS: tuple[Reason, ...] = ("finished", "time", "signal")
"""By urgency."""


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """How a run ended.

    Attributes:
        reason: "finished", "time" (`max_minutes` reached) or "signal" (SIGTERM).
        step: steps done.
        seconds: accumulated training time, resumes included.
        drafter: the drafter as trained.
    """

    reason: Reason
    step: int
    seconds: float
    drafter: Drafter


@dataclasses.dataclass
class Counters:
    """Progress of a run that lives on the host and survives resumes.

    Attributes:
        seconds: training time, without compilation, validation, checks and saves.
        sequences: rows trained on.
        blocks: supervised blocks (EAGLE-3, MTP: positions) trained on.
        tokens: tokens of those rows, padding left out.
        input_wait: training time spent waiting for batches and handing them to the devices.
        saving: time that saves held the run up, which is not training time.
    """

    seconds: float = 0.0
    sequences: int = 0
    blocks: int = 0
    tokens: int = 0
    input_wait: float = 0.0
    saving: float = 0.0


class Stopwatch:
    """Accumulated time, started and stopped."""

    def __init__(self, seconds: float):
        self._before, self._started = seconds, None

    _started: float | None

    def start(self) -> None:
        """Count from now on."""
        self._started = time.monotonic()

    def stop(self) -> None:
        """Stop counting."""
        self._before, self._started = self.seconds, None

    @property
    def seconds(self) -> float:
        """Time counted so far."""
        return self._before + (0.0 if self._started is None else time.monotonic() - self._started)


def train(
    config: TrainConfig,
    target: Target,
    corpus: TokenizedCorpus,
    *,
    decode_check: DecodeCheck | None = None,
    console: Console | None = None,
) -> TrainResult:
    """Train a drafter, continuing from the newest checkpoint in `config.output` where there is one.

    Args:
        config: the run.
        target: the frozen target, in the run's dtype.
        corpus: tokenized conversations; rows whose number is divisible by 50 are held out.
        decode_check: measures real decoding every `decode_every` steps.
        console: where messages go.

    Returns:
        How the run ended; a run that ended early is continued by the same call.

    Raises:
        ValueError: settings, data or checkpoint that do not fit together.
    """
    if (config.decode_every is None) != (decode_check is None):
        raise ValueError(f"decode_every is {config.decode_every}, decode_check is {decode_check}: give both or neither")
    if decode_check is not None and jax.process_count() > 1:
        raise ValueError(
            f"decode_every is {config.decode_every}: real decoding needs a run of one process, set it to None"
        )
    if config.attention == "kernel" and jax.default_backend() != "tpu":
        raise ValueError(
            f"attention 'kernel' runs on TPUs, found {jax.default_backend()}: leave it out, or take 'dense'"
        )
    if jax.process_index() > 0:
        console = Console(quiet=True)
    run = Run(config, target, corpus, decode_check, console or Console(stderr=True))
    with jax.set_mesh(run.mesh), _termination() as terminated:
        return run.execute(terminated)


class Run:
    """State of `train` between its parts."""

    def __init__(
        self,
        config: TrainConfig,
        target: Target,
        corpus: TokenizedCorpus,
        decode_check: DecodeCheck | None,
        console: Console,
    ):
        self.config, self.target, self.decode_check, self.console = config, target, decode_check, console
        self.mesh = create_mesh(data=config.mesh.data, fsdp=config.mesh.fsdp, tensor=config.mesh.tensor)
        rows, shards = config.batch_size // config.accumulation, row_shards(self.mesh)
        if rows % shards:
            raise ValueError(f"{rows} rows an accumulation step do not divide over {shards} shards of the mesh")
        self.source, self.validation = build_sources(config, target, corpus, shards)
        self.feed = Feed(self.source, self.mesh, config.accumulation)
        self.total_steps = config.steps or (config.epochs or 0) * self.source.batches_per_epoch
        self.step = create_step(config, target, self.total_steps, sampled_vocabulary(config, corpus))
        self.checkpoints = Checkpoints(config.output, self.step.functions, config.keep_checkpoints, to_json(config))
        self.counters, self.window, self.stopwatch = Counters(), Window(), Stopwatch(0.0)
        self.in_flight: deque[StepMetrics] = deque()
        self.agreement = Agreement(STEPS_IN_FLIGHT)
        self.began = time.monotonic()
        self.bad_steps = 0

    def execute(self, terminated: threading.Event) -> TrainResult:
        """Init or restore, compile, loop."""
        config, mesh = self.config, self.mesh
        tables = place(mesh, self.target.tables)
        self.frozen = (tables, place(mesh, self.target.params) if config.features_cache is None else None)
        state, start = self.initial_state()
        log = MetricLog(config.output, tensorboard=config.tensorboard, resume_step=start)
        batches = self.feed.batches(start)
        evaluate = jax.jit(self.step.evaluate, out_shardings=NamedSharding(mesh, P()))
        reason: Reason = "finished"
        if start < self.total_steps:
            began = time.monotonic()
            train_step = self.step.jit_train(mesh, state)
            compiled = train_step.lower(state, self.feed.batch(start), *self.frozen).compile()
            self.console.print(f"compiled the step in {time.monotonic() - began:.0f} s")
        self.stopwatch.start()
        self.last_reading = self.reading(start)
        flops = model_flops(config, self.target.config).total
        self.speed = Speed(flops, self.began, self.counters.seconds)
        trace = Trace(config.profile_steps, config.output / "profile")
        with Progress("training", self.total_steps - start, "steps", console=self.console) as progress, trace:
            for step in range(start + 1, self.total_steps + 1):
                trace.before(step)
                state, metrics = compiled(state, self.next_batch(batches), *self.frozen)
                self.in_flight.append(metrics)
                self.read_metrics(STEPS_IN_FLIGHT)
                last = step == self.total_steps
                if step % config.log_every == 0 or last:
                    self.log_training(log, step, progress)
                progress.update(1)
                trace.after(step, lambda: self.read_metrics(0))
                reason = self.agree(terminated.is_set(), last)
                if self.due(config.validate_every, step, last) or self.due(config.decode_every, step, last):
                    self.check(log, state, step, last, evaluate)
                if step % config.checkpoint_every == 0 or last or reason != "finished":
                    self.save(state)
                if reason != "finished":
                    break
        self.stopwatch.stop()
        log.close()
        self.checkpoints.close()
        step = int(state.step)
        drafter = self.drafter(str(config.output), state)
        return TrainResult(reason=reason, step=step, seconds=self.stopwatch.seconds, drafter=drafter)

    def drafter(self, name: str, state: TrainState) -> Drafter:
        """The drafter at this state, copied: the next step overwrites the state's buffers."""
        functions = self.step.functions
        return Drafter(name, functions.config, gather(self.mesh, state.params), functions)

    def initial_state(self) -> tuple[TrainState, int]:
        """Initialise straight into the shards, or restore into them; returns the state and the steps done."""

        def create() -> TrainState:
            return init_state(self.step.functions, self.step.optimizer, self.config.seed)

        abstract = jax.eval_shape(create)
        shardings = tree_shardings(self.mesh, abstract)
        count = sum(int(np.prod(x.shape)) for x in jax.tree.leaves(abstract.params))
        steps, epochs = self.total_steps, self.total_steps / self.source.batches_per_epoch
        self.console.print(
            f"{self.step.functions.config.name}: {count:,} parameters; {steps:,} steps, {epochs:.1f} epochs of "
            f"{self.source.num_rows:,} rows"
        )
        if self.checkpoints.latest() is None:
            state = jax.jit(create, out_shardings=shardings)()
            if self.config.initial_drafter is not None:
                params = initial_params(self.config.initial_drafter, self.target, self.step.functions.config)
                state = dataclasses.replace(state, params=place(self.mesh, params))
            return state, 0
        abstract = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, shardings)
        state, saved = self.checkpoints.restore(abstract, self.source.fingerprint)
        self.counters, self.window = Counters(**saved["counters"]), Window(saved["window"])
        self.stopwatch = Stopwatch(self.counters.seconds)
        start = int(saved["next_batch"])
        self.console.print(f"continuing after step {start:,} ({self.counters.seconds / 60:.1f} minutes of training)")
        return state, start

    def next_batch(self, batches: Iterator[tuple[int, Batch]]) -> Batch:
        """The next batch on the devices; the time that takes is the run's input wait."""
        began = time.monotonic()
        k, batch = next(batches)
        self.counters.input_wait += time.monotonic() - began
        self.counters.sequences += self.config.batch_size
        self.counters.tokens += self.source.num_tokens(k)
        return batch

    def agree(self, terminated: bool, last: bool) -> Reason:
        """Why to stop now, or "finished" to go on: what any process wants, all do."""
        limit = self.config.max_minutes
        late = limit is not None and self.stopwatch.seconds >= 60 * limit and not last
        return REASONS[self.agreement(REASONS.index("signal" if terminated else "time" if late else "finished"))]

    def read_metrics(self, keep: int) -> None:
        """Read finished steps' metrics, leaving the newest `keep` on the device.

        Raises:
            FloatingPointError: gradients were not finite for too many steps in a row.
        """
        while len(self.in_flight) > keep:
            metrics = jax.device_get(self.in_flight.popleft())
            self.window.add(metrics)
            self.counters.blocks += int(metrics.terms.blocks)
            bad = not metrics.applied and metrics.terms.blocks > 0
            self.bad_steps = self.bad_steps + 1 if bad else 0
            if self.bad_steps >= self.config.max_bad_steps:
                raise FloatingPointError(
                    f"{self.bad_steps} steps in a row had gradients that are not finite (the last: loss "
                    f"{float(metrics.loss):.4g}, norm {float(metrics.grad_norm):.4g}, learning rate "
                    f"{float(metrics.learning_rate):.3g}). All were skipped, so the newest checkpoint in "
                    f"{self.config.output} is good: continue from it with a lower learning rate or clip, and look at "
                    "the rows that come next"
                )

    def log_training(self, log: MetricLog, step: int, progress: Progress) -> None:
        """Write the window's means and begin a new one."""
        self.read_metrics(0)
        self.counters.seconds = self.stopwatch.seconds
        means = self.window.means()
        spent = {name: getattr(self.counters, name) for name in ("seconds", "sequences", "blocks", "tokens")}
        log.write("train", step, {**spent, "steps": self.window.steps, **means})
        reading = self.reading(step)
        log.write("speed", step, self.speed.measure(self.last_reading, reading))
        self.window, self.last_reading = Window(), reading
        names = ("loss", "ce", "tv", "confidence", "tau_probabilistic", "learning_rate")
        shown: dict[str, Any] = {name: means[name] for name in names if name in means}
        if "accept_rate" in means:
            shown["accept"] = " ".join(f"{x:.2f}" for x in means["accept_rate"])
        progress.update(0, **shown)

    def reading(self, step: int) -> dict[str, float]:
        """The run's clocks, for its speed."""
        c = self.counters
        return {"steps": float(step), **{name: float(getattr(c, name)) for name in CLOCKS}}

    def due(self, every: int | None, step: int, last: bool) -> bool:
        """Whether something that happens every so many steps, and at the end, happens now."""
        return every is not None and (step % every == 0 or last)

    def check(self, log: MetricLog, state: TrainState, step: int, last: bool, evaluate: Any) -> None:
        """Validate and decode, off the training clock."""
        self.read_metrics(0)
        self.stopwatch.stop()
        spent = {"seconds": self.stopwatch.seconds, "sequences": self.counters.sequences}
        if self.due(self.config.validate_every, step, last):
            values = self.validate(state.params, evaluate)
            log.write("validation", step, {**spent, **values})
            self.console.print(_summary(f"validation at step {step}", values), soft_wrap=True)
        if self.decode_check is not None and self.due(self.config.decode_every, step, last):
            values = self.decode_check(self.drafter(f"step {step}", state), self.config.decode_prompts)
            log.write("decode", step, {**spent, **values})
            self.console.print(_summary(f"decoding at step {step}", values), soft_wrap=True)
        self.stopwatch.start()

    def validate(self, params: Params, evaluate: Any) -> dict[str, Any]:
        """Means over the held-out rows at fixed anchors."""
        assert self.validation is not None
        count = self.validation.batches_per_epoch
        window = Window()
        for k in range(min(count, self.config.validation_batches or count)):
            batch = jax.tree.map(lambda x: x[None], self.validation.batch(k))
            window.add_loss(*jax.device_get(evaluate(params, batch, *self.frozen)))
        return window.means()

    def save(self, state: TrainState) -> None:
        """Save everything a resume needs."""
        self.read_metrics(0)
        self.stopwatch.stop()
        began = time.monotonic()
        self.counters.seconds = self.stopwatch.seconds
        self.checkpoints.save(
            state,
            {
                "next_batch": int(state.step),
                "data": self.source.fingerprint,
                "counters": dataclasses.asdict(self.counters),
                "window": self.window.to_json(),
            },
            gather(self.mesh, state.params),
        )
        self.counters.saving += time.monotonic() - began
        self.stopwatch.start()


def _summary(title: str, values: dict[str, Any]) -> str:
    numbers = [f"{k} {v:.4g}" for k, v in values.items() if isinstance(v, float)]
    accept = [f"accept {' '.join(f'{x:.2f}' for x in values['accept_rate'])}"] if "accept_rate" in values else []
    return f"{title}: " + "  ".join(numbers + accept)


@contextlib.contextmanager
def _termination() -> Iterator[threading.Event]:
    """An event that SIGTERM sets: preemption leaves time for one checkpoint."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    before = signal.signal(signal.SIGTERM, lambda *_: event.set())
    try:
        yield event
    finally:
        signal.signal(signal.SIGTERM, before)
