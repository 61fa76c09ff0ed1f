"""Reads conversations, renders them with chat templates, and regenerates the target's responses."""
