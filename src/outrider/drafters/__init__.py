"""Draft models: config, module and how each one drafts. The catalogue lists every algorithm."""

from outrider.drafters.base import Proposal
from outrider.drafters.dflash import DFlash, DFlashConfig
from outrider.drafters.dspark import DSpark, DSparkConfig

CATALOGUE: tuple[type[DFlash], ...] = (DFlash, DSpark)

__all__ = ["CATALOGUE", "DFlash", "DFlashConfig", "DSpark", "DSparkConfig", "Proposal"]
