"""Medusa: K heads that read the same hidden state, and nothing of each other.

    h_k = f + SiLU(W_k f + b_k)  (and further layers),    p_k = softmax(LM head h_k)      k = 1 .. K

f is the target's last hidden state at the token before the anchor (drafters/heads.py). Because no head sees what the
others drew, all K run at once, and candidates form a tree without another pass (drafters/candidates.py).

Source: Medusa, arXiv 2401.10774, section 2.1. Departure: the release trains a vocabulary matrix per head (V x H each);
here all heads share the target's frozen one, as every drafter of this package does, and `num_layers` makes up for it.
Checkpoints of the release are served with their own matrices.
Shapes: R requests, N anchors, K heads, H hidden, Vd draft vocab.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from outrider.drafters.base import DraftCall, Proposal, longest_draft
from outrider.drafters.candidates import Level
from outrider.drafters.chain import sample_chain, sample_steps
from outrider.drafters.heads import (
    HeadsConfig,
    HeadsModule,
    HeadsSection,
    ServedHeads,
    configure_heads,
    residual_layers,
)
from outrider.drafters.method import BlockInputs, DraftRows, Method, Serving
from outrider.drafters.static_tree import static_tree
from outrider.target import Target


class MedusaSection(HeadsSection):
    """`drafter.algorithm: medusa`."""

    algorithm: Literal["medusa"] = "medusa"


class Medusa(HeadsModule):
    """The trainable heads."""

    algorithm: ClassVar[str] = "medusa"

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__(config, [config.hidden_size] * config.num_heads)

    def rows(self, inputs: BlockInputs) -> DraftRows:
        hidden_NH = inputs.layout.before_anchors(inputs.taps_SLD[:, -1])
        return DraftRows(torch.stack([head(hidden_NH, hidden_NH) for head in self.blocks], dim=1))


class MedusaDrafter(ServedHeads):
    """Medusa, ready to serve. `own_heads`: an LM head for each draft head, in checkpoints of the release; else none."""

    def __init__(self, module: Medusa, target: Target, serving: Serving) -> None:
        super().__init__(module, target, serving)
        several = serving.head_VdH is not None and serving.head_VdH.dim() == 3
        self.own_heads = [serving.head(target, k) for k in range(self.gamma)] if several else []

    def hidden(self, calls: Sequence[DraftCall], heads: int) -> Tensor:
        """Hidden states of the first heads, [R, heads, H]."""
        newest_RH = self.newest(calls)
        return torch.stack([residual_layers(layers, newest_RH, newest_RH) for layers in self.layers[:heads]], dim=1)

    def propose(self, calls: Sequence[DraftCall], floor: float = 0.0) -> list[Proposal]:
        hidden_RKH = self.hidden(calls, longest_draft(calls, self.gamma))
        if not self.own_heads:
            return sample_chain(self.head, hidden_RKH, calls, self.heads, floor)
        position = 0

        def step(k: int, previous: list[int]) -> Tensor:
            nonlocal position
            position = k
            return hidden_RKH[:, k]

        def logits(hidden_AH: Tensor) -> Tensor:
            return self.own_heads[position](hidden_AH)

        return sample_steps(logits, step, hidden_RKH.shape[1], calls, self.heads, floor)

    def levels(self, calls: Sequence[DraftCall], depth: int) -> Level:
        """Heads do not see tokens: one row per request and depth, whatever the paths."""
        hidden_RKH = self.hidden(calls, depth)
        if self.own_heads:
            logits_RKVd = torch.stack([self.own_heads[k](hidden_RKH[:, k]) for k in range(depth)], dim=1)
        else:
            logits_RKVd = self.head(hidden_RKH.flatten(0, 1)).view(*hidden_RKH.shape[:2], -1)
        return lambda k, paths_RPk: logits_RKVd[:, k : k + 1]


MEDUSA = Method("medusa", MedusaSection, configure_heads, HeadsConfig, Medusa, MedusaDrafter, branch=static_tree)
