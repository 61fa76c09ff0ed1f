"""DFlash 2: DFlash with a convolution over each block and a selector among candidates.

    layer      x += conv(attention(conv(norm x)));  x += conv(mlp(conv(norm x)))        drafters/dflash2/conv.py
    drafting   top-c tokens of every position, then one walk through them               drafters/dflash2/selector.py

Attention, context features and the layout (anchor + masks) are DFlash's.

Training. The parallel logits U get DFlash's own objective, which is what brings the true token among the candidates;
the selector's distribution gets the same objective over the candidates it will have when served, given the true
previous token. Where the true token is not among them it has no cross-entropy there, as a token outside a reduced draft
vocabulary has none, and the distance counts the target's mass outside. (speculators and TorchSpec put the true token in
by force; what such a set accepts is not what is served.)

Source: z-lab's DFlash 2 (package `dflash` 0.1.0).
Shapes: N blocks, K rows a block, S context slots, H draft hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from outrider.drafters.dflash import DFlash, DFlashConfig, DraftLayer
from outrider.drafters.dflash2.conv import GroupedDynamicConv
from outrider.drafters.dflash2.selector import CandidateSelector
from outrider.drafters.method import BlockInputs, DraftRows


@dataclass(frozen=True)
class DFlash2Config(DFlashConfig):
    """DFlash's fields and those of the convolution and the selector; the defaults are those of z-lab's releases."""

    block_size: int = 8
    conv_kernel_size: int = 2
    conv_group_size: int = 16
    selector_rank: int = 256
    selector_top_k: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.conv_kernel_size <= self.block_size:
            raise ValueError(
                f"conv_kernel_size {self.conv_kernel_size} must be between 1 and block_size {self.block_size}: nothing "
                "precedes a block."
            )
        if self.conv_group_size < 1 or self.hidden_size % self.conv_group_size:
            raise ValueError(f"conv_group_size {self.conv_group_size} must divide hidden_size {self.hidden_size}.")
        if self.selector_rank < 1:
            raise ValueError(f"selector_rank {self.selector_rank} must be at least 1.")
        if not 1 <= self.selector_top_k <= self.draft_vocab_size:
            raise ValueError(
                f"selector_top_k {self.selector_top_k} must be between 1 and draft_vocab_size {self.draft_vocab_size}."
            )


class ConvolvedLayer(DraftLayer):
    def __init__(self, config: Any, index: int) -> None:
        super().__init__(config, index)
        sizes = config.hidden_size, config.conv_kernel_size, config.conv_group_size
        self.attention_conv = GroupedDynamicConv(*sizes)
        self.mlp_conv = GroupedDynamicConv(*sizes)

    def forward(self, x_NKH: Tensor, context_SH: Tensor, *where: Any) -> Tensor:
        x_NKH = x_NKH + convolved(
            self.attention_conv, self.input_layernorm(x_NKH), lambda y: self.self_attn(y, context_SH, *where)
        )
        return x_NKH + convolved(self.mlp_conv, self.post_attention_layernorm(x_NKH), self.mlp)


def convolved(conv: GroupedDynamicConv, x_NKH: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
    """conv_1(sublayer(conv_0(x)))."""
    y_NKH, dynamic_NKOG = conv.before(x_NKH)
    return conv.behind(sublayer(y_NKH), dynamic_NKOG)


class DFlash2(DFlash):
    """The convolved backbone with its selector."""

    algorithm: ClassVar[str] = "dflash2"
    layer: ClassVar[type[DraftLayer]] = ConvolvedLayer
    config: DFlash2Config

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__(config)
        self.candidate_selector = CandidateSelector(
            config.vocab_size, config.draft_vocab_size, config.hidden_size, config.selector_rank
        )

    def rows(self, inputs: BlockInputs) -> DraftRows:
        rows, selector = super().rows(inputs), self.candidate_selector
        return replace(
            rows,
            latent_NKr=selector.latent(inputs.previous_NK, rows.hidden_NKH),
            w2_Vr=selector.successor_codebook,
            candidates=self.config.selector_top_k,
        )
