"""confidences -> how many draft tokens of each request the target verifies."""

from outrider.scheduling.policies import FixedPolicy, Policy, PrefixScheduler, ThresholdPolicy

__all__ = ["FixedPolicy", "Policy", "PrefixScheduler", "ThresholdPolicy"]
