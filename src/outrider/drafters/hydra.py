"""Hydra: Medusa's heads made sequentially dependent; head k reads the tokens drafted before it.

    z_k = [norm f; norm e(x_0); norm e(x_1); ..; norm e(x_{k-1})]          x_0 the anchor, e the target's embedding
    h_k = f + SiLU(W_k z_k + b_k)  (and further layers),    p_k = softmax(LM head h_k)      k = 1 .. K

f is the target's last hidden state at the token before the anchor (drafters/medusa.py); norm divides by the RMS and has
no weights, because hidden states and embeddings differ in size by orders of magnitude, and by target. Head k has k + 1
blocks of H inputs, so parameters grow with K squared.

Training: ce CE + l1 ||p_d - p_t||_1 at every draft position, a weighted mean (`DraftRows.loss`, drafters/base.py).

Source: Hydra, arXiv 2402.05109. Departures: the target's frozen LM head instead of one per head, as in Medusa here; the
skip around the first layer is f itself, where the release passes the whole concatenation through another matrix.
The prefix attention of Hydra++ is left out: EAGLE is that idea (a layer over all earlier features) at more length.
Shapes: R requests, N anchors, P paths, K heads, k tokens known, H hidden, Vd draft vocab.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.drafters.base import (
    BlockInputs,
    DraftCall,
    Drafter,
    DraftRows,
    Level,
    longest_draft,
)
from outrider.drafters.chain import sample_steps
from outrider.drafters.draft import Draft
from outrider.drafters.medusa import HeadsDrafter, HeadsModule, MedusaConfig

_EPS = 1e-6


class HydraConfig(MedusaConfig):
    """As many heads, layers and tokens as Medusa's config says; other inputs."""

    algorithm: ClassVar[str] = "hydra"


def head_inputs(hidden_NH: Tensor, embedded_NkH: Tensor) -> Tensor:
    """z of head k from a feature and the embeddings of x_0 .. x_{k-1}: [N, (k + 1) H]."""
    parts_NkH = torch.cat((hidden_NH[:, None], embedded_NkH), dim=1)
    return F.rms_norm(parts_NkH, parts_NkH.shape[-1:], eps=_EPS).flatten(1)


class Hydra(HeadsModule):
    """The trainable heads."""

    def __init__(self, config: HydraConfig) -> None:
        super().__init__(config, [(k + 1) * config.hidden_size for k in range(1, config.num_heads + 1)])

    def rows(self, inputs: BlockInputs) -> DraftRows:
        hidden_NH = inputs.layout.before_anchors(inputs.aux_SLD[:, -1])
        z_NZ = head_inputs(hidden_NH, inputs.embed(inputs.previous_NK))  # every head's z is a prefix of the last one's
        H = self.config.hidden_size
        heads = [head(hidden_NH, z_NZ[:, : (k + 2) * H]) for k, head in enumerate(self.blocks)]
        return DraftRows(torch.stack(heads, dim=1))

    @staticmethod
    def drafter() -> type[Drafter]:
        return HydraDrafter


class HydraDrafter(HeadsDrafter[Hydra]):
    """Serves Hydra: one head after the other, the tokens drawn so far in hand."""

    def hidden(self, k: int, newest_NH: Tensor, tokens_Nk: Tensor) -> Tensor:
        """h [N, H] of the head that follows the anchor and k drafts, `tokens_Nk` [N, k + 1]."""
        return self.module.blocks[k](newest_NH, head_inputs(newest_NH, self.embed(tokens_Nk)))

    def propose(self, calls: Sequence[DraftCall], min_confidence: float = 0.0) -> list[Draft]:
        newest_RH = self.newest(calls)
        columns: list[list[int]] = []  # x_0, x_1, .. of all requests

        def step(k: int, previous: list[int]) -> Tensor:
            columns.append(previous)
            return self.hidden(k, newest_RH, torch.tensor(columns, device=self.device).T)

        return sample_steps(
            self.head,
            step,
            longest_draft(calls, self.gamma),
            calls=calls,
            heads=self.heads,
            min_confidence=min_confidence,
        )

    def levels(self, calls: Sequence[DraftCall], depth: int) -> Level:
        """One row per request and path."""
        newest_RH = self.newest(calls)

        def level(k: int, paths_RPk: Tensor) -> Tensor:
            R, P, _ = paths_RPk.shape
            hidden_NH = self.hidden(k, newest_RH.repeat_interleave(P, dim=0), paths_RPk.flatten(0, 1))
            return self.head(hidden_NH).view(R, P, -1)

        return level
