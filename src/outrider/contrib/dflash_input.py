"""DFlash whose context enters as rows of the draft layers instead of as injected keys: the ablations of its paper.

    x_i   = W [e(x_i); RMSNorm(W_c [H_i^(l1); ...])]     with target features: features as input
    x_i   = e(x_i)                                       without: a block diffusion model of its own
    layer:  rows of the context see earlier rows of their sequence; rows of a block see the context's keys and values
            of the same layer, strictly before the anchor, and their own block

Committed tokens thus pass through all draft layers, which DFlash spares: it projects features to keys and values.
Block, loss and sampling are DFlash's.

Source: DFlash, arXiv 2602.06036, the comparisons of KV injection with features as input and of drafters with and
without target features. W reads embedding and feature as EAGLE-3 does; the paper's own fusion may differ. No engine
reads such drafters: they are saved in our own dialect and served here.
Shapes: N blocks, K rows a block, S context slots, T new tokens, L aux layers, H draft hidden, Q heads, G kv heads,
E head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from outrider.checkpoints.registry import Method
from outrider.drafters.base import BlockInputs, Drafter, DraftRows
from outrider.drafters.cache import CachedKeys, DraftSession, serving_mask
from outrider.drafters.dflash import BlockDrafter, DFlash, DFlashConfig
from outrider.drafters.layers import EVERYTHING, Attention, AttentionPattern, BlockLayout, block_attention
from outrider.drafters.rope import rope_table
from outrider.drafters.target_weights import copy_target_layers
from outrider.target.model import Target, full_tensor


@dataclass(frozen=True, kw_only=True)
class DFlashInputConfig(DFlashConfig):
    """DFlash's fields, and whether context rows have the target's features beside their tokens."""

    algorithm: ClassVar[str] = "dflash_input"

    target_features: Annotated[
        bool, Field(description="Whether context rows read the target's features; false: their tokens alone.")
    ] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if set(self.attention_patterns) != {EVERYTHING}:
            raise ValueError(
                "sliding_window, layer_types and is_causal have no place here: rows of a block see all of the context "
                "and their whole block."
            )


class ContextRows:
    """The key source of context rows in training: each sees the earlier ones of its sequence and itself.

    Attributes:
        keys_values: of the context, [S, G, E] each, layer by layer.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)
        self.keys_values: list[tuple[Tensor, Tensor]] = []

    def attend(self, attention: Attention, q_SQE: Tensor, k_SGE: Tensor, v_SGE: Tensor) -> Tensor:
        self.keys_values.append((k_SGE, v_SGE))
        parts = zip(*(x.transpose(0, 1).split(self.lengths, dim=1) for x in (q_SQE, k_SGE, v_SGE)), strict=True)
        attended = [
            F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
            for q, k, v in parts
        ]
        return torch.cat(attended, dim=1).transpose(0, 1)


class RowsOfBlocks(NamedTuple):
    """The key source of blocks in training: the context's keys and values of each layer, and the block's own."""

    keys_values: Sequence[tuple[Tensor, Tensor]]
    layout: BlockLayout

    def attend(self, attention: Attention, q_NKQE: Tensor, k_NKGE: Tensor, v_NKGE: Tensor) -> Tensor:
        return block_attention(q_NKQE, *self.keys_values[attention.layer], k_NKGE, v_NKGE, self.layout)


class DFlashInput(DFlash):
    """The backbone with context rows. Fresh draft layers are the target's last ones; W begins as e + feature."""

    config: DFlashInputConfig

    def __init__(self, config: DFlashInputConfig) -> None:
        super().__init__(config)
        H = config.hidden_size
        if config.target_features:
            self.context_in = nn.Linear(2 * H, H, bias=False)
            self.groups = (("fc",), ("context_in",))
        else:
            del self.fc, self.hidden_norm
            self.aux_weight, self.groups = None, ()

    def context_rows(self, embedded_SH: Tensor, aux_SLT: Tensor) -> Tensor:
        """What enters the layers for committed tokens, [S, H]."""
        if not self.config.target_features:
            return embedded_SH
        (rows_SH,) = self.outputs(torch.cat((embedded_SH, self.context(aux_SLT)), dim=-1), "context_in")
        return rows_SH

    def rows(self, inputs: BlockInputs) -> DraftRows:
        config, layout = self.config, inputs.layout
        rope = rope_table(layout.positions_S(), config)
        x_SH, source = self.context_rows(inputs.embed(inputs.tokens_S), inputs.aux_SLD), ContextRows(layout.lengths)
        for layer in self.layers:
            x_SH = layer(x_SH, rope, source)
        embedded_NKH = inputs.embed(self.block_tokens(inputs.previous_NK[:, 0]))
        positions_NK = layout.block_positions_NK(config.block_size)
        block_rope = rope_table(positions_NK, config)
        return DraftRows(self.blocks(embedded_NKH, block_rope, RowsOfBlocks(source.keys_values, layout)))

    @torch.no_grad()
    def initialize_from(self, target: Target, documents: Sequence[Sequence[int]]) -> None:
        source = copy_target_layers(self.layers, target, documents)
        if self.config.target_features:
            self.pick_last_aux_layer(full_tensor(source[0].input_layernorm.weight))
            H = self.config.hidden_size
            self.context_in.weight.copy_(torch.eye(H).repeat(1, 2))

    def separable_layers(self) -> list[nn.Module]:
        return []  # each runs for the context, then for the blocks

    @staticmethod
    def drafter() -> type[Drafter]:
        return DFlashInputDrafter


class DFlashInputDrafter(BlockDrafter):
    """Serves one such drafter: committed tokens pass through the layers, and their keys and values stay."""

    pools = False  # context rows attend as well, prompts of any length among them
    module: DFlashInput

    def extend(self, sessions: Sequence[DraftSession], tokens: Sequence[Sequence[int]], aux_TLD: Tensor | None) -> None:
        assert aux_TLD is not None
        starts, counts = [session.length for session in sessions], [len(part) for part in tokens]
        rope = self.rope([i for s, n in zip(starts, counts, strict=True) for i in range(s, s + n)])
        earlier = AttentionPattern(causal=True)
        visible = [serving_mask(earlier, s, n, device=self.device) for s, n in zip(starts, counts, strict=True)]
        source = CachedKeys(sessions, starts, counts, visible=visible)
        x_TH = self.module.context_rows(self.embed([token for part in tokens for token in part]), aux_TLD.float())
        for layer in self.module.layers:
            x_TH = layer(x_TH, rope, source)
        for session, count in zip(sessions, counts, strict=True):
            session.length += count


METHOD = Method(DFlashInputConfig, DFlashInput)
