"""Evaluations, comparisons, profiles and experiments."""
