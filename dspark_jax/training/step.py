"""One training step: anchors and denominators of the whole step first, then gradients part by part, then AdamW.

Every mean is a sum over the global batch divided once, so neither the number of devices nor the number of accumulation
steps changes the objective (SPEC §5).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.config import DecoderConfig
from dspark_jax.draft.dspark import DSparkFunctions
from dspark_jax.draft.eagle3 import Eagle3Functions
from dspark_jax.nn.intervals import DENSE_INTERVALS, IntervalAttention
from dspark_jax.sharding import constrain, constrain_parameters, gather_parameters, tree_shardings
from dspark_jax.target.transformer import forward_rows
from dspark_jax.training.anchors import Anchors, BlockLabels, block_labels, draw_anchors, row_keys
from dspark_jax.training.columns import Columns, SampledVocabulary
from dspark_jax.training.losses import LossConfig, LossTerms, block_loss, eagle3_loss, slot_weights
from dspark_jax.training.optimizer import apply_update
from dspark_jax.types import Params, TargetFeatures, TargetTables

DeviceBatch = Any
"""A `data.pipeline.Batch` whose fields are device arrays."""


@struct.dataclass
class TrainState:
    """What a step changes.

    Attributes:
        params: float32 master weights of the drafter.
        opt_state: Adam moments and count of applied updates.
        step: steps done, which is also the number of the next batch.
        skipped: steps without an update (nothing to learn from, or gradients that were not finite).
    """

    params: Params
    opt_state: Any
    step: Int[Array, ""]
    skipped: Int[Array, ""]


@struct.dataclass
class StepMetrics:
    """What a step reports.

    Attributes:
        loss: the objective.
        terms: sums over the step's slots.
        grad_norm: global norm before clipping.
        learning_rate: of this step.
        applied: False when the update was skipped.
    """

    loss: Float[Array, ""]
    terms: LossTerms
    grad_norm: Float[Array, ""]
    learning_rate: Float[Array, ""]
    applied: Bool[Array, ""]


class Objective(Protocol):
    """What is minimised: a choice of slots that reads masks only, and a loss over the chosen slots."""

    def select(self, batch: DeviceBatch, step: Int[Array, ""]) -> tuple[Any, Float[Array, ""]]:
        """Choose slots; returns them and this part's share of the denominator."""

    def loss(
        self,
        params: Params,
        tables: TargetTables,
        features: TargetFeatures,
        batch: DeviceBatch,
        selection: Any,
        denominator: Float[Array, ""],
        columns: Columns | None,
        measure: bool,
    ) -> tuple[Float[Array, ""], LossTerms]:
        """This part's share of the objective, and its sums.

        With `measure` the target's distribution is used even where the objective does not need it, for accept rates.
        """


@dataclasses.dataclass(frozen=True)
class BlockObjective:
    """DSpark's and DFlash's objective at drawn anchors.

    Attributes:
        functions: the drafter.
        config: weights of the terms.
        num_anchors: anchors of a row.
        seed: names the draws.
        chunk: anchors of a row whose logits exist at once.
        attention: how rows attend.
    """

    functions: DSparkFunctions
    config: LossConfig
    num_anchors: int
    seed: int
    chunk: int
    attention: IntervalAttention = DENSE_INTERVALS

    def select(self, batch: DeviceBatch, step: Int[Array, ""]) -> tuple[tuple[Anchors, BlockLabels], Float[Array, ""]]:
        """Draw anchors by (seed, step, row) and find their labels."""
        keys = row_keys(self.seed, step, batch.row_ids)
        anchors = draw_anchors(batch.loss_mask, batch.segments, keys, self.num_anchors)
        labels = block_labels(anchors, batch.tokens, batch.loss_mask, batch.segments, self.functions.config.block_size)
        return (anchors, labels), jnp.sum(slot_weights(labels, self.config.loss_decay))

    def loss(
        self,
        params: Params,
        tables: TargetTables,
        features: TargetFeatures,
        batch: DeviceBatch,
        selection: tuple[Anchors, BlockLabels],
        denominator: Float[Array, ""],
        columns: Columns | None,
        measure: bool,
    ) -> tuple[Float[Array, ""], LossTerms]:
        """See `block_loss`."""
        anchors, labels = selection
        assert features.taps is not None
        last_hidden = features.last_hidden if measure or self.config.tv or self.config.confidence else None
        outputs = self.functions.train_blocks(
            params, tables, features.taps, batch.tokens, batch.positions, batch.segments, anchors.index, anchors.keep,
            labels.tokens, self.attention,
        )  # fmt: skip
        return block_loss(
            outputs, params, tables, last_hidden, anchors, labels, self.config, denominator,
            columns=columns, chunk=self.chunk, dtype=self.functions.dtype,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Eagle3Objective:
    """EAGLE-3's (and MTP's) training-time test at every position.

    Attributes:
        functions: the drafter.
        chunk: positions of a row whose logits exist at once.
        attention: how rows attend.
    """

    functions: Eagle3Functions
    chunk: int
    attention: IntervalAttention = DENSE_INTERVALS

    def select(self, batch: DeviceBatch, step: Int[Array, ""]) -> tuple[tuple[()], Float[Array, ""]]:
        """Nothing is drawn; the denominator is the number of positions, supervised or not."""
        del step
        return (), jnp.float32(batch.tokens.size)

    def loss(
        self,
        params: Params,
        tables: TargetTables,
        features: TargetFeatures,
        batch: DeviceBatch,
        selection: tuple[()],
        denominator: Float[Array, ""],
        columns: Columns | None,
        measure: bool,
    ) -> tuple[Float[Array, ""], LossTerms]:
        """See `eagle3_loss`."""
        del measure  # the objective itself reads the target's distribution
        assert features.last_hidden is not None
        states = self.functions.train_states(
            params,
            tables,
            self.functions.inputs(features),
            batch.tokens,
            batch.positions,
            batch.segments,
            self.attention,
        )
        return eagle3_loss(
            states,
            tables,
            features.last_hidden,
            batch.loss_mask,
            batch.segments,
            self.functions.config.step_loss_decay,
            denominator,
            columns=columns,
            chunk=self.chunk,
            dtype=self.functions.dtype,
        )


def target_features(
    config: DecoderConfig,
    target_params: Params | None,
    tables: TargetTables,
    batch: DeviceBatch,
    tap_ids: tuple[int, ...],
    dtype: Any,
    attention: IntervalAttention = DENSE_INTERVALS,
) -> TargetFeatures:
    """Features of a batch: the cached ones where it carries them, else the frozen target's, without gradient."""
    if batch.last_hidden is not None:
        return TargetFeatures(taps=batch.taps, last_hidden=batch.last_hidden)
    if target_params is None:
        raise ValueError("the batch carries no features and the target's parameters were not given: pass one of them")
    features = forward_rows(
        config, target_params, tables, batch.tokens, batch.segments, batch.positions, tap_ids, dtype, attention
    )
    return jax.lax.stop_gradient(features)


def init_state(
    functions: DSparkFunctions | Eagle3Functions, optimizer: optax.GradientTransformation, seed: int
) -> TrainState:
    """Random drafter and fresh optimizer; call it inside `jax.jit` with output shardings, or under `jax.eval_shape`."""
    params = functions.initialise(jax.random.key(seed), functions.config.feature_width)
    return TrainState(params=params, opt_state=optimizer.init(params), step=jnp.int32(0), skipped=jnp.int32(0))


@dataclasses.dataclass(frozen=True)
class Step:
    """The pure functions of a run, bound to its static choices; batches have a leading accumulation axis.

    Attributes:
        functions: the drafter.
        objective: what is minimised.
        target: shape of the target.
        optimizer: direction of the update.
        schedule: step to learning rate.
        sampled: sampled vocabulary of the training losses; None computes all of it.
        attention: how the target's rows attend.
    """

    functions: DSparkFunctions | Eagle3Functions
    objective: Objective
    target: DecoderConfig
    optimizer: optax.GradientTransformation
    schedule: Callable[[Int[Array, ""]], Float[Array, ""]]
    sampled: SampledVocabulary | None = None
    attention: IntervalAttention = DENSE_INTERVALS

    def jit_train(self, mesh: Mesh, state: TrainState) -> jax.stages.Wrapped:
        """`train` for a mesh: the state (arrays or shapes) is donated and keeps its layout, metrics are whole."""
        layouts = (tree_shardings(mesh, state), NamedSharding(mesh, P()))
        return jax.jit(self.train, donate_argnums=0, out_shardings=layouts)

    def train(
        self, state: TrainState, batch: DeviceBatch, tables: TargetTables, target_params: Params | None
    ) -> tuple[TrainState, StepMetrics]:
        """One update from a global batch `[accumulation, rows, L]`."""
        gradients, loss, terms = self.gradients(state.params, batch, tables, target_params, state.step)
        norm = optax.tree.norm(gradients)
        rate = self.schedule(state.step)
        applied = jnp.isfinite(norm) & (terms.blocks > 0)
        new = apply_update(self.optimizer, state.params, gradients, state.opt_state, rate)
        # A skipped step leaves weights, moments and their count as they were.
        params, opt_state = jax.tree.map(
            lambda after, before: jnp.where(applied, after, before), new, (state.params, state.opt_state)
        )
        # The layout that went in comes out: the next step takes it as it is, in the place of the old state.
        params, opt_state = constrain_parameters((params, opt_state))
        state = TrainState(params=params, opt_state=opt_state, step=state.step + 1, skipped=state.skipped + ~applied)
        return state, StepMetrics(loss=loss, terms=terms, grad_norm=norm, learning_rate=rate, applied=applied)

    def evaluate(
        self, params: Params, batch: DeviceBatch, tables: TargetTables, target_params: Params | None
    ) -> tuple[Float[Array, ""], LossTerms]:
        """Loss and sums of a batch at anchors that are the same in every validation."""
        tables = self._shared_tables(tables)
        parts, denominator = self._select(batch, jnp.int32(0))
        rows, selection = jax.tree.map(lambda x: x[0], (batch, parts))
        return self._part_loss(params, rows, selection, tables, target_params, denominator, None, True)

    def _shared_tables(self, tables: TargetTables) -> TargetTables:
        # One low-precision copy of the head, laid out for the vocabulary products, made once before the loops. Tokens
        # are looked up in it too where it is their table; else in a copy of theirs in the same layout.
        head = constrain(tables.head.astype(self.functions.dtype), "head")
        tied = self.target.tie_word_embeddings
        return dataclasses.replace(tables, head=head, embed=head if tied else constrain(tables.embed, "head"))

    def _select(self, batch: DeviceBatch, step: Int[Array, ""]) -> tuple[Any, Float[Array, ""]]:
        """Slots of every part and the denominator of the whole step, from masks alone."""
        masks = dataclasses.replace(batch, taps=None, last_hidden=None)
        parts, shares = jax.vmap(self.objective.select, in_axes=(0, None))(masks, step)
        total = jnp.sum(shares)
        return parts, jnp.where(total > 0, total, 1.0)

    def _part_loss(self, params, batch, selection, tables, target_params, denominator, columns, measure):
        batch, selection = jax.tree.map(lambda x: constrain(x, "rows"), (batch, selection))
        params = gather_parameters(params)
        features = target_features(
            self.target,
            gather_parameters(target_params),
            tables,
            batch,
            self.functions.tap_ids,
            self.functions.dtype,
            self.attention,
        )
        features = jax.tree.map(lambda x: constrain(x, "rows"), features)
        return self.objective.loss(params, tables, features, batch, selection, denominator, columns, measure)

    def gradients(
        self,
        params: Params,
        batch: DeviceBatch,
        tables: TargetTables,
        target_params: Params | None,
        step: Int[Array, ""],
    ) -> tuple[Params, Float[Array, ""], LossTerms]:
        """Gradients, loss and sums of a global batch, part by part."""
        tables = self._shared_tables(tables)
        parts, denominator = self._select(batch, step)
        columns = None if self.sampled is None else self.sampled.draw(step, batch.tokens, tables.head.shape[0])

        def part(selection_and_batch):
            # Each part gathers its weights anew: whole copies kept from part to part would fill the memory. The
            # barrier ties them to the part, so that a compiler cannot gather them before the loop.
            own, frozen, (rows, selection) = jax.lax.optimization_barrier((params, target_params, selection_and_batch))
            loss = lambda p: self._part_loss(p, rows, selection, tables, frozen, denominator, columns, False)  # noqa: E731
            (value, terms), gradients = jax.value_and_grad(loss, has_aux=True)(own)
            # Each device keeps the sums of its own part of the parameters only.
            return constrain_parameters(gradients), value, terms

        if batch.tokens.shape[0] == 1:
            return part(jax.tree.map(lambda x: x[0], (batch, parts)))
        shapes = jax.eval_shape(part, jax.tree.map(lambda x: x[0], (batch, parts)))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return jax.lax.scan(lambda sums, x: (jax.tree.map(jnp.add, sums, part(x)), None), zeros, (batch, parts))[0]
