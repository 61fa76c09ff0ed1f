"""DSpark: DFlash plus a sequential head and a confidence head (semi-autoregressive drafting).

    logits_k = U_k + W2 l_k(x_{k-1}, h_k)      U_k from the parallel backbone, l_k from drafters/heads.py
    c_k      = sigmoid(w^T [h_k; W1[x_{k-1}]])
    loss     = sum_k w_k [ce CE + l1 ||p_d - p_t||_1 + confidence BCE(c_k, 1 - ||p_d - p_t||_1 / 2)] / sum_k w_k

Source: DSpark, arXiv 2607.05147. Parameter names are those of the DeepSpec dialect. `markov_rank: 0` without a
confidence head is DeepSpec's own spelling of DFlash.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from outrider.drafters.base import BlockInputs, Drafter, DraftRows
from outrider.drafters.dflash import BlockDrafter, DFlash, DFlashConfig
from outrider.drafters.fused_loss import Supervision
from outrider.drafters.heads import ConfidenceHead, VanillaMarkov, build_sequential_head
from outrider.drafters.loss import DraftLoss, confidence_loss


@dataclass(frozen=True, kw_only=True)
class DSparkConfig(DFlashConfig):
    """DFlash's fields and those of the two heads."""

    algorithm: ClassVar[str] = "dspark"
    layouts: ClassVar[tuple[bool, ...]] = (False, True)

    sample_from_anchor: Annotated[
        bool, Field(description="Whether the anchor's row drafts, too: block_size drafts instead of one less.")
    ] = True
    markov_rank: Annotated[int, Field(ge=0, description="Rank of the sequential head; 0: none.")] = 64
    markov_head_type: Annotated[
        Literal["vanilla", "gated", "rnn"],
        Field(description="What sees the tokens drafted before."),
    ] = "vanilla"
    enable_confidence_head: Annotated[
        bool, Field(description="Whether drafts come with a confidence of being accepted.")
    ] = True
    confidence_head_with_markov: Annotated[
        bool, Field(description="Whether that head reads the token before, too.")
    ] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.enable_confidence_head and self.confidence_head_with_markov and not self.markov_rank:
            raise ValueError(
                "confidence_head_with_markov needs a sequential head: set markov_rank above 0, or it to false."
            )

    @classmethod
    def default_objective(cls, chosen: Mapping[str, Any]) -> dict[str, float]:
        return {}  # what the objective's own defaults are: cross-entropy 0.1, 1-norm 0.9, confidence 1.0

    def describe_heads(self) -> list[tuple[str, str]]:
        kind = f"{self.markov_head_type}, rank {self.markov_rank}" if self.markov_rank else "none"
        return [("sequential head", kind), ("confidence head", "yes" if self.enable_confidence_head else "no")]


@dataclass(frozen=True, kw_only=True)
class DSparkRows(DraftRows):
    """Draft logits with the sequential head's correction, and what the confidence head reads.

    Attributes:
        confidence: the head; None: there is none.
        read_NKH: the hidden states that it reads.
        embedding_NKr: W1[x_{k-1}], which it may read, too; None without a sequential head.
    """

    confidence: ConfidenceHead | None
    read_NKH: Tensor
    embedding_NKr: Tensor | None = None

    def loss(self, given: Supervision) -> DraftLoss:
        """sum_i w_i [ce CE_i + l1 ||p_d - p_t||_1 + kl KL(p_t || p_d) + confidence BCE(c_i, a_i)] / sum_i w_i,
        a_i = 1 - ||p_d - p_t||_1 / 2; `confidence_gradient: false` stops the last term's gradient at the head.
        """
        drafts = super().loss(given)
        if self.confidence is None:
            return drafts
        read_MH = given.wide(self.read_NKH)
        embedding_Mr = None if self.embedding_NKr is None else given.wide(self.embedding_NKr)
        if not given.config.confidence_gradient:
            read_MH, embedding_Mr = read_MH.detach(), None if embedding_Mr is None else embedding_Mr.detach()
        bce_M = confidence_loss(self.confidence(read_MH, embedding_Mr), drafts.acceptance_N)
        return drafts._replace(loss=drafts.loss + given.config.confidence * (given.weights_M * bce_M).sum())


class DSpark(DFlash):
    """The backbone with its two heads."""

    config: DSparkConfig
    markov_head: VanillaMarkov | None
    confidence_head: ConfidenceHead | None

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        self.markov_head = (
            build_sequential_head(
                config.markov_head_type,
                config.vocab_size,
                config.draft_vocab_size,
                hidden_size=config.hidden_size,
                rank=config.markov_rank,
            )
            if config.markov_rank
            else None
        )
        self.confidence_head = (
            ConfidenceHead(config.hidden_size, config.markov_rank, config.confidence_head_with_markov)
            if config.enable_confidence_head
            else None
        )

    @staticmethod
    def drafter() -> type[Drafter]:
        return BlockDrafter

    def chain_heads(self) -> tuple[VanillaMarkov | None, ConfidenceHead | None]:
        return self.markov_head, self.confidence_head

    def rows(self, inputs: BlockInputs) -> DSparkRows:
        hidden_NKH = super().rows(inputs).hidden_NKH
        rows = DSparkRows(hidden_NKH, confidence=self.confidence_head, read_NKH=hidden_NKH)
        if self.markov_head is None:
            return rows
        latent_NKr, embedding_NKr = self.markov_head.unroll(inputs.previous_NK, hidden_NKH)
        w2_Vr = self.markov_head.markov_w2.weight
        return replace(rows, latent_NKr=latent_NKr, w2_Vr=w2_Vr, embedding_NKr=embedding_NKr)
