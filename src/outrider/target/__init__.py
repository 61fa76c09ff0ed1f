"""The frozen target model: loading, hidden states, KV caches with rollback, and the fast CPU forward."""
