"""Conversations, chat templates and the target's own responses."""
