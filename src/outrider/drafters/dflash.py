"""DFlash: block-diffusion drafting with context-KV injection.

    H_ctx = RMSNorm(W_c [H^(l1); ...; H^(lm)])          features of committed tokens, strictly before the anchor
    K, V  = [W^K H_ctx ; W^K H_block], [W^V H_ctx ; W^V H_block]      in every draft layer, bidirectional in the block
    block = [anchor, mask, ..., mask]  ->  one parallel pass  ->  one hidden state per draft position

Embedding and LM head are the target's, frozen, and live outside this module.
Layouts: with `sample_from_anchor` row k predicts the token *after* its position, so gamma rows give gamma drafts;
without it rows 1..gamma (the masks) predict the token *at* theirs, and row 0 only conditions.

Source: DFlash, arXiv 2602.06036; the two layouts as in DeepSpec checkpoints.
Shapes: N blocks, K rows a block, S context slots, L taps, T target hidden, H draft hidden, E head dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.drafters.attention import BlockLayout, Sight, flex_block_attention, split_attention
from outrider.drafters.kv import check_heads
from outrider.drafters.method import BlockInputs, DraftModule, DraftRows
from outrider.drafters.projections import Projections, Rope
from outrider.target.lean import signed_sin

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
    def sights(self) -> tuple[Sight, ...]:
        """What block rows see, layer by layer."""
        kinds = self.layer_types or (FULL if self.sliding_window is None else SLIDING,) * self.num_hidden_layers
        sliding = [kind == SLIDING for kind in kinds]
        return tuple(
            Sight(self.sliding_window if window else None, window if self.is_causal is None else self.is_causal)
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
        self.sight = config.sights[index]

    def forward(
        self, x_NKH: Tensor, context_SH: Tensor, layout: BlockLayout, rope_block: Rope, rope_context: Rope
    ) -> Tensor:
        q = self.queries(x_NKH, rope_block)
        block_k, block_v = self.keys_values(x_NKH, rope_block)
        context_k, context_v = self.keys_values(context_SH, rope_context)
        attend: Callable[..., Tensor] = flex_block_attention if q.device.type == "cuda" else split_attention
        out = attend(q, context_k, context_v, block_k, block_v, layout, self.sight)
        return self.o_proj(out.flatten(-2))


class SwiGLU(nn.Module):
    """The MLP of every draft layer; `config` has hidden_size and intermediate_size."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


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


def rope_table(positions: Tensor, head_dim: int, theta: float) -> Rope:
    """cos and signed sin for absolute positions: [..., 1, head_dim], the 1 standing for heads."""
    inverse = theta ** (-torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim)
    angles = positions[..., None].float() * inverse
    angles = torch.cat((angles, angles), dim=-1)[..., None, :]
    return angles.cos(), signed_sin(angles.sin())


class DFlash(DraftModule):
    """The backbone all block drafters share. Parameter names are those of the z-lab dialect."""

    algorithm: ClassVar[str] = "dflash"
    tap_weight: str | None = "fc.weight"
    layer: ClassVar[type[DraftLayer]] = DraftLayer
    config: DFlashConfig

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config)
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(self.layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def context(self, taps_SLT: Tensor) -> Tensor:
        """Features of committed tokens [S, L, T] -> H_ctx [S, H]."""
        features_SH = self.fc((taps_SLT / self.tap_scale_L[:, None]).flatten(-2))
        return self.hidden_norm(features_SH.to(self.hidden_norm.weight.dtype))

    def forward(self, taps_SLT: Tensor, embedded_NKH: Tensor, layout: BlockLayout) -> Tensor:
        """The backbone in training: normed hidden states of the prediction rows, [N, gamma, H].

        Args:
            taps_SLT: raw taps of the context slots of all sequences, concatenated.
            embedded_NKH: embeddings of [anchor, mask, ...] per block (see `block_tokens`).
            layout: where the blocks stand; decides positions and the mask.
        """
        E, theta = self.config.head_dim, self.config.rope_theta
        context_SH = self.context(taps_SLT)
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
        return DraftRows(self(inputs.taps_SLD, embedded_NKH, inputs.layout))
