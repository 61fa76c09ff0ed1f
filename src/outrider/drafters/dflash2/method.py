"""DFlash 2 as a method: what a recipe says of it, its config, and where its weights begin: where DFlash's do."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from outrider.drafters.block import BlockSection, backbone_fields, check_layout, initialize_block
from outrider.drafters.dflash2.module import DFlash2, DFlash2Config
from outrider.drafters.dflash2.serve import DFlash2Drafter
from outrider.drafters.method import Method
from outrider.target import Target


class DFlash2Section(BlockSection):
    """What recipes may set beside a block drafter's own fields."""

    algorithm: Literal["dflash2"] = "dflash2"
    block_size: int = Field(8, ge=2)
    conv_kernel_size: int = Field(2, ge=1)
    conv_group_size: int = Field(16, ge=1)
    selector_rank: int = Field(64, ge=1)
    selector_top_k: int = Field(16, ge=1)


OWN_FIELDS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def configure(section: DFlash2Section, target: Target) -> DFlash2Config:
    """The target's layer shapes, the recipe's choices."""
    config = DFlash2Config(**backbone_fields(section, target), **{name: getattr(section, name) for name in OWN_FIELDS})
    check_layout(config)
    return config


DFLASH2 = Method(
    "dflash2",
    DFlash2Section,
    configure,
    DFlash2Config,
    DFlash2,
    DFlash2Drafter,
    initialize_block,
)
