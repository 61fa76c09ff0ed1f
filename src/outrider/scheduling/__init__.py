"""confidences -> how many draft tokens of each request the target verifies."""

from outrider.scheduling.cost import SpsTable, StepCost
from outrider.scheduling.policies import FixedPolicy, Policy, PrefixScheduler, ThresholdPolicy
from outrider.scheduling.view import Past, StepView

__all__ = ["FixedPolicy", "Past", "Policy", "PrefixScheduler", "SpsTable", "StepCost", "StepView", "ThresholdPolicy"]
