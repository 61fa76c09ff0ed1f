"""Drafters on disk, in every dialect."""
