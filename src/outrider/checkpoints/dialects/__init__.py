"""Reads and writes the dialects of drafter checkpoints, one file per maker (listed in checkpoints/registry.py)."""
