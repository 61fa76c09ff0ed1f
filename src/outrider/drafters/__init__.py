"""Draft models: config, module and how each one drafts."""

from outrider.drafters.base import Drafter, DraftSession, Proposal
from outrider.drafters.dflash import DFlash, DFlashConfig
from outrider.drafters.dspark import DSpark, DSparkConfig

__all__ = ["DFlash", "DFlashConfig", "DSpark", "DSparkConfig", "DraftSession", "Drafter", "Proposal"]
