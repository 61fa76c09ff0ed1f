"""Objectives, features, anchors' batches, the trainer, checkpoints, recipes."""
