"""Checks that find why a drafter is accepted less often than its training promised."""
