"""Bigram: an MLP on the target's last hidden state and the anchor's embedding, and a bigram table on top.

    h_1 .. h_K = norm(W_out silu(W_in [f; e(x_0)]) + e(x_0))        f: the state before the anchor x_0
    p_k        = softmax(head h_k + W2 W1[x_{k-1}])

Shapes: N anchors, R requests, K = gamma draft tokens, H hidden.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.checkpoints.dialects.own import Own
from outrider.checkpoints.registry import Export, Method
from outrider.drafters.base import (
    BlockInputs,
    DraftCalibration,
    DraftCall,
    Drafter,
    DrafterWeights,
    DraftModule,
    DraftRows,
    check_fits,
)
from outrider.drafters.chain import sample_chain
from outrider.drafters.config import Count, DrafterConfig, DraftVocabulary, NotInRecipe, draft_vocabulary
from outrider.drafters.draft import Draft
from outrider.drafters.heads import VanillaMarkov
from outrider.target.model import DecodingTarget, Target


@dataclass(frozen=True, kw_only=True)
class BigramConfig(DrafterConfig):
    """Config and recipe section: `gamma` draft tokens, a table of rank `rank`."""

    algorithm: ClassVar[str] = "bigram"

    hidden_size: NotInRecipe[int]
    vocab_size: NotInRecipe[int]
    draft_vocab_size: DraftVocabulary
    target_layer_ids: NotInRecipe[tuple[int, ...]]
    num_target_layers: NotInRecipe[int]
    gamma: Count = 3
    rank: Count = 8

    @classmethod
    def from_target(cls, target: Target, *, draft_vocab_size: int | None = None, **chosen: Any) -> BigramConfig:
        return cls(
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            draft_vocab_size=draft_vocabulary(target, draft_vocab_size),
            target_layer_ids=(target.num_layers - 1,),
            num_target_layers=target.num_layers,
            **chosen,
        )


class Bigram(DraftModule):
    """The trainable module."""

    aux_weight: ClassVar[str | None] = "read.weight"
    config: BigramConfig

    def __init__(self, config: BigramConfig) -> None:
        super().__init__(config)
        H = config.hidden_size
        self.read = nn.Linear(2 * H, H)
        self.write = nn.Linear(H, config.gamma * H)
        self.norm = nn.RMSNorm(H)
        self.bigram = VanillaMarkov(config.vocab_size, config.draft_vocab_size, H, config.rank)

    def hidden(self, aux_NH: Tensor, anchor_NH: Tensor) -> Tensor:
        read_NH = F.silu(self.read(torch.cat((aux_NH / self.aux_scale_L, anchor_NH), dim=-1)))
        return self.norm(self.write(read_NH).unflatten(-1, (self.config.gamma, -1)) + anchor_NH[:, None])

    def check_target(self, target: DecodingTarget) -> None:
        check_fits(self.config, target, final=True)  # it reads the target's last hidden state

    def rows(self, inputs: BlockInputs) -> DraftRows:
        aux_NH = inputs.layout.before_anchors(inputs.aux_SLD[:, 0])
        hidden_NKH = self.hidden(aux_NH, inputs.embed(inputs.previous_NK[:, 0]))
        latent_NKr, _ = self.bigram.unroll(inputs.previous_NK, hidden_NKH)
        return DraftRows(hidden_NKH, latent_NKr, self.bigram.markov_w2.weight)

    @staticmethod
    def drafter() -> type[Drafter]:
        return BigramDrafter


@dataclass
class BigramSession:
    """The target's states at the committed tokens of one request, after a row of zeros: nothing precedes them."""

    aux_TH: Tensor


class BigramDrafter(Drafter):
    """The drafter that serves it; weights are copied, for training goes on with the module."""

    def __init__(self, weights: DrafterWeights, target: Target, calibration: DraftCalibration) -> None:
        config = weights.config
        weights.module.check_target(target)
        calibration.check(config.gamma)
        weights.check()
        self.aux_layers, self.gamma = config.target_layer_ids, config.gamma
        self.embed_VH, self.embed_scale = target.embed_VD, target.embed_scale
        self.head = weights.head(target)
        self.module = copy.deepcopy(weights.module).float().requires_grad_(False)
        self.heads = weights.chain_heads(target, calibration, self.module.bigram)

    def new_session(self, capacity: int) -> BigramSession:
        return BigramSession(torch.zeros(1, self.embed_VH.shape[1]))

    def extend(self, sessions: Sequence[Any], tokens: Sequence[Sequence[int]], aux_TLD: Tensor | None) -> None:
        assert aux_TLD is not None
        parts = aux_TLD[:, 0].float().split([len(part) for part in tokens])
        for session, part in zip(sessions, parts, strict=True):
            session.aux_TH = torch.cat((session.aux_TH, part))

    def session_at(self, session: Any, length: int) -> BigramSession:
        return BigramSession(session.aux_TH[: length + 1])  # `outrider calibrate` drafts after every token of a text

    def propose(self, calls: Sequence[DraftCall], min_confidence: float = 0.0) -> list[Draft]:
        anchors = torch.tensor([call.anchor for call in calls])
        anchor_RH = F.embedding(anchors, self.embed_VH).float() * self.embed_scale
        hidden_RKH = self.module.hidden(torch.stack([call.session.aux_TH[-1] for call in calls]), anchor_RH)
        longest = max(call.limit or self.gamma for call in calls)
        return sample_chain(self.head, hidden_RKH[:, :longest], calls, self.heads, min_confidence)


METHOD = Method(
    BigramConfig,
    Bigram,
    exports={"vllm": Export(Own(BigramConfig, Bigram), name="bigram")},  # for a vLLM that has learnt the method
)
