"""Which requests draft, and how many draft tokens of each request the target verifies."""
