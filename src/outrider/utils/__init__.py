"""Utilities for files, processes, devices, terminals and measurements."""
