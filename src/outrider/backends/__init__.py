"""Inference engines that serve drafters."""
