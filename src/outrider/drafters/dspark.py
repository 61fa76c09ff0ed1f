"""DSpark: DFlash plus a sequential head and a confidence head (semi-autoregressive drafting).

    logits_k = U_k + W2 l_k(x_{k-1}, h_k)      U_k from the parallel backbone, l_k from drafters/medusa.py
    c_k      = sigmoid(w^T [h_k; W1[x_{k-1}]])

Source: DSpark, arXiv 2607.05147. Parameter names are those of the DeepSpec dialect. `markov_rank: 0` without a
confidence head is DeepSpec's own spelling of DFlash.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from pydantic import Field

from outrider.drafters.base import BlockInputs, DraftRows, Method
from outrider.drafters.dflash import (
    BlockDrafter,
    BlockSection,
    DFlash,
    DFlashConfig,
    backbone_fields,
    initialize_block,
)
from outrider.drafters.heads import ConfidenceHead, VanillaMarkov, build_sequential_head
from outrider.target.model import Target


@dataclass(frozen=True)
class DSparkConfig(DFlashConfig):
    """DFlash's fields and those of the two heads."""

    sample_from_anchor: bool = True
    markov_rank: int = 256
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.markov_rank < 0:
            raise ValueError(f"markov_rank {self.markov_rank} must be 0 (no sequential head) or more.")
        if self.enable_confidence_head and self.confidence_head_with_markov and not self.markov_rank:
            raise ValueError(
                "confidence_head_with_markov needs a sequential head: set markov_rank above 0, or it to false."
            )


class DSpark(DFlash):
    """The backbone with its two heads."""

    algorithm: ClassVar[str] = "dspark"
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
                config.hidden_size,
                config.markov_rank,
            )
            if config.markov_rank
            else None
        )
        self.confidence_head = (
            ConfidenceHead(config.hidden_size, config.markov_rank, config.confidence_head_with_markov)
            if config.enable_confidence_head
            else None
        )

    def chain_heads(self) -> tuple[VanillaMarkov | None, ConfidenceHead | None]:
        return self.markov_head, self.confidence_head

    def rows(self, inputs: BlockInputs) -> DraftRows:
        rows = replace(super().rows(inputs), confidence=self.confidence_head)
        if self.markov_head is None:
            return rows
        latent_NKr, embedding_NKr = self.markov_head.unroll(inputs.previous_NK, rows.hidden_NKH)
        w2_Vr = self.markov_head.markov_w2.weight
        return replace(rows, latent_NKr=latent_NKr, w2_Vr=w2_Vr, embedding_NKr=embedding_NKr)


class DSparkSection(BlockSection):
    algorithm: Literal["dspark"] = "dspark"
    markov_rank: int = Field(64, ge=0)
    markov_head_type: Literal["vanilla", "gated", "rnn"] = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True


_HEADS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")


def _dspark_config(section: DSparkSection, target: Target) -> DSparkConfig:
    return DSparkConfig(**backbone_fields(section, target), **{name: getattr(section, name) for name in _HEADS})


DSPARK = Method("dspark", DSparkSection, _dspark_config, DSparkConfig, DSpark, BlockDrafter, initialize_block)
