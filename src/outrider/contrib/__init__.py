"""Drafting methods that the shared code does not know: found through entry points, as any installed package's are."""
