"""Draft models: one file per method."""
