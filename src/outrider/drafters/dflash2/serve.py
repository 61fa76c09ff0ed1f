"""DFlash 2 ready to serve: the packed block drafter with convolved layers, and a walk through candidates.

    block_hidden   as in drafters/packed.py; each sublayer between the two sides of its convolution
    propose        one head product for the block, its c likeliest tokens a position, then gamma small steps

Shapes: N = R * K rows, R requests, K block rows, H draft hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from torch import Tensor

from outrider.drafters.base import DraftCall, Proposal, longest_draft
from outrider.drafters.chain import sample_rows
from outrider.drafters.dflash import DFlashConfig, DraftLayer
from outrider.drafters.dflash2.conv import GroupedDynamicConv
from outrider.drafters.dflash2.module import ConvolvedLayer, DFlash2, DFlash2Config, convolved
from outrider.drafters.dflash2.selector import CandidateRows
from outrider.drafters.packed import PackedDrafter, PackedLayer


class PackedConvolvedLayer(PackedLayer):
    def __init__(self, layer: DraftLayer, config: DFlashConfig) -> None:
        super().__init__(layer, config)
        assert isinstance(layer, ConvolvedLayer)
        self.attention_conv, self.mlp_conv = layer.attention_conv, layer.mlp_conv
        self.rows = config.block_size

    def __call__(self, x_NH: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        x_NH = x_NH + self._convolved(
            self.attention_conv, self.normed(x_NH, self.input_norm), lambda y_NH: self.o(attend(self.qkv(y_NH)))
        )
        return x_NH + self._convolved(self.mlp_conv, self.normed(x_NH, self.post_norm), self.mlp)

    def _convolved(self, conv: GroupedDynamicConv, x_NH: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        blocks_RKH = x_NH.unflatten(0, (-1, self.rows))
        return convolved(conv, blocks_RKH, lambda y: sublayer(y.flatten(0, 1)).view_as(blocks_RKH)).flatten(0, 1)


class DFlash2Drafter(PackedDrafter):
    """Serves one DFlash 2 drafter for one target."""

    layer: ClassVar[type[PackedLayer]] = PackedConvolvedLayer
    config: DFlash2Config
    drafter: DFlash2

    def propose(self, calls: Sequence[DraftCall], floor: float = 0.0) -> list[Proposal]:
        """Draft for every call, gamma tokens each at most, while c_k is at least `floor`."""
        hidden_RKH = self.block_hidden([call.session for call in calls], [call.anchor for call in calls])
        longest = longest_draft(calls, self.gamma)
        rows = CandidateRows(
            self.head,
            hidden_RKH[:, :longest],
            self.drafter.candidate_selector,
            self.config.selector_top_k,
            self.heads.draft_ids_Vd,
        )
        return sample_rows(rows, longest, calls, self.heads, floor)
