"""Continuous batching of many requests."""
