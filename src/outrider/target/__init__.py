"""Loads and runs the frozen target model: hidden states, KV caches with rollback, and the fused CPU forward."""
