"""Draft models: config, module and how each one drafts."""

from outrider.drafters.base import Draft, DraftCall, Drafter, Proposal, TreeDrafter
from outrider.drafters.dflash import DFlash, DFlashConfig
from outrider.drafters.dspark import DSpark, DSparkConfig
from outrider.drafters.tree import Drawn, Tree, TreeProposal

__all__ = [
    "DFlash",
    "DFlashConfig",
    "DSpark",
    "DSparkConfig",
    "Draft",
    "DraftCall",
    "Drafter",
    "Drawn",
    "Proposal",
    "Tree",
    "TreeDrafter",
    "TreeProposal",
]
