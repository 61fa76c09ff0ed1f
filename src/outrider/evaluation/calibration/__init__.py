"""Calibration of confidences, and of the candidates that fixed trees are chosen by."""
