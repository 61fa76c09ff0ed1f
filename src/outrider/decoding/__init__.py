"""The single-request loop: draft -> schedule -> verify -> commit, and streaming."""

from outrider.decoding.acceptance import acceptance
from outrider.decoding.generate import Chunk, Generation, RoundStats, StopRules, generate, stream
from outrider.decoding.round import Batch, RoundResult, run_round

__all__ = [
    "Batch",
    "Chunk",
    "Generation",
    "RoundResult",
    "RoundStats",
    "StopRules",
    "acceptance",
    "generate",
    "run_round",
    "stream",
]
