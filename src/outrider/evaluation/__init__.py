"""Is it lossless, is it faster, and why: proofs, tasks, metrics and reports."""
