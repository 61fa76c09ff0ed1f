"""Measuring: tasks, plain against speculative decoding in one run, plots, and the proof of losslessness."""
