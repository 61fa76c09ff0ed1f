"""Prompts, chat templates, response regeneration, samples with loss masks, anchors."""
