"""Frozen configurations. Shapes of decoders and drafters here; run configurations live with the code they drive."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

LayerType = Literal["full_attention", "sliding_attention"]
HeadType = Literal["vanilla", "gated", "rnn"]
Activation = Literal["silu", "gelu_tanh"]
_TAPPING = ("dspark", "eagle3")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding of a decoder.

    Attributes:
        theta: base of the frequencies.
        kind: "default"; "linear" divides all frequencies by `factor`; "llama3" divides the low ones only;
            "proportional" turns the first `rotated` of the pairs, at the frequencies they have where all turn, divided
            by `factor`, and leaves the others.
        factor: context extension factor.
        low_freq_factor, high_freq_factor, original_max_position: the band of llama3's interpolation.
        rotated: fraction of the pairs that turn (proportional only).
    """

    theta: float = 10_000.0
    kind: Literal["default", "linear", "llama3", "proportional"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    rotated: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Keys and values of one attention sublayer.

    Attributes:
        num_kv_heads: K; the query heads are N of the same width.
        head_dim: H.
        rope: rotary embedding of queries and keys.
        keys_are_values: values are the projected keys (before their norm and rotation); there is no v_proj.
    """

    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    keys_are_values: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Shape of a Llama-, Qwen3- or Gemma-4-style decoder: of a target, or of a drafter's layers.

    Attributes:
        family: Hugging Face `model_type`.
        num_kv_heads, head_dim, rope: of every layer but those that `full_attention` says otherwise of.
        full_attention: shape of the "full_attention" layers where it is another (Gemma-4); ask `attention(layer)`.
        qk_norm: RMSNorm over the head width of queries and keys before RoPE (Qwen3, Gemma-4).
        value_norm: the same for values, without a weight (Gemma-4).
        attention_scale: factor on query-key products; None is 1 / sqrt(head width).
        activation: of the feed-forward sublayers' gate.
        sandwich_norms: what a sublayer adds to the residual stream is normed too (Gemma-4).
        layer_scalar: the residual stream is multiplied by a constant of the checkpoint after each layer (Gemma-4).
        embed_scale: factor on looked-up embeddings (Gemma: sqrt(D)).
        soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`.
        layer_types: one entry a layer; "sliding_attention" sees the last `sliding_window` positions only.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position: int
    qk_norm: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    layer_types: tuple[LayerType, ...] = ()
    sliding_window: int | None = None
    initializer_range: float = 0.02
    full_attention: AttentionShape | None = None
    value_norm: bool = False
    attention_scale: float | None = None
    activation: Activation = "silu"
    sandwich_norms: bool = False
    layer_scalar: bool = False
    embed_scale: float = 1.0
    soft_cap: float | None = None

    def __post_init__(self) -> None:
        full = self.full_attention
        for heads in (self.num_kv_heads, self.num_kv_heads if full is None else full.num_kv_heads):
            if self.num_heads % heads:
                raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {heads}")
        if full is not None and not self.layer_types:
            raise ValueError("full_attention has its own shape, but layer_types does not say which layers those are")
        if self.layer_types and len(self.layer_types) != self.num_layers:
            raise ValueError(f"layer_types names {len(self.layer_types)} layers, num_layers is {self.num_layers}")
        if "sliding_attention" in self.layer_types and not self.sliding_window:
            raise ValueError("layer_types contains sliding_attention but sliding_window is not set")

    def window(self, layer: int) -> int | None:
        """Attention window of a layer; `layer_types` decides, not the mere presence of `sliding_window`."""
        sliding = bool(self.layer_types) and self.layer_types[layer] == "sliding_attention"
        return self.sliding_window if sliding else None

    def attention(self, layer: int) -> AttentionShape:
        """Keys and values of a layer."""
        if self.full_attention is not None and self.layer_types[layer] == "full_attention":
            return self.full_attention
        return AttentionShape(num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, rope=self.rope)

    @property
    def widest_head(self) -> int:
        """Largest head width of any layer."""
        return max(self.attention(i).head_dim for i in range(self.num_layers))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """What a drafter is: its decoder layers, what it taps, how long its blocks are, its heads.

    Attributes:
        kind: "dspark" (also DFlash: `markov_rank` 0 and no confidence head), "eagle3" or "mtp" (the layer of EAGLE-3
            over the last hidden state instead of taps); without training and without a checkpoint of their own: "ngram"
            (prompt lookup) and "lm" (another language model).
        decoder: shape of the drafter's own layers; `num_layers` is the draft depth. Of an n-gram drafter, which has
            none, the target's.
        target_layers: number of layers of the target it was made for.
        target_layer_ids: tapped layers, counting from 0; -1 is the embedding output; never the last. Only DSpark,
            DFlash and EAGLE-3 have any.
        block_size: gamma, draft tokens per round; for EAGLE-3 and MTP the number of training-time-test steps.
        mask_token_id: fills block inputs after the anchor (parallel drafters only).
        markov_rank: 0 means no sequential head.
        num_anchors: anchors per row in training (recorded in checkpoints).
        step_loss_decay: EAGLE-3's and MTP's factor between training-time-test steps.
        confidence_temperatures: calibration (SPEC §8): what `propose` divides the confidence logit of each position by;
            None leaves the logits as trained. Training never sees them.
        draft_vocab_size: tokens it can draft, some of the target's; None for all of them, as in training.
    """

    kind: Literal["dspark", "eagle3", "mtp", "ngram", "lm"]
    decoder: DecoderConfig
    target_layers: int
    target_layer_ids: tuple[int, ...]
    block_size: int = 7
    mask_token_id: int | None = None
    markov_rank: int = 0
    markov_head: HeadType = "vanilla"
    confidence_head: bool = False
    confidence_with_markov: bool = True
    num_anchors: int = 512
    step_loss_decay: float = 0.8
    confidence_temperatures: tuple[float, ...] | None = None
    draft_vocab_size: int | None = None

    def __post_init__(self) -> None:
        self._check_temperatures()
        if self.draft_vocab_size is not None and not 1 <= self.draft_vocab_size <= self.decoder.vocab_size:
            raise ValueError(
                f"draft_vocab_size is {self.draft_vocab_size}: expected 1 to {self.decoder.vocab_size}, the target's"
            )
        if self.block_size < 1:
            raise ValueError(f"block_size must be at least 1, found {self.block_size}")
        if self.kind not in _TAPPING and self.target_layer_ids:
            raise ValueError(
                f"target_layer_ids is {self.target_layer_ids}, but {self.name} taps no layers: leave it empty"
            )
        if self.kind in _TAPPING and not self.target_layer_ids:
            raise ValueError(f"target_layer_ids is empty: {self.name} needs at least one tapped layer")
        for layer in self.target_layer_ids:
            if layer == self.target_layers - 1:
                raise ValueError(
                    f"target_layer_ids taps layer {layer}, the target's last: its stored value is ambiguous between "
                    f"raw and normed; tap one of -1..{self.target_layers - 2}"
                )
            if not -1 <= layer < self.target_layers:
                raise ValueError(
                    f"target_layer_ids contains {layer}; the target has layers -1..{self.target_layers - 2} to tap"
                )
        if self.kind in ("eagle3", "mtp") and self.decoder.num_layers != 1:
            raise ValueError(
                f"{self.name} has exactly one layer (its cache update is correct for one only), found "
                f"{self.decoder.num_layers}"
            )
        if self.kind == "dspark":
            if self.mask_token_id is None:
                raise ValueError("a parallel drafter needs mask_token_id")
            if not 0 <= self.mask_token_id < self.decoder.vocab_size:
                raise ValueError(
                    f"mask_token_id {self.mask_token_id} is outside the vocabulary of {self.decoder.vocab_size}"
                )

    def _check_temperatures(self) -> None:
        temperatures = self.confidence_temperatures
        if temperatures is None:
            return
        if not self.confidence_head:
            raise ValueError("confidence_temperatures are set, but the drafter has no confidence head: leave them out")
        if len(temperatures) != self.block_size:
            raise ValueError(
                f"confidence_temperatures has {len(temperatures)} entries for a block of {self.block_size}: expected "
                "one a position; calibrate again, or leave them out"
            )
        if not all(math.isfinite(t) and t > 0 for t in temperatures):
            raise ValueError(f"confidence_temperatures are {temperatures}: expected finite numbers above 0")

    @property
    def confidence_features(self) -> bool:
        """Whether the confidence head reads the Markov table row beside the backbone state."""
        return self.confidence_with_markov and self.markov_rank > 0

    @property
    def feature_width(self) -> int:
        """Width of what the drafter reads of the target at a position: its tapped states, or its last hidden state."""
        return self.decoder.hidden_size * (1 if self.kind == "mtp" else len(self.target_layer_ids))

    @property
    def name(self) -> str:
        """The drafter's common name: DSpark, DFlash, EAGLE-3, MTP, n-gram or language model."""
        if self.kind != "dspark":
            return {"eagle3": "EAGLE-3", "mtp": "MTP", "ngram": "n-gram", "lm": "language model"}[self.kind]
        return "DSpark" if self.markov_rank or self.confidence_head else "DFlash"


def spread_layer_ids(num_layers: int, count: int = 5) -> tuple[int, ...]:
    """Taps spread evenly from the second layer to the third from last, never the last.

    Example: `spread_layer_ids(36) == (1, 9, 17, 25, 33)`, the released taps of Qwen3-4B.
    """
    if num_layers < count + 1:
        raise ValueError(f"{num_layers} layers are too few for {count} distinct taps below the last layer")
    first, last = (1, num_layers - 3) if num_layers >= count + 3 else (0, num_layers - 2)
    return tuple(round(first + i * (last - first) / (count - 1)) for i in range(count))
