"""Decoding of one request."""
