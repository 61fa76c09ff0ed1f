"""The frozen LLM: resolution, families, taps, KV cache with rollback, lean CPU forward."""

from outrider.target.cache import KVCache
from outrider.target.load import load_target
from outrider.target.model import Target, TargetOutput

__all__ = ["KVCache", "Target", "TargetOutput", "load_target"]
