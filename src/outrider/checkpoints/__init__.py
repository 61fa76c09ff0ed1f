"""Reads and writes drafters on disk, in every dialect."""
