"""Outrider: train, evaluate and serve draft models for lossless speculative decoding."""
