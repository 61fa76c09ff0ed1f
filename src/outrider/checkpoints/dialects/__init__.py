"""Every checkpoint dialect, in the order in which readers are asked; at most one says yes.

speculators  speculators_model_type   eagle3, dflash, dflash2, dspark, mtp; one envelope, read by vLLM
z-lab        DFlashDraftModel         DFlash; aux layers and mask token in `dflash_config`; anchor + masks layout
z-lab        DFlash2DraftModel        DFlash 2; the sizes of convolution and selector beside them
SpecForge    DFlashDraftModel         Domino, by `projector_type` in `dflash_config`; z-lab's fields and the head's
z-lab        DFlashDraftModel         JetSpec, by `causal_head` in `dflash_config`
ModelOpt     LiLiCorrDraftModel       LiLiCorr: z-lab's fields and those of the head, in `dflash_config`
DeepSpec     Qwen3DSparkModel         DSpark (and DFlash as markov_rank 0); aux layers and mask token at the top level
EAGLE-3      LlamaForCausalLMEagle3   EAGLE-3, one layer; aux layers in three spellings, DeepSpec's among them
Medusa       model_type medusa        heads, an LM head each or the target's once
DeepSeek-V4  DeepseekV4ForCausalLM    DSpark in the target's own checkpoint, by dspark_block_size; read only
Outrider     Outrider...Model         any method: `algorithm` and the fields of its config
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.checkpoints.dialects.base import Dialect
from outrider.checkpoints.dialects.deepseek import DeepSeekV4
from outrider.checkpoints.dialects.deepspec import DeepSpec
from outrider.checkpoints.dialects.eagle3 import Eagle3Dialect
from outrider.checkpoints.dialects.medusa import MedusaDialect
from outrider.checkpoints.dialects.own import Own
from outrider.checkpoints.dialects.speculators import Speculators
from outrider.checkpoints.dialects.zlab import JetSpecDialect, LiLiCorrDialect, SpecForgeDomino, ZLab, ZLab2
from outrider.drafters import registry
from outrider.drafters.registry import Method

_MAKERS: tuple[Dialect, ...] = (
    Speculators(),
    ZLab(),
    ZLab2(),
    SpecForgeDomino(),
    JetSpecDialect(),
    LiLiCorrDialect(),
    DeepSpec(),
    Eagle3Dialect(),
    MedusaDialect(),
    DeepSeekV4(),
)
_NATIVE: tuple[Dialect, ...] = (
    ZLab(),
    ZLab2(),
    SpecForgeDomino(),
    JetSpecDialect(),
    LiLiCorrDialect(),
    DeepSpec(),
)  # carry every field of their method; the other methods are saved in ours


def dialects() -> tuple[Dialect, ...]:
    """All dialects: the makers', and our own for each method that no maker's carries in full."""
    return (*_MAKERS, *(Own(method) for method in registry.METHODS if isinstance(dialect_for(method), Own)))


class UnknownDialect(ValueError):
    """A config.json that belongs to no dialect we read; `raw` is what it says."""

    def __init__(self, message: str, raw: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.raw = raw


def dialect_for(method: Method) -> Dialect:
    """The dialect that a method's drafters are saved in."""
    for dialect in _NATIVE:
        if method.name in dialect.methods:
            return dialect
    return Own(method)


def dialect_of(raw: Mapping[str, Any], where: object) -> Dialect:
    """The dialect a config.json is written in.

    Raises:
        UnknownDialect: it belongs to no dialect we read.
        ValueError: its architectures are no list of names.
    """
    named = raw.get("architectures")
    if named is not None and (not isinstance(named, list) or any(not isinstance(name, str) for name in named)):
        raise ValueError(f"{where}: architectures is {named!r}; it must be a list of names.")
    for dialect in dialects():
        if dialect.reads(raw):
            return dialect
    if named and named[0].endswith(("ForCausalLM", "ForConditionalGeneration")):
        raise UnknownDialect(
            f"{where}: architectures {named} is not a drafter dialect Outrider reads but a language model's; "
            "--drafter lm:DIRECTORY drafts with one.",
            raw,
        )
    known = ", ".join(f"{dialect.spelling} ({dialect.name})" for dialect in dialects())
    raise UnknownDialect(
        f"{where}: architectures {named or []} is not a drafter dialect Outrider reads. Known: {known}.", raw
    )
