"""Every engine beside Outrider's own: one line each (docs/engines.md)."""

from __future__ import annotations

from outrider.backends.base import ExternalEngine
from outrider.backends.exchange import DeepSpecCode, SpeculatorsLibrary, ZLabPackage
from outrider.backends.llama_cpp import LlamaCpp
from outrider.backends.openai import OpenAICompatible
from outrider.backends.sglang import SGLang
from outrider.backends.vllm import VLLM
from outrider.drafters.registry import METHODS

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


MARKS = "*: with the whole vocabulary only (drafter.draft_vocab_size=null). +: a reduced one is widened on export."


def export_table() -> list[list[str]]:
    """The dialect in which each engine is given each method's drafters, with `MARKS`, headings first; "-": in none."""
    rows = [["drafter", *(engine.name for engine in exporters())]]
    for method in METHODS:
        cells = []
        for engine in exporters():
            mark = "*" * (method.name in engine.whole_vocabulary) + "+" * (method.name in engine.widens)
            cells.append(engine.dialects[method.name].name + mark if method.name in engine.dialects else "-")
        rows.append([method.name, *cells])
    return rows


def engine_of(name: str) -> ExternalEngine:
    """The engine of that name, as in `--to`.

    Raises:
        ValueError: there is none that drafters can be written for.
    """
    return _named(exporters(), "--to", name)


def server_of(name: str) -> ExternalEngine:
    """The engine of that name, as in `--backend`.

    Raises:
        ValueError: there is none that serves over HTTP.
    """
    return _named(servers(), "--backend", name)


def _named(engines: list[ExternalEngine], option: str, name: str) -> ExternalEngine:
    by_name = {engine.name: engine for engine in engines}
    if name not in by_name:
        raise ValueError(f"{option} {name} is none of {', '.join(by_name)}.")
    return by_name[name]
