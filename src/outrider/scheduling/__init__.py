"""confidences -> which requests draft, and how many draft tokens of each the target verifies."""

from outrider.scheduling.asynchronous import AsyncScheduler
from outrider.scheduling.cost import SpsTable, StepCost
from outrider.scheduling.gate import AlwaysDraft, DraftGate, GateView, SkipDrafting
from outrider.scheduling.goodput import GoodputPolicy
from outrider.scheduling.history import History
from outrider.scheduling.lookahead import LookAhead
from outrider.scheduling.policies import FixedPolicy, Policy, PrefixScheduler, ThresholdPolicy
from outrider.scheduling.view import Past, StepView

__all__ = [
    "AlwaysDraft",
    "AsyncScheduler",
    "DraftGate",
    "FixedPolicy",
    "GateView",
    "GoodputPolicy",
    "History",
    "LookAhead",
    "Past",
    "Policy",
    "PrefixScheduler",
    "SkipDrafting",
    "SpsTable",
    "StepCost",
    "StepView",
    "ThresholdPolicy",
]
