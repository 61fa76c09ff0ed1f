"""Outrider trains, calibrates, evaluates, serves and exports draft models for lossless speculative decoding.

    from outrider import SamplingParams, StopRules, generate, load_drafter, load_target

    target = load_target("SmolLM2-135M-Instruct")
    drafter = load_drafter("smollm2-135m-dspark", target)
    prompt = target.tokenizer("Three large rivers of Europe are").input_ids
    print(generate(target, prompt, drafter, SamplingParams(), StopRules(32)).text)

`stream` yields the same text round by round, and `Engine` decodes many requests at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.checkpoints.checkpoint import load_drafter
    from outrider.decoding.generate import generate, stream
    from outrider.decoding.request import StopRules
    from outrider.engine.engine import Engine
    from outrider.sampling import SamplingParams
    from outrider.target.model import load_target

__all__ = ["Engine", "SamplingParams", "StopRules", "generate", "load_drafter", "load_target", "stream"]

_MODULES = {
    "Engine": "engine.engine",
    "SamplingParams": "sampling",
    "StopRules": "decoding.request",
    "generate": "decoding.generate",
    "load_drafter": "checkpoints.checkpoint",
    "load_target": "target.model",
    "stream": "decoding.generate",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for, so that `import outrider` costs nothing."""
    if name not in _MODULES:
        raise AttributeError(f"module 'outrider' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"outrider.{_MODULES[name]}"), name)
