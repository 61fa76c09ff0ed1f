"""Domino: DFlash with a recurrent head that corrects the parallel logits by the tokens drafted so far.

    s_k      = GRU(s_{k-1}, e(x_{k-1})),  s_0 = 0         e: the target's embedding, x_0: the anchor
    l_k      = SiLU(W_1 [h_k; s_k])                       h_k from the parallel backbone
    logits_k = U_k + W_2 l_k                              U_k alone for the first `pure_draft_prefix_len` drafts

Backbone, context features and block layouts are DFlash's. The correction is a sequential head (drafters/heads.py), so
the distributions that tokens are drawn from are the ones that verification is given.

Training: (1 - b) L(softmax(U + W_2 l)) + b L(softmax(U)), L the loss of DFlash, b falling to 0 (`objective.base`,
`DraftRows.loss` in drafters/base.py). With the corrected logits alone, the head learns from the true prefix what the
backbone then need not know.

Source: Domino, arXiv 2605.29707; parameter names, the uncorrected first draft and the form of the head as in SpecForge,
whose Domino is by the paper's authors. W_2 starts at zero: training begins with the parallel drafter, uncorrected.
Shapes: N blocks or requests, K block positions, Vd draft vocab, H draft hidden, G GRU state, r rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from outrider.checkpoints.dialects.base import MOST_DRAFTS, ExportedCheckpoint, Source, TargetFacts
from outrider.checkpoints.dialects.blocks import BlockFields, check_plain_logits, read_vocabulary
from outrider.checkpoints.dialects.zlab import ZLab, embedding_scale, read_block, written_block
from outrider.checkpoints.registry import Export, Method
from outrider.drafters.base import BlockInputs, DraftCalibration, Drafter, DrafterWeights, DraftRows
from outrider.drafters.config import Count
from outrider.drafters.dflash import BlockDrafter, DFlash, DFlashConfig
from outrider.target.model import Target


@dataclass(frozen=True, kw_only=True)
class DominoConfig(DFlashConfig):
    """DFlash's fields and those of the head, under the names that published checkpoints have them by."""

    algorithm: ClassVar[str] = "domino"
    layouts: ClassVar[tuple[bool, ...]] = (False, True)

    sample_from_anchor: Annotated[
        bool, Field(description="Whether the anchor's row drafts, too: block_size drafts instead of one less.")
    ] = True
    gru_hidden_dim: Annotated[Count, Field(description="Width of the GRU that reads the tokens drafted so far.")] = 256
    emb_dim: Annotated[Count, Field(description="Rank of the correction of the parallel logits.")] = 64
    pure_draft_prefix_len: Annotated[
        int, Field(ge=0, description="First drafts that are drawn from the parallel logits, uncorrected.")
    ] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pure_draft_prefix_len >= self.gamma:
            raise ValueError(
                f"pure_draft_prefix_len {self.pure_draft_prefix_len} leaves none of {self.gamma} drafts to correct; "
                "use a smaller one, or drafter.algorithm=dflash."
            )

    @classmethod
    def default_objective(cls, chosen: Mapping[str, Any]) -> dict[str, float]:
        return super().default_objective(chosen) | {"base": 1.0}

    def describe_heads(self) -> list[tuple[str, str]]:
        head = f"GRU of {self.gru_hidden_dim}, rank {self.emb_dim}, from draft {self.pure_draft_prefix_len + 1} on"
        return [("sequential head", head), ("confidence head", "no")]


class Domino(DFlash):
    """The backbone with its recurrent head."""

    config: DominoConfig

    def __init__(self, config: DominoConfig) -> None:
        super().__init__(config)
        H, G, r = config.hidden_size, config.gru_hidden_dim, config.emb_dim
        self.prefix_gru = nn.GRU(H, G, bias=False, batch_first=True)
        self.embed_proj = nn.Sequential(
            nn.Linear(H + G, r, bias=False), nn.SiLU(), nn.Linear(r, config.draft_vocab_size, bias=False)
        )
        nn.init.zeros_(self.correction)
        self.groups = (*self.groups, ("embed_proj.0",), ("embed_proj.2",))

    @property
    def correction(self) -> Tensor:
        """W_2 [Vd, r], of a module that is not packed."""
        return self.get_parameter("embed_proj.2.weight")

    def latent(self, hidden: Tensor, state: Tensor) -> Tensor:
        """l [..., r] from h [..., H] and s [..., G]."""
        (projected,) = self.outputs(torch.cat((hidden, state), dim=-1), "embed_proj.0")
        return F.silu(projected)

    def unroll(self, embedded_NKH: Tensor, hidden_NKH: Tensor) -> Tensor:
        """Latents [N, K, r] of all positions, given e(x_{k-1}); zero where the logits stay as they are."""
        with torch.autocast(hidden_NKH.device.type, enabled=False):  # a GRU takes inputs and weights of one type
            states_NKG, _ = self.prefix_gru(embedded_NKH)
        latent_NKr = self.latent(hidden_NKH, states_NKG)
        plain = self.config.pure_draft_prefix_len
        return torch.cat((torch.zeros_like(latent_NKr[:, :plain]), latent_NKr[:, plain:]), dim=1)

    def rows(self, inputs: BlockInputs) -> DraftRows:
        hidden_NKH = super().rows(inputs).hidden_NKH
        return DraftRows(hidden_NKH, self.unroll(inputs.embed(inputs.previous_NK), hidden_NKH), self.correction)

    @staticmethod
    def drafter() -> type[Drafter]:
        return DominoDrafter


class PrefixState(NamedTuple):
    """s_{k-1} [N, G] before position k, and how many positions are behind it."""

    state_NG: Tensor
    positions: int


@dataclass(frozen=True)
class PrefixHead:
    """The head of a served module as `sample_chain` asks for it, position by position: equal to `Domino.unroll`.

    `embed`: token ids [N] -> the target's embedding [N, H], which the GRU reads.
    """

    module: Domino
    embed: Callable[[Tensor], Tensor]

    def initial_state(self, batch: int) -> PrefixState:
        _, hidden_to_gates = self.module.prefix_gru.all_weights[0]
        return PrefixState(hidden_to_gates.new_zeros(batch, self.module.config.gru_hidden_dim), 0)

    def step(
        self, prev_tokens_N: Tensor, hidden_NH: Tensor, state: PrefixState
    ) -> tuple[Tensor | None, None, PrefixState]:
        state_NG, k = state
        state_NG = torch.gru_cell(self.embed(prev_tokens_N), state_NG, *self.module.prefix_gru.all_weights[0])
        corrected = k >= self.module.config.pure_draft_prefix_len
        latent_Nr = self.module.latent(hidden_NH, state_NG) if corrected else None
        return latent_Nr, None, PrefixState(state_NG, k + 1)

    def bias(self, latent_Nr: Tensor) -> Tensor:
        (logits_NVd,) = self.module.outputs(latent_Nr, "embed_proj.2")
        return logits_NVd


class DominoDrafter(BlockDrafter):
    """Serves one Domino drafter: the block pass of DFlash, then the chain with the recurrent head."""

    module: Domino

    def __init__(self, weights: DrafterWeights, target: Target, calibration: DraftCalibration) -> None:
        super().__init__(weights, target, calibration)
        self.heads = replace(self.heads, sequential=PrefixHead(self.module, self.embed))

    def of_length(self, gamma: int) -> BlockDrafter:
        """As `BlockDrafter`'s, but one draft of a block is corrected at least."""
        return super().of_length(max(gamma, self.module.config.pure_draft_prefix_len + 1))


# ----------------------------------------------------------------------------
# SpecForge's Domino: z-lab's DFlash with `projector_type: domino` and the fields of the head in `dflash_config`.
#
#     gru_hidden_dim, emb_dim     emb_dim may stand at the top, as in SpecForge's own configs
#     pure_draft_prefix_len       0 where it is left out
#     shift_label                 sample_from_anchor: every row predicts the token after its own; false where left out
#     prefix_gru.weight_{ih,hh}_l0, embed_proj.{0,2}.weight      tensors beside DFlash's, names our own
#
# A block with shift_label has block_size rows that predict, and all are drafted from here; SpecForge and SGLang train
# them all and draft from all but the last. Published checkpoints are called DFlashDraftModel, which SGLang loads;
# SpecForge has come to write DominoDraftModel, which is read too.
#
# Source: SpecForge (modeling/draft/domino.py, configs/qwen3-8b-domino.json), SGLang 0.5.23 (models/dflash.py).
# ----------------------------------------------------------------------------


_DOMINO = "domino"


def _is_domino(raw: Mapping[str, Any]) -> bool:
    section = raw.get("dflash_config")
    nested = section.get("projector_type") if isinstance(section, Mapping) else None
    return _DOMINO in (nested, raw.get("projector_type"))


class SpecForgeDomino:
    """Domino as its authors publish it."""

    name = "SpecForge"
    spelling = ZLab.spelling
    methods: tuple[str, ...] = (DominoConfig.algorithm,)
    prefix = ""

    def reads(self, raw: Mapping[str, Any]) -> bool:
        names = raw.get("architectures") or []
        return "DominoDraftModel" in names or (self.spelling in names and _is_domino(raw))

    def read(self, raw: Mapping[str, Any], tensors: Mapping[str, Tensor], source: Source) -> DrafterWeights:
        fields = BlockFields(raw, source, self.name, nested="dflash_config")
        own = {
            "sample_from_anchor": fields.flag("shift_label", False),
            "gru_hidden_dim": fields.integer("gru_hidden_dim"),
            "emb_dim": fields.integer("emb_dim"),
            "pure_draft_prefix_len": fields.integer("pure_draft_prefix_len", low=0, high=MOST_DRAFTS, default=0),
        }
        config = DominoConfig(**{**read_block(fields), **own})
        check_plain_logits(config, self.name)
        return replace(read_vocabulary(config, tensors, source, kind=Domino), embedding_scale=embedding_scale(fields))

    def write(self, parts: DrafterWeights, target: TargetFacts | None) -> ExportedCheckpoint:
        config = parts.config
        check_plain_logits(config, self.name)
        written = written_block(parts, target, self.spelling)
        own = {"projector_type": _DOMINO, "shift_label": config.sample_from_anchor}
        own |= {name: getattr(config, name) for name in ("gru_hidden_dim", "emb_dim", "pure_draft_prefix_len")}
        section = {**written.config["dflash_config"], **own}
        return replace(written, config={**written.config, "dflash_config": section})


def _sglang_limits(parts: DrafterWeights) -> list[str]:
    config = parts.config
    if config.pure_draft_prefix_len != 1:
        raise ValueError(
            f"pure_draft_prefix_len {config.pure_draft_prefix_len} is not served there; its Domino corrects "
            "every draft but the first: train with drafter.pure_draft_prefix_len=1."
        )
    return [
        f"SGLang drafts {config.block_size - 1} tokens with Domino, greedily, in bfloat16 and on CUDA alone, "
        "among the 2048 likeliest of a block (--speculative-domino-candidate-pool-size 0: among all)."
    ]


METHOD = Method(
    DominoConfig,
    Domino,
    SpecForgeDomino(),
    exports={
        "sglang": Export(
            SpecForgeDomino(),
            "DFLASH",  # `projector_type` in the checkpoint tells them apart
            whole_vocabulary=True,
            targets_vocabulary=True,
            states_length=False,
            check=_sglang_limits,
        )
    },
)
