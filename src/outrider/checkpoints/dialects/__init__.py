"""The dialects of drafter checkpoints, one file per maker; checkpoints/registry.py lists them."""
