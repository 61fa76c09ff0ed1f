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

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
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
    Serving,
    capped,
    check_fits,
    longest_draft,
    mask_token_id,
)
from outrider.drafters.chain import sample_chain
from outrider.drafters.draft import Draft
from outrider.drafters.layers import (
    AttentionPattern,
    BlockLayout,
    DraftKV,
    Projections,
    Rope,
    SwiGLU,
    check_heads,
    copy_target_layers,
    flex_block_attention,
    layer_shapes,
    rope_table,
    serving_mask,
    split_attention,
)
from outrider.target.lean import rotate
from outrider.target.linear import PackedLinear
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


class BlockAttention(Projections):
    """Grouped-query attention of block rows over context features and their own block, with QK-norm and RoPE."""

    def __init__(self, config: DFlashConfig, index: int) -> None:
        super().__init__(config, config.hidden_size, qk_norm=True)
        self.pattern = config.attention_patterns[index]

    def forward(
        self, x_NKH: Tensor, context_SH: Tensor, layout: BlockLayout, rope_block: Rope, rope_context: Rope
    ) -> Tensor:
        q = self.queries(x_NKH, rope_block)
        block_k, block_v = self.keys_values(x_NKH, rope_block)
        context_k, context_v = self.keys_values(context_SH, rope_context)
        attend: Callable[..., Tensor] = flex_block_attention if q.device.type == "cuda" else split_attention
        out = attend(q, context_k, context_v, block_k, block_v, layout, self.pattern)
        return self.o_proj(out.flatten(-2))


class DraftLayer(nn.Module):
    def __init__(self, config: DFlashConfig, index: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = BlockAttention(config, index)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = SwiGLU(config)

    def forward(
        self, x_NKH: Tensor, context_SH: Tensor, layout: BlockLayout, rope_block: Rope, rope_context: Rope
    ) -> Tensor:
        x_NKH = x_NKH + self.self_attn(self.input_layernorm(x_NKH), context_SH, layout, rope_block, rope_context)
        return x_NKH + self.mlp(self.post_attention_layernorm(x_NKH))


class DFlash(DraftModule):
    """The backbone all block drafters share. Parameter names are those of the z-lab dialect."""

    algorithm: ClassVar[str] = "dflash"
    aux_weight: str | None = "fc.weight"
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
        E, theta = self.config.head_dim, self.config.rope_theta
        context_SH = self.context(aux_SLT)
        rope_context = rope_table(layout.positions_S(), E, theta)
        rope_block = rope_table(layout.block_positions_NK(embedded_NKH.shape[1]), E, theta)
        x_NKH = embedded_NKH
        for layer in self.layers:
            x_NKH = layer(x_NKH, context_SH, layout, rope_block, rope_context)
        return self.norm(x_NKH[:, -self.config.gamma :])

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
# A block drafter ready to serve: packed weights, a draft KV cache of committed features, one block per call.
#
#     extend    W_c, norm, then K and V of *all* layers in one matrix product -> appended to each session's cache
#     propose   one block of K rows per request over [context KV ; block KV] -> sequential walk -> Drafts
#
# Requests share every matrix product; only attention goes one by one. Block keys and values are written behind the
# context and forgotten: a session's length moves only with committed features.
# Shapes: R requests, N = R * K rows, T new tokens, L aux layers, K block rows, G kv heads, Q heads, E head dim, S
# slots.
# ----------------------------------------------------------------------------


class PackedLayer:
    """One draft layer over rows [N, H]; `attend` turns their fused queries, keys and values into [N, Q * E].

    Takes a `DraftLayer`, or a module whose parts have the same names.
    """

    def __init__(self, layer: Any, config: Any) -> None:
        self.eps = config.rms_norm_eps
        attn: Projections = layer.self_attn
        mlp: SwiGLU = layer.mlp
        self.input_norm = layer.input_layernorm.weight.detach()
        self.qkv = PackedLinear.fused(attn.q_proj, attn.k_proj, attn.v_proj)
        self.q_norm = attn.q_norm.weight.detach() if attn.qk_norm else None
        self.k_norm = attn.k_norm.weight.detach() if attn.qk_norm else None
        self.o = PackedLinear.fused(attn.o_proj)
        self.post_norm = layer.post_attention_layernorm.weight.detach()
        self.gate_up = PackedLinear.fused(mlp.gate_proj, mlp.up_proj)
        self.down = PackedLinear.fused(mlp.down_proj)

    def normed(self, x_NH: Tensor, weight_H: Tensor) -> Tensor:
        return F.rms_norm(x_NH, x_NH.shape[-1:], weight_H, self.eps)

    def mlp(self, x_NH: Tensor) -> Tensor:
        gate, up = self.gate_up(x_NH).chunk(2, dim=-1)
        return self.down(F.silu(gate).mul_(up))

    def __call__(self, x_NH: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        x_NH = x_NH + self.o(attend(self.qkv(self.normed(x_NH, self.input_norm))))
        return x_NH + self.mlp(self.normed(x_NH, self.post_norm))


class PackedDrafter:
    """Serves one drafter for one target. Weights are copied; train the module, then build this again."""

    layer: ClassVar[type[PackedLayer]] = PackedLayer

    def __init__(self, drafter: DFlash, target: Target, serving: Serving = WEIGHTS_ALONE) -> None:
        config = drafter.config
        check_fits(config, target)
        serving.check(config)
        # A copy on the target's device and in float32: heads and distributions need it, and drafters are small.
        drafter = copy.deepcopy(drafter).to(target.device, torch.float32)
        self.config, self.drafter = config, drafter
        self.aux_layers, self.gamma, self.attention_patterns = (
            tuple(config.target_layer_ids),
            config.gamma,
            config.attention_patterns,
        )
        self.embed_VH, self.embed_scale = serving.embedding(target), target.embed_scale
        self.head = capped(serving.head(target), config.output_multiplier, config.final_logit_softcapping)
        folded = drafter.folded_state_dict()
        self.fc = PackedLinear(folded["fc.weight"])
        self.hidden_norm, self.norm = folded["hidden_norm.weight"], folded["norm.weight"]
        layers = [layer for layer in drafter.layers if isinstance(layer, DraftLayer)]
        self.layers = [self.layer(layer, config) for layer in layers]
        self.context_kv = PackedLinear.fused(
            *[proj for layer in layers for proj in (layer.self_attn.k_proj, layer.self_attn.v_proj)]
        )
        # As far as the *target* reads, whatever the drafter's own config says.
        positions = torch.arange(target.max_context + config.block_size, device=target.device)
        self.rope = rope_table(positions, config.head_dim, config.rope_theta)
        masks = [config.mask_token_id] * (config.block_size - 1)
        self.masks_M = torch.tensor(masks, dtype=torch.long, device=target.device)
        sequential = getattr(drafter, "markov_head", None)
        confidence = getattr(drafter, "confidence_head", None)
        self.heads = serving.chain_heads(target, sequential, confidence)

    def new_session(self, capacity: int) -> DraftSession:
        """An empty draft KV cache for one request of at most `capacity` committed tokens."""
        return DraftSession(self, capacity)

    def features(self, aux_TLD: Tensor, positions_T: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Context keys and values [T, G, E] per layer for committed tokens at these positions."""
        T, G, E, eps = len(aux_TLD), self.config.num_key_value_heads, self.config.head_dim, self.config.rms_norm_eps
        context_TH = F.rms_norm(
            self.fc(aux_TLD.reshape(T, -1).float()), (self.config.hidden_size,), self.hidden_norm, eps
        )
        kv = self.context_kv(context_TH).view(T, len(self.layers), 2, G, E)
        cos, sin = (table[positions_T] for table in self.rope)
        return [
            (rotate(F.rms_norm(kv[:, i, 0], (E,), layer.k_norm, eps), cos, sin), kv[:, i, 1])
            for i, layer in enumerate(self.layers)
        ]

    def extend(self, sessions: Sequence[DraftSession], tokens: Sequence[Sequence[int]], aux_TLD: Tensor | None) -> None:
        """Append the features of newly committed tokens (raw aux hidden states [T, L, target hidden], session after
        session).
        """
        assert aux_TLD is not None
        counts = [len(part) for part in tokens]
        positions = [
            torch.arange(s.length, s.length + n, device=aux_TLD.device) for s, n in zip(sessions, counts, strict=True)
        ]
        for i, (k, v) in enumerate(self.features(aux_TLD, torch.cat(positions))):
            for session, keys, values in zip(sessions, k.split(counts), v.split(counts), strict=True):
                session.layers[i].write(session.length, keys, values)
        for session, count in zip(sessions, counts, strict=True):
            session.length += count

    def block_hidden(self, sessions: Sequence[DraftSession], anchors: Sequence[int]) -> Tensor:
        """One block pass: normed hidden states of the prediction rows, [R, gamma, H]. No cache grows."""
        config, R = self.config, len(sessions)
        K, G, E, eps = config.block_size, config.num_key_value_heads, config.head_dim, config.rms_norm_eps
        heads, device = config.num_attention_heads, self.embed_VH.device
        anchors_R1 = torch.tensor(anchors, device=device)[:, None]
        x = F.embedding(torch.cat((anchors_R1, self.masks_M.expand(R, -1)), dim=1).flatten(), self.embed_VH).float()
        if self.embed_scale != 1.0:
            x = x * self.embed_scale
        starts_R = torch.tensor([session.length for session in sessions], device=device)
        positions_N = (starts_R[:, None] + torch.arange(K, device=device)).flatten()
        cos, sin = (table[positions_N] for table in self.rope)
        seen = [session.visible() for session in sessions]

        def attend(i: int, qkv: Tensor) -> Tensor:
            q, k, v = qkv.view(R * K, -1, E).split((heads, G, G), dim=1)
            q = rotate(F.rms_norm(q, (E,), self.layers[i].q_norm, eps), cos, sin)
            k = rotate(F.rms_norm(k, (E,), self.layers[i].k_norm, eps), cos, sin)
            rows = zip(q.split(K), k.split(K), v.split(K), strict=True)
            parts = zip(sessions, seen, rows, strict=True)
            return torch.cat(
                [session.attend(i, *own, visible[self.attention_patterns[i]]) for session, visible, own in parts]
            )

        for i, layer in enumerate(self.layers):
            x = layer(x, partial(attend, i))
        return F.rms_norm(x.view(R, K, -1)[:, -config.gamma :], x.shape[-1:], self.norm, eps)

    def propose(self, calls: Sequence[DraftCall], min_confidence: float = 0.0) -> list[Draft]:
        """Draft for every call, gamma tokens each at most, while c_k is at least `min_confidence`."""
        hidden_RKH = self.block_hidden([call.session for call in calls], [call.anchor for call in calls])
        return sample_chain(
            self.head, hidden_RKH[:, : longest_draft(calls, self.gamma)], calls, self.heads, min_confidence
        )


class DraftSession:
    """The draft KV cache of one request: `length` committed features, then room for one block."""

    def __init__(self, packed: PackedDrafter, capacity: int) -> None:
        config = packed.config
        self.block, self.attention_patterns = config.block_size, set(packed.attention_patterns)
        self.layers = [DraftKV(config, capacity + config.block_size, packed.hidden_norm) for _ in packed.layers]
        self.length = 0

    def visible(self) -> dict[AttentionPattern, Tensor | None]:
        """What the rows of a block see, [K, S], for every kind of layer; None: everything."""
        device = self.layers[0].keys_GSE.device
        return {pattern: serving_mask(pattern, self.length, self.block, device) for pattern in self.attention_patterns}

    def attend(self, layer: int, q_KQE: Tensor, k_KGE: Tensor, v_KGE: Tensor, visible_KS: Tensor | None) -> Tensor:
        """A block over the context and itself, [K, Q * E]."""
        self.layers[layer].write(self.length, k_KGE, v_KGE)
        return self.layers[layer].attend(q_KQE, self.length + self.block, visible_KS)


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


DFLASH = Method("dflash", DFlashSection, _dflash_config, DFlashConfig, DFlash, PackedDrafter, initialize_block)
