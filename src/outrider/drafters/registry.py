"""Every method that recipes can train: one line each (docs/add-a-drafter.md)."""

from __future__ import annotations

from typing import Any, NamedTuple

from outrider.drafters.base import DraftModule
from outrider.drafters.config import DrafterConfig, DrafterSection, section_of
from outrider.drafters.deepseek_v4 import DSparkV4, DSparkV4Config
from outrider.drafters.dflash import DFlash, DFlashConfig
from outrider.drafters.dflash2 import DFlash2, DFlash2Config
from outrider.drafters.dflash_input import DFlashInput, DFlashInputConfig
from outrider.drafters.domino import Domino, DominoConfig
from outrider.drafters.dspark import DSpark, DSparkConfig
from outrider.drafters.eagle3 import Eagle3, Eagle3Config
from outrider.drafters.hydra import Hydra, HydraConfig
from outrider.drafters.jetspec import JetSpec, JetSpecConfig
from outrider.drafters.lilicorr import LiLiCorr, LiLiCorrConfig
from outrider.drafters.medusa import Medusa, MedusaConfig
from outrider.drafters.mtp import MTP, MTPConfig
from outrider.drafters.peagle import PEagle, PEagleConfig


class Method(NamedTuple):
    """A drafting method: its config and its trainable module, which is made as `module(config)`."""

    config: type[DrafterConfig]
    module: type[DraftModule]

    @property
    def name(self) -> str:
        """As in a recipe's `drafter.algorithm` and in config.json."""
        return self.config.algorithm

    @property
    def section(self) -> type[DrafterSection]:
        """What a recipe may set of the config."""
        config: Any = self.config
        return section_of(config)


METHODS: tuple[Method, ...] = (
    Method(DFlashConfig, DFlash),
    Method(DSparkConfig, DSpark),
    Method(Eagle3Config, Eagle3),
    Method(MedusaConfig, Medusa),
    Method(HydraConfig, Hydra),
    Method(MTPConfig, MTP),
    Method(DFlash2Config, DFlash2),
    Method(DominoConfig, Domino),
    Method(PEagleConfig, PEagle),
    Method(LiLiCorrConfig, LiLiCorr),
    Method(JetSpecConfig, JetSpec),
    Method(DFlashInputConfig, DFlashInput),
    Method(DSparkV4Config, DSparkV4),
)


def method_of(name: str) -> Method:
    """The method of that name.

    Raises:
        ValueError: there is none; the message lists those there are.
    """
    for method in METHODS:
        if method.name == name:
            return method
    raise ValueError(f"{name!r} is none of the drafters: {', '.join(method.name for method in METHODS)}.")


def tree_methods() -> list[str]:
    """Names of the methods whose drafts can branch."""
    return [method.name for method in METHODS if method.module.drafts_trees]
