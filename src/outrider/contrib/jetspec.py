"""JetSpec: DFlash whose rows see the rows before them alone, trained on the target's distributions, drafting trees.

    block    [anchor, mask, ..., mask] -> one pass; row k attends to the context and to rows 1 .. k of its block
    loss     sum_k KL(p_t,k || p_d,k) / K                      every position alike: no decay
    tree     the N paths with the largest product of p_d,k     drafters/trees.py, for DFlash as well

Backbone, features and block layout are DFlash's. Row k of a causal block depends on nothing behind it, so a shorter
block gives the same first drafts. Which token was drafted before it does not enter either: the rows between are masks.

Source: JetSpec, arXiv 2606.18394, and the code of its authors (github.com/hao-ai-lab/JetSpec), whose checkpoints are
read and written. Departures: the temperature of the distillation is 1; a tree there gets all of a node's `width`
likeliest children at once, here the likeliest nodes one by one, by the drafter's own probabilities never a worse tree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

from pydantic import Field
from torch import Tensor

from outrider.checkpoints.dialects.base import ExportedCheckpoint, Source, TargetFacts
from outrider.checkpoints.dialects.blocks import BlockFields, check_plain_logits, read_vocabulary
from outrider.checkpoints.dialects.zlab import ZLab, embedding_scale, read_block, written_block
from outrider.checkpoints.registry import Export, Method
from outrider.drafters.base import DrafterWeights
from outrider.drafters.dflash import DFlash, DFlashConfig


@dataclass(frozen=True, kw_only=True)
class JetSpecConfig(DFlashConfig):
    """DFlash's fields; `is_causal` is true."""

    algorithm: ClassVar[str] = "jetspec"

    is_causal: Annotated[
        bool | None, Field(description="Whether rows of a block see earlier rows only: true here.")
    ] = field(default=True, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.is_causal is not True:
            raise ValueError("is_causal must be true: a JetSpec drafter without it is drafter.algorithm=dflash.")

    @classmethod
    def default_objective(cls, chosen: Mapping[str, Any]) -> dict[str, float]:
        return {"ce": 0.0, "l1": 0.0, "kl": 1.0, "confidence": 0.0, "decay": math.inf}


class JetSpec(DFlash):
    """The backbone as DFlash has it."""

    config: JetSpecConfig


# ----------------------------------------------------------------------------
# JetSpec: z-lab's DFlash with `causal_head: true` in `dflash_config`, which `is_causal: true` stands beside here, for
# readers of DFlash that know that field alone.
#
# Source: hao-ai-lab/JetSpec (models/draft_head.py), which reads it with `from_pretrained`.
# ----------------------------------------------------------------------------


def _has_projector(raw: Mapping[str, Any]) -> bool:
    section = raw.get("dflash_config")
    nested = section.get("projector_type") if isinstance(section, Mapping) else None
    return bool(nested or raw.get("projector_type"))


def _is_jetspec(raw: Mapping[str, Any]) -> bool:
    section = raw.get("dflash_config")
    return isinstance(section, Mapping) and section.get("causal_head") is True


class JetSpecDialect:
    """What JetSpec adds to z-lab's DFlash."""

    name = "z-lab"
    spelling = ZLab.spelling
    methods: tuple[str, ...] = (JetSpecConfig.algorithm,)
    prefix = ""

    def reads(self, raw: Mapping[str, Any]) -> bool:
        return self.spelling in (raw.get("architectures") or []) and _is_jetspec(raw) and not _has_projector(raw)

    def read(self, raw: Mapping[str, Any], tensors: Mapping[str, Tensor], source: Source) -> DrafterWeights:
        fields = BlockFields(raw, source, self.name, nested="dflash_config")
        config = JetSpecConfig(**{**read_block(fields), "is_causal": fields.flag("is_causal", True)})
        check_plain_logits(config, self.name)
        return replace(read_vocabulary(config, tensors, source, kind=JetSpec), embedding_scale=embedding_scale(fields))

    def write(self, parts: DrafterWeights, target: TargetFacts | None) -> ExportedCheckpoint:
        check_plain_logits(parts.config, self.name)
        written = written_block(parts, target, self.spelling)
        section = {**written.config["dflash_config"], "causal_head": True}
        return replace(written, config={**written.config, "dflash_config": section})


METHOD = Method(
    JetSpecConfig,
    JetSpec,
    JetSpecDialect(),
    exports={
        "zlab": Export(
            JetSpecDialect(),
            whole_vocabulary=True,
            scales_embeddings=True,
            targets_vocabulary=True,
        )
    },
)
