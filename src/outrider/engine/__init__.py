"""Many requests at once: sequences, KV blocks, flattened ragged batches."""

from outrider.engine.engine import Engine
from outrider.engine.request import Output, Request, StepRecord
from outrider.engine.scheduler import EngineConfig, Scheduler

__all__ = ["Engine", "EngineConfig", "Output", "Request", "Scheduler", "StepRecord"]
