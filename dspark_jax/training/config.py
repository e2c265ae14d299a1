"""What a training run is: one frozen dataclass, written in a Python file and overridden from the command line."""

from __future__ import annotations

import dataclasses
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from dspark_jax.config import DecoderConfig, DrafterConfig, HeadType, LayerType, spread_layer_ids
from dspark_jax.training.losses import LossConfig
from dspark_jax.training.optimizer import OptimizerConfig
from dspark_jax.types import ChatOptions

DRAFTER_KINDS = ("dspark", "dflash", "eagle3", "mtp")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterShape:
    """What is free to choose about a drafter; everything else is derived from its target.

    Attributes:
        kind: "dspark", "dflash" (the same backbone without heads), "eagle3", or "mtp" (its layer over the last hidden
            state alone).
        layers: draft depth.
        intermediate_size: MLP width; None takes the target's.
        block_size: gamma; for EAGLE-3 and MTP the number of training-time-test steps. None: 7, for MTP 1.
        taps: tapped target layers; None spreads five over the depth (MTP taps none).
        mask_token_id: token that fills block inputs (parallel drafters): a special token that no text holds.
        markov_rank: rank of the sequential head; 0 for none.
        markov_head: its form.
        confidence_head: whether there is one.
        confidence_with_markov: whether it reads the sequential head's table row.
        step_loss_decay: EAGLE-3's and MTP's factor between steps.
    """

    kind: Literal["dspark", "dflash", "eagle3", "mtp"] = "dspark"
    layers: int = 5
    intermediate_size: int | None = None
    block_size: int | None = None
    taps: tuple[int, ...] | None = None
    mask_token_id: int | None = None
    markov_rank: int = 0
    markov_head: HeadType = "vanilla"
    confidence_head: bool = False
    confidence_with_markov: bool = True
    step_loss_decay: float = 0.8

    def __post_init__(self) -> None:
        parallel = self.kind not in _AUTOREGRESSIVE
        _unread(self, "heads belong to DSpark", self.kind == "dspark", _HEAD_FIELDS)
        _unread(self, "EAGLE-3 and MTP have no mask inputs", parallel, ("mask_token_id",))
        _unread(self, "only EAGLE-3 and MTP decay over steps", not parallel, ("step_loss_decay",))
        _unread(self, "MTP reads the last hidden state alone", self.kind != "mtp", ("taps",))
        if parallel and self.mask_token_id is None:
            raise ValueError(f"kind {self.kind!r} needs mask_token_id: a special token that no text holds")


# Targets whose drafters have Qwen3 layers; others lend theirs.
_QWEN3_DRAFTED = ("llama", "qwen3")
_AUTOREGRESSIVE = ("eagle3", "mtp")
_HEAD_FIELDS = ("markov_rank", "markov_head", "confidence_head", "confidence_with_markov")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshShape:
    """Sizes of the device mesh; see `sharding.create_mesh`."""

    data: int | None = None
    fsdp: int = 1
    tensor: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessConfig:
    """How the processes of a run find each other; a run on one host needs none of it.

    Attributes:
        coordinator: "auto" where the cluster tells (TPU slices, Slurm, GKE); HOST:PORT of process 0 elsewhere.
        index: number of this process, with an address.
        count: number of processes, with an address.
    """

    coordinator: str | None = None
    index: int | None = None
    count: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run.

    Attributes:
        drafter: what is trained.
        data: conversation files (JSONL or ArrayRecord): paths, or URLs such as `gs://bucket/name`.
        output: folder of checkpoints, exported drafters and logs.
        target: `smollm2-135m`, a path or a hub name.
        chat: how conversations become text; evaluate with the same.
        initial_drafter: start from this drafter's weights (shipped name, folder or hub name) with a fresh optimizer and
            schedule, for example to adapt a released drafter to new data; None starts from random weights.
        features_cache: folder of a target cache with these taps (MTP: any); None runs the target inside the step.
        loss: weights of the parallel drafters' objective.
        optimizer: AdamW and its schedule.
        steps: length of the run and of its schedule; give this or `epochs`.
        epochs: length in passes over the corpus.
        max_minutes: stop and save after this much accumulated training time, resumes included; the schedule stays.
        sequence_length: tokens of a row; longer conversations are cut.
        batch_size: rows of a step, over all devices and accumulation steps.
        accumulation: parts a step is computed in, one after another.
        num_anchors: anchors of a row (parallel drafters).
        packed: several conversations share a row.
        min_loss_tokens: conversations with fewer supervised tokens are dropped.
        seed: names parameters, data order and anchors.
        dtype: of products and activations; weights and moments are float32.
        attention: "dense" computes all scores, "kernel" only the blocks that are seen, on TPUs; None chooses by device.
        vocab_chunk: anchors (EAGLE-3, MTP: positions) of each row whose logits exist at once.
        vocab_columns: vocabulary columns a training step computes: the frequent tokens, the batch's own and an unbiased
            sample of the rest; None computes all (the exact loss). Validation is always exact.
        mesh: device mesh.
        processes: the run's processes, one a host.
        max_bad_steps: steps in a row without finite gradients before the run gives up; each is skipped.
        checkpoint_every: steps between checkpoints; there is always one at the end.
        keep_checkpoints: older ones are deleted, exports with them.
        log_every: steps summed into one line of the log.
        validate_every: steps between validations on the held-out rows; None for none.
        validation_batches: batches of a validation; None takes all held-out rows.
        decode_every: steps between checks by real decoding; None for none.
        decode_prompts: prompts of such a check.
        tensorboard: also write TensorBoard files.
        profile_steps: first and last step that are traced for xprof, into `output/profile`; None for none.
    """

    drafter: DrafterShape
    data: tuple[str, ...]
    output: Path
    target: str = "smollm2-135m"
    chat: ChatOptions = dataclasses.field(default_factory=ChatOptions)
    initial_drafter: str | None = None
    features_cache: Path | None = None
    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    steps: int | None = None
    epochs: int | None = None
    max_minutes: float | None = None
    sequence_length: int = 4096
    batch_size: int = 512
    accumulation: int = 1
    num_anchors: int | None = None
    packed: bool = True
    min_loss_tokens: int = 14
    seed: int = 0
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    attention: Literal["dense", "kernel"] | None = None
    vocab_chunk: int = 1
    vocab_columns: int | None = None
    mesh: MeshShape = dataclasses.field(default_factory=MeshShape)
    processes: ProcessConfig = dataclasses.field(default_factory=ProcessConfig)
    max_bad_steps: int = 20
    checkpoint_every: int = 500
    keep_checkpoints: int = 2
    log_every: int = 10
    validate_every: int | None = None
    validation_batches: int | None = None
    decode_every: int | None = None
    decode_prompts: int = 16
    tensorboard: bool = False
    profile_steps: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(f"give steps or epochs, exactly one: found steps {self.steps}, epochs {self.epochs}")
        if self.batch_size % self.accumulation:
            raise ValueError(f"batch_size {self.batch_size} is not a multiple of accumulation {self.accumulation}")
        for name in (
            "checkpoint_every",
            "keep_checkpoints",
            "log_every",
            "accumulation",
            "vocab_chunk",
            "max_bad_steps",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, found {getattr(self, name)}")
        parallel = self.drafter.kind not in _AUTOREGRESSIVE
        if parallel and self.num_anchors is None:
            raise ValueError(f"drafter.kind {self.drafter.kind!r} needs num_anchors")
        _unread(self, "EAGLE-3 and MTP train at every position by soft labels", parallel, ("num_anchors", "loss"))
        if parallel and self.loss.confidence and not self.drafter.confidence_head:
            raise ValueError("loss.confidence is on, but drafter.confidence_head is off: set loss.confidence to 0")


def _unread(config: Any, reason: str, is_read: bool, names: tuple[str, ...]) -> None:
    """Refuse settings that this kind of run would ignore."""
    if is_read:
        return
    for field in dataclasses.fields(config):
        value, factory = getattr(config, field.name), field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        if field.name in names and value != default:
            raise ValueError(f"{field.name} = {value!r} would not be read ({reason}): remove it")


def drafter_config(config: TrainConfig, target: DecoderConfig) -> DrafterConfig:
    """Derive the drafter from its target: same width, heads, RoPE and vocabulary.

    Its layers see all of the text. They are Qwen3's (q/k-norm) for Llama and Qwen3 targets, Gemma-4's for Gemma-4.

    Raises:
        ValueError: taps or a mask token that the target does not have.
    """
    shape = config.drafter
    full: tuple[LayerType, ...] = ("full_attention",)
    decoder = dataclasses.replace(
        target,
        num_layers=shape.layers,
        intermediate_size=shape.intermediate_size or target.intermediate_size,
        tie_word_embeddings=False,
        layer_types=full * shape.layers,
    )
    if target.family in _QWEN3_DRAFTED:
        decoder = dataclasses.replace(
            decoder, family="qwen3", qk_norm=True, attention_bias=False, mlp_bias=False, sliding_window=None
        )
    common: dict[str, Any] = {
        "decoder": decoder,
        "target_layers": target.num_layers,
        "target_layer_ids": () if shape.kind == "mtp" else shape.taps or spread_layer_ids(target.num_layers),
        "block_size": (1 if shape.kind == "mtp" else 7) if shape.block_size is None else shape.block_size,
    }
    if shape.kind == "eagle3" or shape.kind == "mtp":
        return DrafterConfig(kind=shape.kind, step_loss_decay=shape.step_loss_decay, **common)
    return DrafterConfig(
        kind="dspark",
        mask_token_id=shape.mask_token_id,
        markov_rank=shape.markov_rank,
        markov_head=shape.markov_head,
        confidence_head=shape.confidence_head,
        confidence_with_markov=shape.confidence_with_markov,
        num_anchors=config.num_anchors or 0,
        **common,
    )


def load_config(path: str | Path) -> TrainConfig:
    """Read a config file: Python that ends with `config = TrainConfig(...)`; siblings may import each other.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file defines no `config` of this type.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"config file {path} does not exist")
    folder = str(path.resolve().parent)
    before = set(sys.modules)
    sys.path.insert(0, folder)
    try:
        found = runpy.run_path(str(path)).get("config")
    finally:
        sys.path.remove(folder)
        # Another folder may hold a file of the same name.
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(folder):
                del sys.modules[name]
    if not isinstance(found, TrainConfig):
        raise ValueError(f"{path} defines config = {type(found).__name__}, expected a TrainConfig")
    return found


def to_json(value: Any) -> Any:
    """Nested plain values of a config, for fingerprints and for telling two runs apart."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [to_json(x) for x in value]
    if isinstance(value, Mapping):
        return {k: to_json(x) for k, x in value.items()}
    return str(value) if isinstance(value, Path) else value
