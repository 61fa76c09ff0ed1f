"""DFlash: block-diffusion drafting with context-KV injection.

    H_ctx = RMSNorm(W_c [H^(l1); ...; H^(lm)])          features of committed tokens, strictly before the anchor
    K, V  = [W^K H_ctx ; W^K H_block], [W^V H_ctx ; W^V H_block]      in every draft layer, bidirectional in the block
    block = [anchor, mask, ..., mask]  ->  one parallel pass  ->  one hidden state per draft position

Embedding and LM head are the target's, frozen, and live outside this module.
Layouts: with `sample_from_anchor` row k predicts the token *after* its position, so gamma rows give gamma drafts;
without it rows 1..gamma (the masks) predict the token *at* theirs, and row 0 only conditions.

Source: DFlash, arXiv 2602.06036; the two layouts as in DeepSpec checkpoints.
Shapes: N blocks, K rows a block, S context slots, L aux layers, T target hidden, H draft hidden, E head dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from outrider.drafters.base import (
    WEIGHTS_ALONE,
    BlockInputs,
    DraftCall,
    DraftModule,
    DraftRows,
    Method,
    MethodSection,
    ModuleDrafter,
    Serving,
    capped,
    longest_draft,
    mask_token_id,
)
from outrider.drafters.chain import sample_chain
from outrider.drafters.draft import Draft
from outrider.drafters.layers import (
    Attention,
    AttentionPattern,
    BlockLayout,
    CachedKeys,
    DraftKV,
    KeySource,
    Rope,
    SwiGLU,
    check_heads,
    copy_target_layers,
    flex_block_attention,
    layer_shapes,
    rope_table,
    split_attention,
)
from outrider.target.model import Target
from outrider.utils.distributed import full_tensor

FULL, SLIDING = "full_attention", "sliding_attention"  # kinds of layers, as transformers names them


@dataclass(frozen=True)
class DFlashConfig:
    """A DFlash drafter. `block_size` counts the rows of a block, the anchor included.

    `layer_types`, where layers differ, says of each whether it has the window ("sliding_attention") or sees all
    ("full_attention"); () is one kind throughout. `is_causal` is about the rows of a block, and None, as z-lab's model
    has it, makes sliding layers causal and full ones not.

    Draft logits are c tanh(m u / c), u being those of the head, m `output_multiplier` and c `final_logit_softcapping`
    (None: m u), as z-lab's drafters may have them.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    mask_token_id: int
    block_size: int = 7
    sample_from_anchor: bool = False
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    sliding_window: int | None = None
    max_position_embeddings: int = 8192
    # Not in the repr, by which profiles know what they are of: these change no shape.
    layer_types: tuple[str, ...] = field(default=(), repr=False)
    is_causal: bool | None = field(default=False, repr=False)
    output_multiplier: float = field(default=1.0, repr=False)
    final_logit_softcapping: float | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.gamma < 1:
            raise ValueError(f"block_size {self.block_size} leaves no draft position; use at least 2.")
        check_heads(self)
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(f"mask_token_id {self.mask_token_id} is outside the vocabulary of {self.vocab_size}.")
        if self.sliding_window is not None and self.sliding_window < self.block_size:
            # z-lab's model applies the window inside the block too, where our rows all see each other.
            raise ValueError(
                f"sliding_window {self.sliding_window} must cover the block of {self.block_size}; use null for none."
            )
        for name in ("output_multiplier", "final_logit_softcapping"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} {value} must be a finite number above 0; leave it out for plain logits.")
        self._check_kinds()

    def _check_kinds(self) -> None:
        kinds = set(self.layer_types)
        if self.layer_types and (len(self.layer_types) != self.num_hidden_layers or kinds != {FULL, SLIDING}):
            raise ValueError(
                f"layer_types {list(self.layer_types)}: one of {FULL} and {SLIDING} for each of the "
                f"{self.num_hidden_layers} layers, or nothing where all are alike."
            )
        if self.layer_types and self.sliding_window is None:
            raise ValueError(f"sliding_window null leaves the layers of kind {SLIDING} without a window.")
        if self.is_causal is None and not self.layer_types:
            raise ValueError("is_causal null is for layers of two kinds (layer_types): say true or false.")

    @property
    def attention_patterns(self) -> tuple[AttentionPattern, ...]:
        """What block rows see, layer by layer."""
        kinds = self.layer_types or (FULL if self.sliding_window is None else SLIDING,) * self.num_hidden_layers
        sliding = [kind == SLIDING for kind in kinds]
        return tuple(
            AttentionPattern(
                self.sliding_window if window else None, window if self.is_causal is None else self.is_causal
            )
            for window in sliding
        )

    @property
    def plain_logits(self) -> bool:
        """Whether draft logits are the head's own."""
        return self.output_multiplier == 1.0 and self.final_logit_softcapping is None

    @property
    def gamma(self) -> int:
        """Draft tokens per block."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1


class BlockContext(NamedTuple):
    """The key source of training: block rows see the context before their anchor and their own block.

    A tuple, so that sharded layers find its tensors among their inputs.
    """

    hidden_SH: Tensor
    rope: Rope
    layout: BlockLayout

    def attend(self, attention: Attention, q_NKQE: Tensor, k_NKGE: Tensor, v_NKGE: Tensor) -> Tensor:
        kernel: Callable[..., Tensor] = flex_block_attention if q_NKQE.device.type == "cuda" else split_attention
        context = attention.keys_values(self.hidden_SH, self.rope)
        return kernel(q_NKQE, *context, k_NKGE, v_NKGE, self.layout, attention.pattern)


class DraftLayer(nn.Module):
    """A decoder layer: x += attention(norm(x)), x += MLP(norm(x))."""

    def __init__(self, config: DFlashConfig, index: int) -> None:
        super().__init__()
        H, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(H, eps=eps)
        self.self_attn = Attention(config, H, qk_norm=True, layer=index, pattern=config.attention_patterns[index])
        self.post_attention_layernorm = nn.RMSNorm(H, eps=eps)
        self.mlp = SwiGLU(config)

    def forward(self, x_NKH: Tensor, rope: Rope, source: KeySource) -> Tensor:
        x_NKH = x_NKH + self.self_attn(self.input_layernorm(x_NKH), rope, source)
        return x_NKH + self.mlp(self.post_attention_layernorm(x_NKH))


class DFlash(DraftModule):
    """The backbone all block drafters share. Parameter names are those of the z-lab dialect."""

    algorithm: ClassVar[str] = "dflash"
    aux_weight: str | None = "fc.weight"
    groups = (("fc",),)
    layer: ClassVar[type[DraftLayer]] = DraftLayer
    config: DFlashConfig

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config)
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(self.layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def context(self, aux_SLT: Tensor) -> Tensor:
        """Features of committed tokens [S, L, T] -> H_ctx [S, H]."""
        features_SH = self.fc((aux_SLT / self.aux_scale_L[:, None]).flatten(-2))
        return self.hidden_norm(features_SH.to(self.hidden_norm.weight.dtype))

    def forward(self, aux_SLT: Tensor, embedded_NKH: Tensor, layout: BlockLayout) -> Tensor:
        """The backbone in training: normed hidden states of the prediction rows, [N, gamma, H].

        Args:
            aux_SLT: raw aux hidden states of the context slots of all sequences, concatenated.
            embedded_NKH: embeddings of [anchor, mask, ...] per block (see `block_tokens`).
            layout: where the blocks stand; decides positions and the mask.
        """
        rope = rope_table(layout.positions_S(), self.config.head_dim, self.config.rope_theta)
        source = BlockContext(self.context(aux_SLT), rope, layout)
        return self.blocks(embedded_NKH, layout.block_positions_NK(embedded_NKH.shape[1]), source)

    def blocks(self, x_NKH: Tensor, positions_NK: Tensor, source: KeySource) -> Tensor:
        """The layers over embedded blocks at these positions: normed hidden states of the prediction rows."""
        rope = rope_table(positions_NK, self.config.head_dim, self.config.rope_theta)
        for layer in self.layers:
            x_NKH = layer(x_NKH, rope, source)
        return self.norm(x_NKH[:, -self.config.gamma :])

    def context_keys_values(self, aux_SLT: Tensor, positions_S: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [S, G, E] of committed tokens at these positions, per layer."""
        context_SH = self.context(aux_SLT)
        rope = rope_table(positions_S, self.config.head_dim, self.config.rope_theta)
        layers = [layer for layer in self.layers if isinstance(layer, DraftLayer)]
        return [layer.self_attn.keys_values(context_SH, rope) for layer in layers]

    def block_tokens(self, anchors_N: Tensor) -> Tensor:
        """[N] anchor tokens -> [N, K] block inputs: the anchor, then masks."""
        masks = anchors_N.new_full((len(anchors_N), self.config.block_size - 1), self.config.mask_token_id)
        return torch.cat((anchors_N[:, None], masks), dim=1)

    def rows(self, inputs: BlockInputs) -> DraftRows:
        if not self.config.plain_logits:
            raise ValueError(
                f"output_multiplier {self.config.output_multiplier:g}, final_logit_softcapping "
                f"{self.config.final_logit_softcapping}: drafters whose logits are multiplied or capped are "
                "served here, not trained."
            )
        embedded_NKH = inputs.embed(self.block_tokens(inputs.previous_NK[:, 0]))
        return DraftRows(self(inputs.aux_SLD, embedded_NKH, inputs.layout))


# ----------------------------------------------------------------------------
# A block drafter ready to serve: a draft KV cache of committed features, one block per call.
#
#     extend    W_c, norm, then K and V of every layer -> appended to each session's cache
#     propose   one block of K rows per request over [context KV ; block KV] -> sampling chain -> drafts
#
# Requests share every matrix product; only attention goes one by one. Block keys and values are written behind the
# context and forgotten: a session's length moves only with committed features.
# Shapes: R requests, T new tokens, L aux layers, K block rows, H draft hidden.
# ----------------------------------------------------------------------------


class DraftSession:
    """The draft KV caches of one request, one per layer, `length` committed tokens long."""

    def __init__(self, config: Any, layers: int, slots: int, device: torch.device) -> None:
        self.layers = [DraftKV(config, slots, device) for _ in range(layers)]
        self.length = 0


class BlockDrafter(ModuleDrafter[DFlash]):
    """Serves DFlash or DSpark for one target."""

    def __init__(self, module: DFlash, target: Target, serving: Serving = WEIGHTS_ALONE) -> None:
        super().__init__(module, target, serving)
        config = module.config
        self.head = capped(self.head, config.output_multiplier, config.final_logit_softcapping)

    def new_session(self, capacity: int) -> DraftSession:
        """Empty draft KV caches for one request of at most `capacity` committed tokens."""
        config = self.config
        return DraftSession(config, config.num_hidden_layers, capacity + config.block_size, self.device)

    def extend(self, sessions: Sequence[DraftSession], tokens: Sequence[Sequence[int]], aux_TLD: Tensor | None) -> None:
        """Append the features of newly committed tokens (raw aux hidden states [T, L, H], session after session)."""
        assert aux_TLD is not None
        counts = [len(part) for part in tokens]
        starts = [session.length for session in sessions]
        positions = [torch.arange(s, s + n, device=self.device) for s, n in zip(starts, counts, strict=True)]
        for i, (k, v) in enumerate(self.module.context_keys_values(aux_TLD.float(), torch.cat(positions))):
            for session, keys, values in zip(sessions, k.split(counts), v.split(counts), strict=True):
                session.layers[i].write(session.length, keys, values)
        for session, count in zip(sessions, counts, strict=True):
            session.length += count

    def block_hidden(self, sessions: Sequence[DraftSession], anchors: Sequence[int]) -> Tensor:
        """One block pass: normed hidden states of the prediction rows, [R, gamma, H]. No cache grows."""
        K, lengths = self.config.block_size, [session.length for session in sessions]
        source = CachedKeys([session.layers for session in sessions], lengths, [K] * len(sessions))
        tokens_RK = self.module.block_tokens(torch.tensor(anchors, device=self.device))
        positions_RK = torch.tensor(lengths, device=self.device)[:, None] + torch.arange(K, device=self.device)
        return self.module.blocks(self.embed(tokens_RK), positions_RK, source)

    def propose(self, calls: Sequence[DraftCall], min_confidence: float = 0.0) -> list[Draft]:
        """Draft for every call, gamma tokens each at most, while c_k is at least `min_confidence`."""
        hidden_RKH = self.block_hidden([call.session for call in calls], [call.anchor for call in calls])
        return sample_chain(
            self.head, hidden_RKH[:, : longest_draft(calls, self.gamma)], calls, self.heads, min_confidence
        )


# ----------------------------------------------------------------------------
# DFlash and DSpark as methods: what a recipe says of a block drafter, its config, and where its weights begin.
#
# fc           <- picks the last aux layer;   hidden_norm <- the input norm that the copied keys were trained behind
# final norm   <- ones: the target's own makes untrained hidden states overconfident, and the first losses explode
# draft layers <- the target's last ones (drafters/layers.py)
# ----------------------------------------------------------------------------


class BlockSection(MethodSection):
    """What recipes may set for every block drafter."""

    automatic: ClassVar[frozenset[str]] = frozenset({"sample_from_anchor", "target_layer_ids", "mask_token"})

    num_hidden_layers: int = Field(2, ge=1)
    block_size: int = Field(7, ge=1)
    sample_from_anchor: bool | None = None  # null: the algorithm's own layout
    target_layer_ids: list[int] | None = None  # null: num_aux_layers evenly spaced
    num_aux_layers: int = Field(4, ge=1)
    mask_token: str | None = None  # null: a special token that no chat template uses
    sliding_window: int | None = Field(None, ge=1)
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = None  # null: all alike
    is_causal: bool | None = False  # whether block rows see those before them only; null: in sliding layers

    def comparable_fields(self, config: Any, target: Target) -> dict[str, tuple[object, object]]:
        pairs = super().comparable_fields(config, target)
        if "num_aux_layers" in pairs:
            pairs["num_aux_layers"] = (self.num_aux_layers, len(config.target_layer_ids))
        if "mask_token" in pairs:
            pairs["mask_token"] = (mask_token_id(target, self.mask_token), config.mask_token_id)
        if "layer_types" in pairs:
            pairs["layer_types"] = (tuple(self.layer_types or ()), config.layer_types)
        return pairs


class DFlashSection(BlockSection):
    algorithm: Literal["dflash"] = "dflash"


def default_aux_layers(num_target_layers: int, count: int) -> list[int]:
    """z-lab's choice: one aux layer in the middle, or `count` evenly spaced over [1, layers - 3], rounded."""
    if count == 1:
        return [num_target_layers // 2]
    first, last = 1, num_target_layers - 3
    return [round(first + i * (last - first) / (count - 1)) for i in range(count)]


def backbone_fields(section: BlockSection, target: Target) -> dict[str, Any]:
    """The fields of every block drafter's config."""
    aux_layers = section.target_layer_ids or default_aux_layers(target.num_layers, section.num_aux_layers)
    backbone = {
        **layer_shapes(target),
        "num_hidden_layers": section.num_hidden_layers,
        "draft_vocab_size": section.draft_vocab(target),
        "target_layer_ids": target.check_aux_layers(aux_layers),
        "mask_token_id": mask_token_id(target, section.mask_token),
        "block_size": section.block_size,
        "sliding_window": section.sliding_window,
        "layer_types": tuple(section.layer_types or ()),
        "is_causal": section.is_causal,
    }
    if section.sample_from_anchor is not None:
        backbone["sample_from_anchor"] = section.sample_from_anchor
    return backbone


def _dflash_config(section: DFlashSection, target: Target) -> DFlashConfig:
    config = DFlashConfig(**backbone_fields(section, target))
    check_layout(config)
    return config


def check_layout(config: DFlashConfig) -> None:
    """z-lab's dialects have one layout, anchor + masks.

    Raises:
        ValueError: the config has the other.
    """
    if config.sample_from_anchor:
        raise ValueError(
            "drafter.sample_from_anchor=true has no DFlash checkpoint dialect: leave it null, or use "
            "drafter.algorithm=dspark with drafter.markov_rank=0 and drafter.enable_confidence_head=false."
        )


@torch.no_grad()
def initialize_block(drafter: DFlash, target: Target, documents: Sequence[Sequence[int]]) -> None:
    """Copy weights in place. The drafter's layer shapes must be the target's (the recipe's default)."""
    source = copy_target_layers(drafter.layers, target, documents)
    hidden = drafter.config.hidden_size
    drafter.fc.weight.zero_()
    drafter.fc.weight[:, -hidden:].copy_(torch.eye(hidden))
    drafter.hidden_norm.weight.copy_(full_tensor(source[0].input_layernorm.weight))


DFLASH = Method("dflash", DFlashSection, _dflash_config, DFlashConfig, DFlash, BlockDrafter, initialize_block)
