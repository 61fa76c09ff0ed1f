"""Draft models: config, module and how each one drafts."""

from outrider.drafters.base import DraftCall, Drafter, Proposal
from outrider.drafters.dflash import DFlash, DFlashConfig
from outrider.drafters.dspark import DSpark, DSparkConfig

__all__ = ["DFlash", "DFlashConfig", "DSpark", "DSparkConfig", "DraftCall", "Drafter", "Proposal"]
