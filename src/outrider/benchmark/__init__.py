"""Load on an engine, real or simulated, and what it gives."""
