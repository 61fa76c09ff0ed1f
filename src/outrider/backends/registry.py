"""Every engine beside Outrider's own: one line each (docs/engines.md)."""

from __future__ import annotations

from outrider.backends.base import ExternalEngine
from outrider.backends.exchange import DeepSpecCode, SpeculatorsLibrary, ZLabPackage
from outrider.backends.llama_cpp import LlamaCpp
from outrider.backends.openai import OpenAICompatible
from outrider.backends.sglang import SGLang
from outrider.backends.vllm import VLLM

_SERVERS: tuple[ExternalEngine, ...] = (
    VLLM(),
    SGLang(),
    LlamaCpp(),
)
ENGINES: tuple[ExternalEngine, ...] = (
    OpenAICompatible(_SERVERS),
    *_SERVERS,
    ZLabPackage(),
    DeepSpecCode(),
    SpeculatorsLibrary(),
)


def exporters() -> list[ExternalEngine]:
    """The engines and packages that drafters can be written for (`--to`)."""
    return [engine for engine in ENGINES if engine.dialects]


def servers() -> list[ExternalEngine]:
    """The engines that serve over HTTP (`--backend`)."""
    return [engine for engine in ENGINES if engine.over_http]


def engine_of(name: str) -> ExternalEngine:
    """The engine of that name, as in `--to`.

    Raises:
        ValueError: there is none that drafters can be written for.
    """
    for engine in exporters():
        if engine.name == name:
            return engine
    raise ValueError(f"--to {name} is none of {', '.join(engine.name for engine in exporters())}.")


def server_of(name: str) -> ExternalEngine:
    """The engine of that name, as in `--backend`.

    Raises:
        ValueError: there is none that serves over HTTP.
    """
    for engine in servers():
        if engine.name == name:
            return engine
    raise ValueError(f"--backend {name} is none of {', '.join(engine.name for engine in servers())}.")
