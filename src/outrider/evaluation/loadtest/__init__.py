"""Load tests, measured and simulated."""
