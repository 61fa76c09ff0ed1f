"""Calibration of confidences."""
